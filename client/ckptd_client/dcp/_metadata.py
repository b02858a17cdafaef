"""What a ckptd checkpoint holds, as DCP's Metadata, and which image to read each of its boxes from."""

from collections.abc import Container, Iterable, Mapping
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from ckptd.shared.format.boxes import is_whole
from ckptd.shared.format.layout import Layout, Leaf, Leaves, Path, TensorEntry
from ckptd.shared.format.placement import Shape
from ckptd.shared.format.tensor_holders import FirstHolders
from ckptd_client._state.reshard import Saved
from ckptd_client._state.tensors import DTYPE_OF


class Content(NamedTuple):
    """Of a checkpoint, for one rank."""

    metadata: Metadata
    boxes: dict[str, dict[Shape, Saved]]  # by name and offsets
    leaves: dict[str, Leaf]
    lowest: dict[str, dict[Shape, Saved]]  # of what replicas saved in full: the same boxes, of the lowest ranks

    def of_the_lowest(self, names: Container[str]) -> "Content":
        """With the boxes of the lowest ranks for these names."""
        return self._replace(boxes={n: self.lowest[n] if n in names else found for n, found in self.boxes.items()})


def content_of(
    layouts: Mapping[int, Layout], leaves: Mapping[int, Leaves], rank: int, alike: Container[str] = ()
) -> Content:
    """What the layouts add up to. rank: whose own image comes first, then the others in order.

    So each rank of a job of the old size gets back the plain tensors and values that it saved itself. A tensor whose
    boxes don't add up to it is not listed, so that DCP finds it missing. Of tensors of one name that parts of the job
    hold, each its own, the one that comes first is listed. alike: names of what replicas saved in full.
    """
    boxes: dict[str, dict[Shape, Saved]] = {}
    everybody: dict[str, list[Saved]] = {}
    paths: dict[str, Path] = {}
    plain: dict[str, Leaf] = {}
    first = FirstHolders()
    for number in sorted(layouts, key=lambda r: (r != rank, r)):
        layout = layouts[number]
        own: dict[str, list[TensorEntry]] = {}
        for entry in layout.tensors:
            own.setdefault(entry.name, []).append(entry)
        own |= {name: own[owner] for name, owner in layout.aliases.items()}
        for name, entries in own.items():
            if not first.takes(layout, name):
                continue
            _add(boxes.setdefault(name, {}), number, entries)
            if name in alike:
                everybody.setdefault(name, []).extend(Saved(number, entry) for entry in entries)
        plain = leaves[number].leaves | plain
        paths = layout.paths | paths
    boxes = {name: alike for name, alike in boxes.items() if is_whole(saved.entry for saved in alike.values())}
    plain = {name: leaf for name, leaf in plain.items() if name not in boxes}
    listed = {name: _tensor(alike) for name, alike in boxes.items()}
    mapping = {n: tuple(str(k) if kind in "ki" else k for kind, k in p) for n, p in paths.items()}
    metadata = Metadata(
        state_dict_metadata={**listed, **{name: BytesStorageMetadata() for name in plain}},
        planner_data={name: path for name, path in mapping.items() if name in listed or name in plain},
        storage_data={},
    )
    lowest = {name: _lowest(boxes[name], found) for name, found in everybody.items() if name in boxes}
    return Content(metadata, boxes, plain, lowest)


def _lowest(boxes: Mapping[Shape, Saved], everybody: Iterable[Saved]) -> dict[Shape, Saved]:
    """Each of the boxes as the lowest rank saved it."""
    found: dict[object, Saved] = {}
    for saved in sorted(everybody, key=lambda one: one.rank):
        found.setdefault((_kind(saved.entry), saved.box), saved)
    return {offsets: found[_kind(saved.entry), saved.box] for offsets, saved in boxes.items()}


def _kind(entry: TensorEntry) -> tuple[str, Shape]:
    return entry.dtype, entry.global_shape


def _add(alike: dict[Shape, Saved], rank: int, entries: list[TensorEntry]) -> None:
    """The boxes of a rank, of which those count that are of the same tensor as the first one's, once each."""
    for entry in entries:
        first = next(iter(alike.values())).entry if alike else entry
        if _kind(entry) == _kind(first) and (entry.nbytes or 0 in entry.global_shape):
            alike.setdefault(entry.offsets, Saved(rank, entry))


def _tensor(boxes: Mapping[Shape, Saved]) -> TensorStorageMetadata:
    entry = next(iter(boxes.values())).entry
    chunks = [
        ChunkStorageMetadata(torch.Size(saved.entry.offsets), torch.Size(saved.entry.sizes)) for saved in boxes.values()
    ]
    return TensorStorageMetadata(TensorProperties(DTYPE_OF[entry.dtype]), torch.Size(entry.global_shape), chunks)
