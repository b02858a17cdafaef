"""What a state needs of a checkpoint on the store, by the index of its records: the boxes of some images, not of all.

What is not found there is sought in all images, by the caller.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ckptd.shared.format.layout import Leaves, Planned, TensorEntry, decode_leaves
from ckptd.shared.format.record_index import RecordIndex
from ckptd.shared.format.stored_records import StoredRecords
from ckptd_client._load.fit import boxes_wanted
from ckptd_client._load.per_rank import Resized, whole_in
from ckptd_client._load.saved_names import Common, OtherRanksNeededError, Saves, assembled, in_order, ties_of
from ckptd_client._load.sought import Sought
from ckptd_client._local.rank import Group as Ranks
from ckptd_client._state.naming import Named, listed
from ckptd_client._state.replica_choice import held_alike
from ckptd_client._state.reshard import Box, Saved
from ckptd_client._state.sharded import is_dtensor
from ckptd_client._state.tensors import is_tensor
from ckptd_client._state.tree import Flat, flatten

_MOST_COMPARED = 16  # of the ranks that have a tensor whole, to say whether all have one value


class Needed(NamedTuple):
    """The saved values, and the ranks of whose images they are."""

    saves: Saves
    ranks: list[int]


def needed_saves(records: StoredRecords, index: RecordIndex, state: Any, group: Ranks, named: Named) -> Needed:
    """The saved values for a state. Blocks for the votes of the ranks that have them.

    Raises OtherRanksNeededError where parts of the job hold a tensor of one name each: which one is meant all records
    together say. Raises DamagedError, OSError.
    """
    like = group.rank if group.rank < len(records) else 0
    own = records[like]
    leaves = decode_leaves(own.leaves, where=records.files.where(own.name))
    sought, flat = Sought(index, like, named.is_own), flatten(state, is_tensor)
    sought.wanted = _wanted_by(sought, flat, leaves)
    if several := sought.held_by_several():
        raise OtherRanksNeededError(f"{listed(several)}: parts of the job hold a tensor of this name each")
    layouts = sought.layouts(records)
    common = _common(sought, group.world_size)
    if group.world_size != len(records):
        holders = _whole(sought, flat, named, common.alike)
        common = common._replace(resized=_several(records, sought, group.world_size, holders, named))
    ordered = in_order(layouts.values(), like)
    saves = assembled(ordered, common, leaves, rank=like, me=group.rank, named=named, world_size=group.world_size)
    kinds = {name: [_nothing_of(like, sought.tensors[name])] for name in sought.wanted if name not in saves.boxes}
    if named.per_rank:
        kinds = {name: found for name, found in kinds.items() if not named.is_own(name)}
    return Needed(replace(saves, boxes=saves.boxes | kinds, some=True), sorted(layouts))


def _wanted_by(sought: Sought, flat: Flat, leaves: Leaves) -> dict[str, list[Box]]:
    """The boxes that a state wants of the tensors that are no plain values of this rank."""
    here = dict(zip(flat.names, flat.values, strict=True))
    owners = tuple(".".join(str(key) for _, key in prefix) + "." for prefix, _ in flat.statefuls)
    known = sought.tensors.keys() - leaves.leaves.keys()
    names = [name for name in sought.tensors if name in known and (name in here or name.startswith(owners))]
    return {name: list(boxes_wanted(here.get(name), sought.tensors[name], sought.paths[name], flat)) for name in names}


def _whole(sought: Sought, flat: Flat, named: Named, alike: Mapping[str, str]) -> dict[str, list[int]]:
    """The ranks, more than one, that have each wanted tensor whole by its placement, if that may matter to a user.

    alike: names of which it does not, since their replicas were compared when they were saved.
    """
    here = dict(zip(flat.names, flat.values, strict=True))
    found: dict[str, list[int]] = {}
    for name in sought.wanted:
        if name in alike or named.is_common(name) or named.is_own(name) or is_dtensor(here.get(name)):
            continue
        for kind in sought.kinds:
            owner = kind.said.aliases.get(name, name)
            if kind.is_whole(owner):
                found.setdefault(name, []).extend(kind.ranks_with(owner))
    return {name: sorted(ranks) for name, ranks in found.items() if len(ranks) > 1}


def _common(sought: Sought, world_size: int) -> Common:
    """What all layouts say together, without the values of ranks that are gone."""
    bare = sought.bare
    expected = set(bare[0].paths)
    if bare[0].world_size != world_size:
        expected = expected.intersection(*(layout.paths for layout in bare))
    return Common(sought.paths, expected, ties_of(bare), held_alike(bare, world_size), None)


def _nothing_of(rank: int, planned: Planned) -> Saved:
    """A box without elements, which says what the tensor is."""
    nowhere = (0,) * len(planned.global_shape)
    return Saved(rank, TensorEntry(planned.name, planned.dtype, planned.global_shape, nowhere, nowhere, 0, 0))


def _several(
    records: StoredRecords, sought: Sought, world_size: int, holders: Mapping[str, list[int]], named: Named
) -> Resized:
    """Names that several ranks of a job of another size saved: of those that each has whole some are compared.

    holders: the ranks that have these names whole.
    """
    sampled = {name: _sample(ranks) for name, ranks in holders.items()}
    chosen = sorted({rank for ranks in sampled.values() for rank in ranks})
    records.fetch(chosen)
    there = {rank: whole_in(records.layout(rank)) for rank in chosen}
    held = {
        name: [Saved(rank, there[rank][name]) for rank in ranks if name in there[rank]]
        for name, ranks in sampled.items()
    }
    some = [name for name, found in held.items() if len(found) == len(sampled[name]) < len(holders[name])]
    return Resized(
        saved=len(records), world_size=world_size,
        tensors={name: found for name, found in held.items() if len(found) > 1},
        differing={
            name: tuple(ranks)
            for name, ranks in sought.index.differing.items()
            if not named.is_own(name) and not named.is_common(name)
        },
        dropped=_dropped(sought, world_size, named), holders={name: tuple(holders[name]) for name in some},
    )  # fmt: skip


def _dropped(sought: Sought, world_size: int, named: Named) -> dict[str, tuple[int, ...]]:
    """Per-rank names of ranks that are gone."""
    found: dict[str, list[int]] = {}
    for kind in sought.kinds if named.per_rank else ():
        gone = [rank for rank in kind.ranks if rank >= world_size]
        for name in filter(named.is_own, kind.said.paths if gone else ()):
            found.setdefault(name, []).extend(gone)
    return {name: tuple(sorted(ranks)) for name, ranks in found.items()}


def _sample(ranks: Sequence[int]) -> list[int]:
    """Some of them, the first and the last among them."""
    last = len(ranks) - 1
    return sorted({ranks[at * last // (_MOST_COMPARED - 1)] for at in range(_MOST_COMPARED)})
