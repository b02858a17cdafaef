"""Which bytes of which files make a whole tensor. Pure: layouts in, tensors and pieces of copying out.

A rank's box of a tensor is contiguous in its file, but in the whole tensor it may lie in many runs. Work is cut into
pieces: each is contiguous in the output and needs one contiguous range of each file that has a part in it.
"""

import heapq
import itertools
import math
from collections.abc import Container, Iterable, Iterator, Sequence

import msgspec

from ckptd.shared.base.errors import DamagedError
from ckptd.shared.format.boxes import overlap
from ckptd.shared.format.digest import BLOCK_NBYTES
from ckptd.shared.format.dtypes import itemsize
from ckptd.shared.format.layout import Layout, TensorEntry, box_nbytes, contiguous_strides
from ckptd.shared.format.placement import Shape
from ckptd.shared.format.tensor_holders import FirstHolders

PIECE_NBYTES = 4 << 20  # at most, of what is read and of what is written
_FILES_NAMED = 4


class Box(msgspec.Struct, frozen=True, array_like=True):
    """A part of a tensor, contiguous in its file."""

    file: int  # index of the layout
    start: int  # byte in the file
    offsets: Shape
    sizes: Shape


class Tensor(msgspec.Struct, frozen=True):
    """A whole tensor and the boxes that tile it, each once."""

    name: str
    dtype: str  # safetensors code
    shape: Shape
    boxes: tuple[Box, ...]
    others: "tuple[Tensor, ...]" = ()  # of older checkpoints, alike but for their boxes: it is averaged with these

    @property
    def nbytes(self) -> int:
        """Bytes of the whole."""
        return math.prod(self.shape) * itemsize(self.dtype)


class Target(msgspec.Struct, frozen=True):
    """Where a tensor goes: an output file, the byte in it, and the dtype it has there."""

    tensor: Tensor
    file: int  # index of the output file
    start: int
    dtype: str


class FilePlan(msgspec.Struct, frozen=True):
    """An output file: its size, the bytes that are made here, by offset, and the tensors that fill the rest."""

    name: str
    nbytes: int
    blobs: tuple[tuple[int, bytes], ...]
    targets: tuple[tuple[Tensor, str, int], ...]  # tensor, the dtype it gets, where it begins
    names: tuple[str, ...]  # of its tensors, in the order of the state


class Part(msgspec.Struct, frozen=True, array_like=True):
    """A contiguous range of a file, and the equal runs into which it falls in its piece, outermost loop first."""

    file: int
    start: int
    nbytes: int
    at: int  # byte in the piece where the first run begins
    run_nbytes: int
    loops: tuple[tuple[int, int], ...] = ()  # (how often, bytes from one begin to the next in the piece)


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """Bytes start to start + nbytes of a target's whole tensor, in the dtype of the source."""

    target: Target
    start: int
    nbytes: int
    parts: tuple[Part, ...]
    others: tuple[tuple[Part, ...], ...] = ()  # of the tensors that it is averaged with


# -- tensors from layouts --


def whole_tensors(layouts: Sequence[Layout], names: Container[str]) -> dict[str, Tensor]:
    """The tensors of these names, in the order of the ranks' images. Tied names have the same one.

    A box that several ranks have is taken from the first; of tensors of one name that parts of the job hold, each its
    own, that of the first; a tied name has on each rank the box of its holder there.
    Raises DamagedError, naming tensor and files, when ranks disagree about a tensor or when the boxes leave a gap or
    overlap.
    """
    found: dict[str, list[tuple[int, TensorEntry]]] = {}
    first = FirstHolders()
    for index, layout in enumerate(layouts):
        for name, entry in _entries(layout):
            if name in names and first.takes(layout, name):
                found.setdefault(name, []).append((index, entry))
    by_boxes: dict[tuple[Box, ...], Tensor] = {}
    tensors: dict[str, Tensor] = {}
    for name, entries in found.items():
        tensor = _whole(name, entries, layouts)
        tensors[name] = by_boxes.setdefault(tensor.boxes, tensor) if tensor.boxes else tensor
    return tensors


def _entries(layout: Layout) -> Iterator[tuple[str, TensorEntry]]:
    """Every name of a rank and its boxes, tied names too."""
    own: dict[str, list[TensorEntry]] = {}
    for entry in layout.tensors:
        own.setdefault(entry.name, []).append(entry)
        yield entry.name, entry
    for name, owner in layout.aliases.items():
        if owner not in own:
            raise DamagedError(f"{layout.file}: {name!r} is tied to {owner!r}, which is not there")
        yield from ((name, entry) for entry in own[owner])


def _whole(name: str, entries: list[tuple[int, TensorEntry]], layouts: Sequence[Layout]) -> Tensor:
    file, first = entries[0]
    boxes: dict[tuple[Shape, Shape], Box] = {}
    for index, entry in entries:
        if (entry.dtype, entry.global_shape) != (first.dtype, first.global_shape):
            raise DamagedError(
                f"tensor {name!r}: {first.dtype} {list(first.global_shape)} in {layouts[file].file}, "
                f"{entry.dtype} {list(entry.global_shape)} in {layouts[index].file}",
                hint="leave it out with --only, or export a checkpoint in which ranks agree",
            )
        if entry.nbytes:
            boxes.setdefault((entry.offsets, entry.sizes), Box(index, entry.data_offset, entry.offsets, entry.sizes))
    tensor = Tensor(name, first.dtype, first.global_shape, tuple(boxes.values()))
    _check_tiling(tensor, [layouts[index].file for index, _ in entries], layouts)
    return tensor


def _check_tiling(tensor: Tensor, files: list[str], layouts: Sequence[Layout]) -> None:
    """Boxes that don't overlap and have the volume of the whole leave no gap."""
    both = overlap(tensor.boxes)
    if both is not None:
        one, other = both
        raise DamagedError(
            f"tensor {tensor.name!r}: {_range(one)} in {layouts[one.file].file} and {_range(other)} in "
            f"{layouts[other.file].file} overlap",
            hint="the ranks split it in ways that contradict each other; leave it out with --only",
        )
    there, needed = sum(math.prod(box.sizes) for box in tensor.boxes), math.prod(tensor.shape)
    if there != needed:
        dots = ", .." if len(files) > _FILES_NAMED else ""
        raise DamagedError(
            f"tensor {tensor.name!r} {list(tensor.shape)}: {needed - there} of {needed} elements are in no file; "
            f"{there} are in {', '.join(files[:_FILES_NAMED]) + dots}",
            hint="no rank saved them; leave the tensor out with --only",
        )


def _range(box: Box) -> str:
    return "[" + ", ".join(f"{o}:{o + s}" for o, s in zip(box.offsets, box.sizes, strict=True)) + "]"


def rows_of(tensor: Tensor, first: int, last: int) -> Tensor:
    """Rows first to last - 1, as a tensor."""
    boxes = []
    for box in tensor.boxes:
        begin, end = max(first, box.offsets[0]), min(last, box.offsets[0] + box.sizes[0])
        if begin < end:
            start = box.start + (begin - box.offsets[0]) * box_nbytes(tensor.dtype, box.sizes[1:])
            boxes.append(Box(box.file, start, (begin - first, *box.offsets[1:]), (end - begin, *box.sizes[1:])))
    others = tuple(rows_of(other, first, last) for other in tensor.others)
    return Tensor(tensor.name, tensor.dtype, (last - first, *tensor.shape[1:]), tuple(boxes), others)


# -- pieces from tensors --


def batches(targets: Iterable[Target], piece_nbytes: int = PIECE_NBYTES) -> Iterator[list[Piece]]:
    """All copying, in an order that reads every block once if a block of each file that a tensor is cut across fits.

    Goes through all files side by side: the first block of each, then the second. Pieces of one batch
    begin in the same block of one file, or are a single one of a tensor that is cut across.
    """
    runs: dict[int, list[tuple[Box, Target]]] = {}
    across: list[Target] = []
    averaged: list[Target] = []
    for target in targets:
        if target.tensor.others:
            averaged.append(target)
        elif all(_is_run(box, target.tensor.shape) for box in target.tensor.boxes):
            for box in target.tensor.boxes:
                runs.setdefault(box.file, []).append((box, target))
        else:
            across.append(target)
    streams = [_file_pieces(runs[file], piece_nbytes) for file in sorted(runs)]
    across.sort(key=lambda target: min(box.start for box in target.tensor.boxes))
    streams.append(itertools.chain.from_iterable(_slab_pieces(target, piece_nbytes) for target in across))
    for _, batch in itertools.groupby(heapq.merge(*streams, key=_block), key=_batch_key):
        yield list(batch)
    averaged.sort(key=lambda target: min((box.file, box.start) for box in target.tensor.boxes))
    for target in averaged:
        yield from ([piece] for piece in _averaged_pieces(target, piece_nbytes))


def _file_pieces(runs: list[tuple[Box, Target]], piece_nbytes: int) -> Iterator[Piece]:
    for box, target in sorted(runs, key=lambda run: run[0].start):
        yield from _run_pieces(box, target, piece_nbytes)


def _block(piece: Piece) -> int:
    return min(part.start for part in piece.parts) // BLOCK_NBYTES


def _batch_key(piece: Piece) -> tuple[int, int]:
    if len(piece.parts) > 1:
        return -1 - piece.target.file, piece.target.start + piece.start
    return piece.parts[0].file, _block(piece)


def _is_run(box: Box, shape: Shape) -> bool:
    """Whether the box is contiguous in the whole: single indices, then one range, then all."""
    cut = next((dim for dim, size in enumerate(box.sizes) if size != 1), len(shape))
    return box.sizes[cut + 1 :] == shape[cut + 1 :]


def _run_pieces(box: Box, target: Target, piece_nbytes: int) -> Iterator[Piece]:
    """Pieces that end at multiples of their size in the output file, so that whole pages are written."""
    item, out_item = itemsize(target.tensor.dtype), itemsize(target.dtype)
    per_piece = max(1, piece_nbytes // max(item, out_item))
    begin = sum(o * stride for o, stride in zip(box.offsets, contiguous_strides(target.tensor.shape), strict=True))
    done, count = 0, math.prod(box.sizes)
    while done < count:
        in_file = target.start // out_item + begin + done
        take = min(per_piece - in_file % per_piece, count - done)
        part = Part(box.file, box.start + done * item, take * item, 0, take * item)
        yield Piece(target, (begin + done) * item, take * item, (part,))
        done += take


def _averaged_pieces(target: Target, piece_nbytes: int) -> Iterator[Piece]:
    """Slabs depend on the shape alone: those of all checkpoints are the same, whatever their boxes."""
    tensors = (target.tensor, *target.tensor.others)
    slabs = [_slab_pieces(msgspec.structs.replace(target, tensor=_with_dims(one)), piece_nbytes) for one in tensors]
    for piece, *others in zip(*slabs, strict=True):
        yield msgspec.structs.replace(piece, target=target, others=tuple(one.parts for one in others))


def _with_dims(tensor: Tensor) -> Tensor:
    """A single element as a row of one: a slab has a dimension."""
    if tensor.shape:
        return tensor
    boxes = tuple(Box(box.file, box.start, (0,), (1,)) for box in tensor.boxes)
    return msgspec.structs.replace(tensor, shape=(1,), boxes=boxes)


class _Slab(msgspec.Struct, frozen=True):
    """A contiguous range of a tensor: fixed indices, then indices first to last - 1 of the next dimension, then all."""

    fixed: tuple[int, ...]
    first: int
    last: int


def _slab_pieces(target: Target, piece_nbytes: int) -> Iterator[Piece]:
    tensor = target.tensor
    item, strides = itemsize(tensor.dtype), contiguous_strides(tensor.shape)
    for slab in _slabs(tensor.shape, max(1, piece_nbytes // max(item, itemsize(target.dtype)))):
        dim = len(slab.fixed)
        start = slab.first * strides[dim] + sum(i * stride for i, stride in zip(slab.fixed, strides, strict=False))
        parts = (_part(box, tensor, slab, strides) for box in tensor.boxes)
        yield Piece(target, start * item, (slab.last - slab.first) * strides[dim] * item, tuple(p for p in parts if p))


def _slabs(shape: Shape, elements: int) -> Iterator[_Slab]:
    """The whole, in ranges of at most so many elements, each along the outermost dimension that allows it."""
    strides = contiguous_strides(shape)
    dim = next(dim for dim, stride in enumerate(strides) if stride <= elements)
    step = elements // strides[dim]
    for fixed in itertools.product(*(range(size) for size in shape[:dim])):
        for first in range(0, shape[dim], step):
            yield _Slab(fixed, first, min(first + step, shape[dim]))


def _part(box: Box, tensor: Tensor, slab: _Slab, strides: list[int]) -> Part | None:
    """The part of the box inside the slab, contiguous in the box too; None if there is none."""
    dim, item = len(slab.fixed), itemsize(tensor.dtype)
    inside = [i - offset for i, offset in zip(slab.fixed, box.offsets, strict=False)]
    first, last = max(slab.first, box.offsets[dim]), min(slab.last, box.offsets[dim] + box.sizes[dim])
    if first >= last or any(not 0 <= i < size for i, size in zip(inside, box.sizes, strict=False)):
        return None
    box_strides = contiguous_strides(box.sizes)
    inside.append(first - box.offsets[dim])
    at = (first - slab.first) * strides[dim]
    at += sum(o * stride for o, stride in zip(box.offsets[dim + 1 :], strides[dim + 1 :], strict=True))
    sizes = (last - first, *box.sizes[dim + 1 :])
    run, loops = _runs(sizes, tensor.shape[dim:], strides[dim:])
    return Part(
        file=box.file, start=box.start + item * sum(i * s for i, s in zip(inside, box_strides, strict=False)),
        nbytes=item * math.prod(sizes), at=at * item, run_nbytes=run * item,
        loops=tuple((count, stride * item) for count, stride in loops),
    )  # fmt: skip


def _runs(sizes: Sequence[int], shape: Sequence[int], strides: Sequence[int]) -> tuple[int, list[tuple[int, int]]]:
    """Elements of one run of a box, and the loops (count, stride) over its runs."""
    dim = len(sizes) - 1
    while dim > 0 and sizes[dim] == shape[dim]:
        dim -= 1
    run = sizes[dim] * strides[dim]
    return run, [(sizes[d], strides[d]) for d in range(dim) if sizes[d] > 1]
