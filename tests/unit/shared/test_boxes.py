"""Whether boxes tile a tensor, against a count of each element."""

import itertools
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from ckptd.shared.format.boxes import overlap, tile


class Box(NamedTuple):
    offsets: tuple
    sizes: tuple


def elements(box):
    return set(itertools.product(*(range(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))))


@st.composite
def cases(draw):
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    boxes = []
    for _ in range(draw(st.integers(0, 5))):
        offsets = tuple(draw(st.integers(0, size)) for size in shape)
        boxes.append(Box(offsets, tuple(draw(st.integers(0, g - o)) for o, g in zip(offsets, shape, strict=True))))
    return shape, boxes


@st.composite
def tilings(draw):
    """A tensor cut in two again and again, so that it is whole; as a rule no grid."""
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    boxes = [Box((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 6)) if shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, box.sizes[dim]))
        for start, size in ((0, at), (at, box.sizes[dim] - at)):
            offsets, sizes = list(box.offsets), list(box.sizes)
            offsets[dim], sizes[dim] = offsets[dim] + start, size
            boxes.append(Box(tuple(offsets), tuple(sizes)))
    return shape, boxes


@given(cases() | tilings())
def test_equals_a_count_of_the_elements(case):
    shape, boxes = case
    counts = [len(elements(box)) for box in boxes]
    union = set().union(*map(elements, boxes))
    assert (overlap(boxes) is None) == (len(union) == sum(counts))
    assert tile(shape, boxes) == (len(union) == sum(counts) and union == elements(Box((0,) * len(shape), shape)))
    both = overlap(boxes)
    assert both is None or elements(both[0]) & elements(both[1])


@given(tilings())
def test_what_was_cut_is_whole(case):
    assert tile(*case)


def test_equal_volumes_do_not_make_a_whole():
    assert not tile((8,), [Box((0,), (5,)), Box((3,), (3,))])
