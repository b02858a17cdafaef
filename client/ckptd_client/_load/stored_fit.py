"""Fits a checkpoint on the store to a state: by what the index of its records says is needed, else by all records."""

import contextlib
from collections.abc import Callable
from typing import Any

from ckptd.shared.format.layout import Leaves, decode_leaves
from ckptd.shared.format.manifest import FileRecord
from ckptd.shared.format.stored_records import StoredRecords
from ckptd_client._load.fit import Fit, fit
from ckptd_client._load.needed import needed_saves
from ckptd_client._load.reader import check_files
from ckptd_client._load.saved_names import OtherRanksNeededError, Saves, saves_of
from ckptd_client._load.sought import index_of
from ckptd_client._local.rank import Group
from ckptd_client._state.naming import Named
from ckptd_client._state.pickle import PickleKeys


def fit_to_stored(  # noqa: PLR0913 - keyword-only
    records: StoredRecords, state: Any, group: Group, named: Named, *, where: str, keys: PickleKeys, strict: bool,
    placed: Callable[[Saves], Saves] = lambda saves: saves,
) -> Fit:  # fmt: skip
    """The fit of a state to the images of other ranks. Blocks for their votes. Raises as fit does, and OSError.

    placed: the saves with the state's paths, where these may be others.
    """
    index = index_of(records)
    if index is not None:
        with contextlib.suppress(OtherRanksNeededError):  # all records say more than their index
            needed = needed_saves(records, index, state, group, named)
            check_files(records.files, [records[rank] for rank in needed.ranks])
            return fit(state, placed(needed.saves), where=where, pickle_keys=keys, strict=strict)
    saves = _all_saves(records, group, named)
    return fit(state, placed(saves), where=where, pickle_keys=keys, strict=strict)


def _all_saves(records: StoredRecords, group: Group, named: Named) -> Saves:
    """The names in all images. A rank beyond the saved world size gets the plain values of rank 0."""
    check_files(records.files, records)
    files = [(record, records.files.where(record.name)) for record in records]
    layouts = [records.layout(record.rank) for record, _ in files]
    like = records[group.rank if group.rank < len(records) else 0]
    leaves = _leaves_of(files)
    return saves_of(
        layouts, leaves[like.rank], rank=like.rank, world_size=group.world_size, me=group.rank, named=named,
        of_all=leaves,
    )  # fmt: skip


def _leaves_of(files: list[tuple[FileRecord, str]]) -> dict[int, Leaves]:
    """Plain values by rank; one object for ranks that saved equal bytes."""
    found: dict[bytes, Leaves] = {}
    for record, where in files:
        if record.leaves not in found:
            found[record.leaves] = decode_leaves(record.leaves, where=where)
    return {record.rank: found[record.leaves] for record, _ in files}
