"""Flat ranges of a tensor as boxes. Pure.

ZeRO cuts tensors without regard to their rows: what a rank has is a range of the elements in their order. Such a range
is a few boxes: the rest of a row, whole rows, the beginning of one.
"""

import math
from collections.abc import Iterable, Iterator

from ckptd.checkpoint.export.deepspeed.archives import Range
from ckptd.checkpoint.export.plan import Box, Tensor
from ckptd.shared.base.errors import DamagedError
from ckptd.shared.format.dtypes import itemsize
from ckptd.shared.format.layout import Shape

_HINT = "are the files of one save? leave the tensor out: name with --only what you want"


def whole(name: str, shape: Shape, ranges: Iterable[Range], *, where: str) -> Tensor:
    """The tensor that the ranges make, one after the other; of the last what is too much is padding.

    where: named in errors. Raises DamagedError, naming the tensor, when they are too few or of several dtypes.
    """
    boxes: list[Box] = []
    done, count = 0, math.prod(shape)
    dtype = ""
    for part in ranges:
        dtype = dtype or part.dtype
        if part.dtype != dtype:
            raise DamagedError(f"{where}: tensor {name!r} is {dtype} in one file, {part.dtype} in another", hint=_HINT)
        taken = min(part.elements, count - done)
        at = part.start
        for offsets, sizes in boxes_of(shape, done, done + taken):
            boxes.append(Box(part.file, at, offsets, sizes))
            at += math.prod(sizes) * itemsize(dtype)
        done += taken
    if done != count or not dtype:
        text = f"{where}: tensor {name!r} {list(shape)}: {count - done} of {count} elements are in no file"
        raise DamagedError(text, hint=_HINT)
    return Tensor(name, dtype, shape, tuple(boxes))


def boxes_of(shape: Shape, first: int, last: int) -> Iterator[tuple[Shape, Shape]]:
    """Offsets and sizes of boxes that hold elements first to last - 1, in their order; each is contiguous."""
    if first >= last:
        return
    if len(shape) <= 1:
        yield (first,) * len(shape), (last - first,) * len(shape)
        return
    row = math.prod(shape[1:])
    begin, end = -(-first // row), last // row  # of the rows that are whole
    if begin > end:
        yield from _in_row(shape, end, first, last)
        return
    yield from _in_row(shape, begin - 1, first, begin * row)
    if begin < end:
        yield (begin, *(0 for _ in shape[1:])), (end - begin, *shape[1:])
    yield from _in_row(shape, end, end * row, last)


def _in_row(shape: Shape, index: int, first: int, last: int) -> Iterator[tuple[Shape, Shape]]:
    """Boxes of a range within one row."""
    base = index * math.prod(shape[1:])
    for offsets, sizes in boxes_of(shape[1:], first - base, last - base):
        yield (index, *offsets), (1, *sizes)
