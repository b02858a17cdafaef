"""``Client.save_files``: saves a trainer's own files instead of a state."""

import time
from collections.abc import Mapping

import msgspec

from ckptd.shared.format.layout import VERSION, Leaves, encode
from ckptd.shared.protocol.publication import Publication
from ckptd_client._local.save_record import SaveRecord
from ckptd_client._save.files_plan import make_files_plan
from ckptd_client._save.segment import Plain
from ckptd_client._save.staging import Staging
from ckptd_client.files import TrainerFile

_PLAIN = Plain(leaves=encode(Leaves(VERSION, {})), objects=b"")


def save_files(
    staging: Staging,
    files: Mapping[str, TrainerFile],
    step: int | None,
    publication: Publication | None,
    *,
    drain: bool,
) -> SaveRecord:
    """See Client.save_files."""
    began = time.perf_counter()
    handle = staging.open(staging.numbers.name(staging.numbers.count(), step))
    try:
        saved_for = publication.said if publication is not None else None
        plan = make_files_plan(files, saved_for, staging.group, staging.integrity)
    except BaseException as error:  # a misuse, perhaps on this rank alone: the others must not wait for it
        staging.give_up(handle, error)
        raise
    try:
        segment = staging.fill(plan, plan.flats, _PLAIN.nbytes, owner=handle)
        staging.seal(segment, handle, _PLAIN, drain=drain, publication=_with_names(publication, files))
    except Exception as error:  # noqa: BLE001 - training continues after any error
        staging.give_up(handle, error)
    except BaseException as error:  # for example Ctrl-C: the others must not wait for this rank
        staging.give_up(handle, error)
        raise
    handle.stall_s += time.perf_counter() - began
    staging.stats.stall_s += handle.stall_s
    staging.stats.last_stall_s = handle.stall_s
    return handle


def _with_names(publication: Publication | None, files: Mapping[str, TrainerFile]) -> Publication | None:
    """The publication that this rank sends to its daemon: the directory, and the names of its own files."""
    return msgspec.structs.replace(publication, names=tuple(sorted(files))) if publication is not None else None
