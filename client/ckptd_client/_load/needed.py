"""What a rank needs of a checkpoint on the store, by the index of its records: the boxes of some images, not of all.

The index says for each tensor which ranks can hold a part of what the state wants. Of ranks whose boxes are one the
first in the order of a load is read, the others only where it has not all of the box: the result is that of a load that
reads all. What is not found there is sought in all images, by the caller.
"""

import bisect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec

from ckptd.shared.base.errors import DamagedError
from ckptd.shared.format.layout import Layout, Leaves, Path, Planned, TensorEntry, decode_leaves
from ckptd.shared.format.record_index import Group, Kind, RecordIndex
from ckptd.shared.format.stored_records import StoredRecords
from ckptd.shared.format.tensor_holders import holders_of
from ckptd_client._load.fit import boxes_wanted
from ckptd_client._load.per_rank import Resized, whole_in
from ckptd_client._load.saved_names import Common, OtherRanksNeededError, Saves, assembled, in_order, ties_of
from ckptd_client._local.rank import Group as Ranks
from ckptd_client._state.naming import Named, listed
from ckptd_client._state.replica_choice import held_alike
from ckptd_client._state.reshard import Box, Saved, intersection, subtract
from ckptd_client._state.sharded import is_dtensor
from ckptd_client._state.tensors import is_tensor
from ckptd_client._state.tree import Flat, flatten

log = logging.getLogger("ckptd_client")
_MOST_COMPARED = 16  # of the ranks that have a tensor whole, to say whether all have one value


class Needed(NamedTuple):
    """The saved values, and the ranks of whose images they are."""

    saves: Saves
    ranks: list[int]


def index_of(records: StoredRecords) -> RecordIndex | None:
    """None also where it cannot be read, which is logged: all that it says the records say too."""
    try:
        return records.common
    except (DamagedError, OSError) as error:
        log.warning("ckptd: warning: %s; all votes are read instead", error)
        return None


def needed_saves(records: StoredRecords, index: RecordIndex, state: Any, group: Ranks, named: Named) -> Needed:
    """The saved values for a state. Blocks for the votes of the ranks that have them.

    Raises OtherRanksNeededError where parts of the job hold a tensor of one name each: which one is meant all records
    together say. Raises DamagedError, OSError.
    """
    like = group.rank if group.rank < len(records) else 0
    own = records[like]
    leaves = decode_leaves(own.leaves, where=records.files.where(own.name))
    sought = _Sought(index, leaves, flatten(state, is_tensor), like, named)
    if several := sought.held_by_several():
        raise OtherRanksNeededError(f"{listed(several)}: parts of the job hold a tensor of this name each")
    layouts = _layouts(records, sought)
    common = sought.common(group.world_size)
    if group.world_size != len(records):
        common = common._replace(resized=_several(records, sought, group.world_size, common.alike))
    ordered = in_order(layouts.values(), like)
    saves = assembled(ordered, common, leaves, rank=like, me=group.rank, named=named, world_size=group.world_size)
    kinds = {name: [_nothing_of(like, sought.tensors[name])] for name in sought.wanted if name not in saves.boxes}
    if named.per_rank:
        kinds = {name: found for name, found in kinds.items() if not named.is_own(name)}
    return Needed(replace(saves, boxes=saves.boxes | kinds, some=True), sorted(layouts))


class _Sought:
    """What a state wants of the tensors that the index knows. like: the rank whose own values this one goes on with."""

    def __init__(self, index: RecordIndex, leaves: Leaves, flat: Flat, like: int, named: Named) -> None:
        self.index, self.flat, self.like, self.named = index, flat, like, named
        self.kinds = sorted(index.kinds, key=lambda kind: like not in kind)  # the first that has a name speaks for it
        self.tensors: dict[str, Planned] = {}  # tied names too
        self.paths: dict[str, Path] = {}
        for kind in self.kinds:
            self.paths = kind.said.paths | self.paths
            known = kind.said.tensors
            tied = {name: known[owner] for name, owner in kind.said.aliases.items() if owner in known}
            self.tensors = known | tied | self.tensors
        self.tensors = {name: one for name, one in self.tensors.items() if name not in leaves.leaves}
        self._here = dict(zip(flat.names, flat.values, strict=True))
        owners = [".".join(str(key) for _, key in prefix) + "." for prefix, _ in flat.statefuls]
        names = [name for name in self.tensors if name in self._here or name.startswith(tuple(owners))]
        self.wanted = {
            name: list(boxes_wanted(self._here.get(name), self.tensors[name], self.paths[name], flat)) for name in names
        }

    def held_by_several(self) -> list[str]:
        """The wanted names that several parts of the job hold, each part its own tensor or the same."""
        holders: dict[str, set[bytes]] = {}
        for bare in map(_without_boxes, self.kinds):
            for name in self.wanted.keys() & bare.paths.keys():
                holders.setdefault(name, set()).add(holders_of(bare, name))
        return sorted(name for name, found in holders.items() if len(found) > 1)

    def groups(self, name: str, box: Box) -> Iterator[Group]:
        """The ranks that can hold elements of a box."""
        for kind in self.kinds:
            owner = kind.said.aliases.get(name, name)
            if owner in kind.said.tensors and _are_alike(kind.said.tensors[owner], self.tensors[name]):
                yield from kind.groups(owner, *box)

    def whole(self, alike: Mapping[str, str]) -> dict[str, list[int]]:
        """The ranks, more than one, that have each wanted tensor whole by its placement, if that may matter to a user.

        alike: names of which it does not, since their replicas were compared when they were saved.
        """
        found: dict[str, list[int]] = {}
        for name in self.wanted:
            known = name in alike or self.named.is_common(name) or self.named.is_own(name)
            if known or is_dtensor(self._here.get(name)):
                continue
            for kind in self.kinds:
                owner = kind.said.aliases.get(name, name)
                if kind.is_whole(owner):
                    found.setdefault(name, []).extend(kind.ranks_with(owner))
        return {name: sorted(ranks) for name, ranks in found.items() if len(ranks) > 1}

    def common(self, world_size: int) -> Common:
        """What all layouts say together, without the values of ranks that are gone."""
        bare = [_without_boxes(kind) for kind in self.kinds]
        expected = set(bare[0].paths)
        if bare[0].world_size != world_size:
            expected = expected.intersection(*(layout.paths for layout in bare))
        return Common(self.paths, expected, ties_of(bare), held_alike(bare, world_size), None)


def _without_boxes(kind: Kind) -> Layout:
    said = kind.said
    tensors = [TensorEntry(one.name, one.dtype, one.global_shape, (), (), 0, 0) for one in said.tensors.values()]
    return Layout(
        version=0, file="", rank=said.rank, world_size=said.world_size, header_nbytes=0, image_nbytes=0, plan_id="",
        tensors=tensors, paths=said.paths, aliases=said.aliases, held_alike=said.held_alike, holders=said.holders,
    )  # fmt: skip


def _are_alike(one: Planned, other: Planned) -> bool:
    return (one.dtype, one.global_shape) == (other.dtype, other.global_shape)


def _nothing_of(rank: int, planned: Planned) -> Saved:
    """A box without elements, which says what the tensor is."""
    nowhere = (0,) * len(planned.global_shape)
    return Saved(rank, TensorEntry(planned.name, planned.dtype, planned.global_shape, nowhere, nowhere, 0, 0))


def _layouts(records: StoredRecords, sought: _Sought) -> dict[int, Layout]:
    """Those that hold what is wanted, by rank, with no other box; and that of the rank itself."""
    lowest = held_alike(map(_without_boxes, sought.kinds), 0).keys()  # of these the lowest rank's may be taken
    asked = [
        (name, box, group)
        for name, boxes in sought.wanted.items()
        for box in boxes
        if not sought.named.is_own(name)
        for group in sought.groups(name, box)
    ]
    found = _Found(records, sought)
    found.add({sought.like}, whole=True)
    found.add(rank for name, _, group in asked for rank in _first(group, sought.like, lowest=name in lowest))
    found.add(
        rank
        for name, box, group in asked
        if group.box is not None
        for one in _first(group, sought.like, lowest=name in lowest)
        if not found.has(one, name, intersection(box, Box(*group.box)))
        for rank in group.ranks
    )
    return found.layouts


def _first(group: Group, like: int, *, lowest: bool) -> Sequence[int]:
    """Of ranks that can hold the same, those that count; all where their boxes are not known."""
    if group.box is None:
        return group.ranks
    at = bisect.bisect_left(group.ranks, like)
    own = [like] if at < len(group.ranks) and group.ranks[at] == like else []
    return [*own, group.ranks[0]] if lowest or not own else own


class _Found:
    """Layouts that were read."""

    def __init__(self, records: StoredRecords, sought: _Sought) -> None:
        self.layouts: dict[int, Layout] = {}
        self._records, self._sought = records, sought
        self._entries: dict[int, dict[str, list[TensorEntry]]] = {}

    def add(self, ranks: Iterable[int], *, whole: bool = False) -> None:
        """Reads the votes of those that are new. whole: with the boxes that the state does not want, too."""
        new = sorted(set(ranks) - self.layouts.keys())
        self._records.fetch(new)
        for rank in new:
            layout = self._records.layout(rank)
            self.layouts[rank] = layout if whole else self._pruned(layout)

    def has(self, rank: int, name: str, box: Box | None) -> bool:
        """Whether a rank's boxes of a tensor have all of a box."""
        layout, left = self.layouts[rank], [] if box is None else [box]
        if rank not in self._entries:
            self._entries[rank] = {}
            for entry in layout.tensors:
                self._entries[rank].setdefault(entry.name, []).append(entry)
        for entry in self._entries[rank].get(layout.aliases.get(name, name), ()):
            there = Box(entry.offsets, entry.sizes)
            common = [(piece, intersection(piece, there)) for piece in left]
            left = [rest for piece, part in common for rest in ([piece] if part is None else subtract(piece, part))]
        return not left

    def _pruned(self, layout: Layout) -> Layout:
        tied: dict[str, list[str]] = {}
        for name, owner in layout.aliases.items():
            tied.setdefault(owner, []).append(name)
        kept = [one for one in layout.tensors if any(map(self._wants(one), [one.name, *tied.get(one.name, ())]))]
        return msgspec.structs.replace(layout, tensors=kept)

    def _wants(self, entry: TensorEntry) -> Callable[[str], bool]:
        box = Box(entry.offsets, entry.sizes)

        def wants(name: str) -> bool:
            if name not in self._sought.wanted or self._sought.tensors[name].global_shape != entry.global_shape:
                return False
            return any(intersection(box, one) is not None for one in self._sought.wanted[name])

        return wants


def _several(records: StoredRecords, sought: _Sought, world_size: int, alike: Mapping[str, str]) -> Resized:
    """Names that several ranks of a job of another size saved: of those that each has whole some are compared."""
    named, holders = sought.named, sought.whole(alike)
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
        dropped=_dropped(sought, world_size), holders={name: tuple(holders[name]) for name in some},
    )  # fmt: skip


def _dropped(sought: _Sought, world_size: int) -> dict[str, tuple[int, ...]]:
    """Per-rank names of ranks that are gone."""
    found: dict[str, list[int]] = {}
    for kind in sought.kinds if sought.named.per_rank else ():
        gone = [rank for rank in kind.ranks if rank >= world_size]
        for name in filter(sought.named.is_own, kind.said.paths if gone else ()):
            found.setdefault(name, []).extend(gone)
    return {name: tuple(sorted(ranks)) for name, ranks in found.items()}


def _sample(ranks: Sequence[int]) -> list[int]:
    """Some of them, the first and the last among them."""
    last = len(ranks) - 1
    return sorted({ranks[at * last // (_MOST_COMPARED - 1)] for at in range(_MOST_COMPARED)})
