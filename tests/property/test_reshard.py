import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ckptd.shared.format.layout import TensorEntry
from ckptd_client._state.reshard import Box, Saved, cover, intersection, subtract

SHAPES = st.lists(st.integers(1, 7), min_size=0, max_size=4).map(tuple)


@st.composite
def partitions(draw, shape):
    """Boxes that tile a shape: cut again and again along random dims."""
    boxes = [Box((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 5)) if shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        d = draw(st.integers(0, len(shape) - 1))
        if box.sizes[d] < 2:
            boxes.append(box)
            continue
        at = draw(st.integers(1, box.sizes[d] - 1))
        boxes.append(Box(box.offsets, (*box.sizes[:d], at, *box.sizes[d + 1 :])))
        start = (*box.offsets[:d], box.offsets[d] + at, *box.offsets[d + 1 :])
        boxes.append(Box(start, (*box.sizes[:d], box.sizes[d] - at, *box.sizes[d + 1 :])))
    return boxes


def view(array, box):
    """The part of an array that a box names."""
    return array[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))]


@given(st.data(), SHAPES)
def test_any_target_is_filled_from_any_partition(data, shape):
    array = np.arange(1, int(np.prod(shape, dtype=int)) + 1, dtype=np.int32).reshape(shape)
    files, saved = {}, []
    boxes = data.draw(partitions(shape))
    boxes += data.draw(st.lists(st.sampled_from(boxes), max_size=3))  # replicas
    for rank, box in enumerate(boxes):
        files[rank] = bytes(100) + view(array, box).tobytes()
        entry = TensorEntry("t", "I32", shape, box.offsets, box.sizes, 100, len(files[rank]) - 100)
        saved.append(Saved(rank, entry))
    target = data.draw(partitions(shape).flatmap(st.sampled_from))
    runs = cover(target, data.draw(st.permutations(saved)), prefer=data.draw(st.integers(0, len(boxes))))
    out = bytearray(view(array, target).nbytes)
    written = 0
    for rank, source, start, nbytes in runs:
        out[start : start + nbytes] = files[rank][source : source + nbytes]
        written += nbytes
    assert bytes(out) == view(array, target).tobytes()
    assert written == len(out), "a byte was written twice"


@given(st.data(), SHAPES.filter(bool))
def test_what_is_not_saved_is_not_covered(data, shape):
    boxes = data.draw(partitions(shape))
    missing = data.draw(st.sampled_from(boxes))
    saved = [
        Saved(i, TensorEntry("t", "U8", shape, b.offsets, b.sizes, 0, int(np.prod(b.sizes, dtype=int))))
        for i, b in enumerate(boxes)
        if b != missing
    ]
    assert cover(missing, saved, prefer=0) is None
    assert cover(Box((0,) * len(shape), shape), saved, prefer=0) is None


@given(st.data(), SHAPES.filter(bool))
def test_subtract_and_intersection_tile_the_box(data, shape):
    box = Box((0,) * len(shape), shape)
    part = data.draw(partitions(shape).flatmap(st.sampled_from))
    count = np.zeros(shape, dtype=int)
    for chunk in [part, *subtract(box, part)]:
        view(count, chunk)[...] += 1
    assert (count == 1).all()
    assert intersection(box, part) == part


def test_rows_of_whole_lines_are_one_run():
    saved = [Saved(0, TensorEntry("t", "F32", (8, 4), (0, 0), (8, 4), 4096, 128))]
    assert len(cover(Box((2, 0), (3, 4)), saved, prefer=0)) == 1
    assert len(cover(Box((2, 1), (3, 2)), saved, prefer=0)) == 3
