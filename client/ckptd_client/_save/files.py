"""Client.save_files and Client.load_files: a trainer's own files instead of a state. Parts of Client.

Written as functions of Client in a file of their own.
"""
# ruff: noqa: SLF001 - see above

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from ckptd.shared.format.layout import VERSION, Leaves, encode
from ckptd.shared.protocol.publication import Publication
from ckptd_client._save import segments
from ckptd_client._save.files_plan import make_files_plan
from ckptd_client._save.segments import Plain
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
        said = publication.said if publication is not None else None
        plan = make_files_plan(files, said, client.group, client._link.settings.integrity)
    except BaseException as error:  # a misuse, of this rank alone perhaps: the others must not wait for it
        segments.give_up(client, handle, error)
        raise
    try:
        segment = segments.fill(client, plan, plan.flats, _PLAIN.nbytes, owner=handle)
        own = _with_names(publication, files)
        segments.seal(client, segment, handle, _PLAIN, drain=drain, publication=own)
    except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
        segments.give_up(client, handle, error)
    except BaseException as error:  # Ctrl-C, say: the others must not wait for this rank
        segments.give_up(client, handle, error)
        raise
    handle.stall_s += time.perf_counter() - began
    client._stats.stall_s += handle.stall_s
    client._stats.last_stall_s = handle.stall_s
    return handle


def _with_names(publication: Publication | None, files: Mapping[str, TrainerFile]) -> Publication | None:
    """What this rank says to its daemon: the place, and which files of its own may lie beside others there."""
    return msgspec.structs.replace(publication, names=tuple(sorted(files))) if publication is not None else None
