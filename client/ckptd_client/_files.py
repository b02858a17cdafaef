"""Client.save_files and Client.load_files: a trainer's own files instead of a state. Parts of Client.

Written as functions of Client in a file of their own.
"""
# ruff: noqa: SLF001 - see above

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ckptd.protocol.layout import VERSION, Leaves, Publication, encode
from ckptd_client import _segments as segments
from ckptd_client._files_plan import make_files_plan
from ckptd_client._segments import Plain
from ckptd_client.files import TrainerFile
from ckptd_client.handle import SaveHandle

if TYPE_CHECKING:
    from ckptd_client.client import Client

_PLAIN = Plain(leaves=encode(Leaves(VERSION, {})), objects=b"")


def save_files(
    client: "Client",
    files: Mapping[str, TrainerFile],
    step: int | None,
    publication: Publication | None,
    *,
    drain: bool,
) -> SaveHandle:
    began = time.perf_counter()
    number = segments.count(client)
    save = segments.name_save(client, number, step)
    handle = segments.begin(client, save)
    try:
        plan = make_files_plan(files, publication, client.group)
    except BaseException as error:  # a misuse, of this rank alone perhaps: the others must not wait for it
        segments.give_up(client, handle, error)
        raise
    try:
        segment = segments.fill(client, plan, plan.flats, _PLAIN.nbytes, owner=handle)
        segments.seal(client, segment, handle, _PLAIN, drain=drain)
    except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
        segments.give_up(client, handle, error)
    except BaseException as error:  # Ctrl-C, say: the others must not wait for this rank
        segments.give_up(client, handle, error)
        raise
    handle.stall_s += time.perf_counter() - began
    client._stats.stall_s += handle.stall_s
    client._stats.last_stall_s = handle.stall_s
    return handle
