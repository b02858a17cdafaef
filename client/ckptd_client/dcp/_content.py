"""What a ckptd checkpoint holds: DCP's Metadata of it, and where what a load plan asks for lies.

The Metadata name one chunk for each tensor, all of it. So DCP plans one item for each part of a rank's state, in a time
that does not grow with the number of ranks that saved, and this reads the boxes of the ranks that hold it.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from ckptd.shared.base.errors import RestoreError
from ckptd.shared.format.boxes import is_whole
from ckptd.shared.format.layout import Layout, Leaf, Leaves, Path, Planned, TensorEntry
from ckptd.shared.format.tensor_holders import FirstHolders
from ckptd_client._load.checkpoint import Checkpoint
from ckptd_client._load.saved_names import in_order
from ckptd_client._load.sought import Sought
from ckptd_client._state.replica_choice import held_alike
from ckptd_client._state.reshard import Box, Saved, cover
from ckptd_client._state.tensors import DTYPE_OF

log = logging.getLogger("ckptd_client")
Kind = tuple[str, tuple[int, ...]]  # dtype and complete shape


class Content:
    """Of a checkpoint, for one rank. like: whose own image comes first, then the others in order.

    So each rank of a job of the old size gets back the plain tensors and values that it saved itself. Of tensors of one
    name that parts of the job hold, each its own, the one that comes first counts. Blocks for the records of like, or
    where no index says what they have in common, of all. Raises DamagedError, OSError.
    """

    def __init__(self, found: Checkpoint, like: int, world_size: int) -> None:
        self._found, self.like = found, like
        self._own = found.leaves_of(like)
        if found.index is None:
            found.check(range(found.world_size))
        self._sought = Sought(found.index, like) if found.index is not None else None
        ordered = self._sought.bare if self._sought is not None else in_order(found.layouts.values(), like)
        self.alike = held_alike(ordered, world_size)  # how ranks held what every replica saved in full
        self._kinds = _planned(self._sought.tensors) if self._sought is not None else _whole(ordered)
        self.metadata = _metadata(self._kinds, ordered, self._own, found)

    @property
    def tensors(self) -> Iterable[str]:
        """Names."""
        return self._kinds.keys()

    def dtype_of(self, name: str) -> torch.dtype:
        """Of a tensor."""
        return DTYPE_OF[self._kinds[name][0]]

    def leaf(self, name: str) -> Leaf:
        """A plain value: this rank's own, else that of the lowest rank that has one. Blocks for records.

        Raises RestoreError where no rank has one.
        """
        for leaves in self._leaves_with(name):
            if name in leaves.leaves:
                return leaves.leaves[name]
        raise RestoreError(f"no rank saved a value of {name!r}", hint="load an older step")

    def _leaves_with(self, name: str) -> Iterator[Leaves]:
        yield self._own
        if self._sought is not None:
            for kind in self._sought.kinds:
                if name in kind.said.paths and name not in kind.said.tensors:
                    yield self._found.leaves_of(kind.ranks[0])
        yield from (leaves for _, leaves in sorted(self._found.leaves.items()))

    def boxes(self, wanted: Mapping[str, list[Box]]) -> dict[str, list[Saved]]:
        """The saved boxes that have elements of these, by name of the tensor, in the order in which they count.

        Where those that the index names lack elements, those of all records: then no tensor is refused that is whole.
        Blocks for the records of the ranks that hold them. Raises DamagedError where an image of them is missing.
        """
        named = self._named_by_the_index(wanted)
        lacking: set[str] = set()
        if named is not None:
            saved = self._boxes_of(named, wanted)
            lacking = _lacking(wanted, saved)
            if not lacking:
                return saved
        every = self._boxes_of(self._found.layouts, wanted)
        if whole := sorted(lacking - _lacking(wanted, every)):
            log.warning("ckptd: warning: the index of the records lacks ranks with %s; all votes are read", whole)
        return every

    def _boxes_of(self, layouts: Mapping[int, Layout], wanted: Iterable[str]) -> dict[str, list[Saved]]:
        self._found.check(layouts)  # before anything is read
        return _boxes(in_order(layouts.values(), self.like), {name: self._kinds[name] for name in wanted})

    def _named_by_the_index(self, wanted: Mapping[str, list[Box]]) -> dict[int, Layout] | None:
        records = self._found.records
        if self._sought is not None and records is not None:
            self._sought.wanted = dict(wanted)
            if not self._sought.held_by_several():  # which one is meant all records together say
                return self._sought.layouts(records)
        return None


def _lacking(wanted: Mapping[str, list[Box]], saved: Mapping[str, list[Saved]]) -> set[str]:
    """Names of the tensors of which a box has an element that no saved box has."""
    return {n for n, boxes in wanted.items() if any(cover(box, saved[n], prefer=None) is None for box in boxes)}


def _planned(tensors: Mapping[str, Planned]) -> dict[str, Kind]:
    return {name: (one.dtype, one.global_shape) for name, one in tensors.items()}


def _whole(ordered: Sequence[Layout]) -> dict[str, Kind]:
    """Of the tensors whose boxes add up to them: DCP finds the others missing."""
    kinds: dict[str, Kind] = {}
    for _, name, entries in _counting(ordered):
        kinds |= {name: _kind(entries[0])} if name not in kinds and entries else {}
    found = _boxes(ordered, kinds)
    by_place = {name: {one.entry.offsets: one.entry for one in reversed(found[name])} for name in kinds}
    return {name: kind for name, kind in kinds.items() if is_whole(by_place[name].values())}


def _boxes(ordered: Iterable[Layout], kinds: Mapping[str, Kind]) -> dict[str, list[Saved]]:
    """Those of these tensors, tied ones too, that are of the kind."""
    found: dict[str, list[Saved]] = {name: [] for name in kinds}
    for rank, name, entries in _counting(ordered):
        if name in kinds:
            alike = [one for one in entries if _kind(one) == kinds[name] and (one.nbytes or 0 in one.global_shape)]
            found[name] += [Saved(rank, one) for one in alike]
    return found


def _counting(ordered: Iterable[Layout]) -> Iterator[tuple[int, str, list[TensorEntry]]]:
    """Rank, name and boxes: of tensors of one name that parts of the job hold those of the one that comes first."""
    first = FirstHolders()
    for layout in ordered:
        own: dict[str, list[TensorEntry]] = {name: [] for name in layout.holders}  # its part's, if it has no box of it
        for entry in layout.tensors:
            own.setdefault(entry.name, []).append(entry)
        own |= {name: own.get(owner, []) for name, owner in layout.aliases.items()}
        yield from ((layout.rank, name, entries) for name, entries in own.items() if first.takes(layout, name))


def _kind(entry: TensorEntry) -> Kind:
    return entry.dtype, entry.global_shape


def _metadata(kinds: Mapping[str, Kind], ordered: Iterable[Layout], own: Leaves, found: Checkpoint) -> Metadata:
    """ordered: layouts that together have all names, whether or not they have boxes."""
    paths: dict[str, Path] = {}
    planned: set[str] = set()
    for layout in ordered:
        paths = layout.paths | paths
        planned |= {entry.name for entry in layout.tensors} | layout.aliases.keys()
    if found.index is not None:
        plain = own.leaves.keys() | (paths.keys() - planned)
    else:
        plain = own.leaves.keys() | {name for leaves in found.leaves.values() for name in leaves.leaves}
    mapping = {n: tuple(str(k) if kind in "ki" else k for kind, k in p) for n, p in paths.items()}
    listed = {name: _tensor(kind) for name, kind in kinds.items()}
    return Metadata(
        state_dict_metadata={**{name: BytesStorageMetadata() for name in plain}, **listed},
        planner_data={name: path for name, path in mapping.items() if name in listed or name in plain},
        storage_data={},
    )


def _tensor(kind: Kind) -> TensorStorageMetadata:
    dtype, size = DTYPE_OF[kind[0]], torch.Size(kind[1])
    return TensorStorageMetadata(
        TensorProperties(dtype), size, [ChunkStorageMetadata(torch.Size([0] * len(size)), size)]
    )
