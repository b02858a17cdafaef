"""Which images a rank needs for boxes that it wants of tensors, by the index of a checkpoint's records.

The index says for each tensor which ranks can hold a part of a box. Of ranks whose boxes are one the first in the order
of a load is read, the others only where it has not all of the box: the result is that of a load that reads all.
"""

import bisect
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from ckptd.shared.base.errors import DamagedError
from ckptd.shared.format.layout import Layout, Path, Planned, TensorEntry
from ckptd.shared.format.record_index import Group, Kind, RecordIndex
from ckptd.shared.format.stored_records import StoredRecords
from ckptd.shared.format.tensor_holders import holders_of
from ckptd_client._state.replica_choice import held_alike
from ckptd_client._state.reshard import Box, intersection, subtract

log = logging.getLogger("ckptd_client")


def index_of(records: StoredRecords) -> RecordIndex | None:
    """None also where it cannot be read, which is logged: all that it says the records say too."""
    try:
        return records.common
    except (DamagedError, OSError) as error:
        log.warning("ckptd: warning: %s; all votes are read instead", error)
        return None


class Sought:
    """What is wanted of the tensors that the index knows. like: the rank whose own values this one goes on with.

    is_own: whether a name is of what each rank has for itself. wanted: boxes by name, the caller's to say.
    """

    def __init__(self, index: RecordIndex, like: int, is_own: Callable[[str], bool] = lambda _name: False) -> None:
        self.index, self.like, self.is_own = index, like, is_own
        self.kinds = sorted(index.kinds, key=lambda kind: like not in kind)  # the first that has a name speaks for it
        self.tensors: dict[str, Planned] = {}  # tied names too
        self.paths: dict[str, Path] = {}
        for kind in self.kinds:
            self.paths = kind.said.paths | self.paths
            known = kind.said.tensors
            tied = {name: known[owner] for name, owner in kind.said.aliases.items() if owner in known}
            self.tensors = known | tied | self.tensors
        self.wanted: dict[str, list[Box]] = {}

    @property
    def bare(self) -> list[Layout]:
        """What each kind's layouts have alike: no box has a place."""
        return [_without_boxes(kind) for kind in self.kinds]

    def held_by_several(self) -> list[str]:
        """The wanted names that several parts of the job hold, each part its own tensor or the same."""
        holders: dict[str, set[bytes]] = {}
        for bare in self.bare:
            for name in self.wanted.keys() & bare.paths.keys():
                holders.setdefault(name, set()).add(holders_of(bare, name))
        return sorted(name for name, found in holders.items() if len(found) > 1)

    def layouts(self, records: StoredRecords) -> dict[int, Layout]:
        """Those that hold what is wanted, by rank, with no other box; and that of the rank itself. Blocks for votes.

        Raises DamagedError, OSError.
        """
        lowest = held_alike(self.bare, 0).keys()  # of these the lowest rank's may be taken
        asked = [
            (name, box, group)
            for name, boxes in self.wanted.items()
            for box in boxes
            if not self.is_own(name)
            for group in self._groups(name, box)
        ]
        found = _Found(records, self)
        found.add({self.like}, whole=True)
        found.add(rank for name, _, group in asked for rank in _first(group, self.like, lowest=name in lowest))
        found.add(
            rank
            for name, box, group in asked
            if group.box is not None
            for one in _first(group, self.like, lowest=name in lowest)
            if not found.has(one, name, intersection(box, Box(*group.box)))
            for rank in group.ranks
        )
        return found.layouts

    def _groups(self, name: str, box: Box) -> Iterator[Group]:
        """The ranks that can hold elements of a box."""
        for kind in self.kinds:
            owner = kind.said.aliases.get(name, name)
            if owner in kind.said.tensors and _are_alike(kind.said.tensors[owner], self.tensors[name]):
                yield from kind.groups(owner, *box)


def _without_boxes(kind: Kind) -> Layout:
    said = kind.said
    tensors = [TensorEntry(one.name, one.dtype, one.global_shape, (), (), 0, 0) for one in said.tensors.values()]
    return Layout(
        version=0, file="", rank=said.rank, world_size=said.world_size, header_nbytes=0, image_nbytes=0, plan_id="",
        tensors=tensors, paths=said.paths, aliases=said.aliases, held_alike=said.held_alike, holders=said.holders,
    )  # fmt: skip


def _are_alike(one: Planned, other: Planned) -> bool:
    return (one.dtype, one.global_shape) == (other.dtype, other.global_shape)


def _first(group: Group, like: int, *, lowest: bool) -> Sequence[int]:
    """Of ranks that can hold the same, those that count; all where their boxes are not known."""
    if group.box is None:
        return group.ranks
    at = bisect.bisect_left(group.ranks, like)
    own = [like] if at < len(group.ranks) and group.ranks[at] == like else []
    return [*own, group.ranks[0]] if lowest or not own else own


class _Found:
    """Layouts that were read."""

    def __init__(self, records: StoredRecords, sought: Sought) -> None:
        self.layouts: dict[int, Layout] = {}
        self._records, self._sought = records, sought
        self._entries: dict[int, dict[str, list[TensorEntry]]] = {}

    def add(self, ranks: Iterable[int], *, whole: bool = False) -> None:
        """Reads the votes of those that are new. whole: with the boxes that are not wanted, too."""
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
