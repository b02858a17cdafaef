"""Ranges of memory and what of them is copied when: against sets of numbers."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd_client._local.page_division import divide
from ckptd_client._local.page_guard import (
    CALL_NBYTES,
    HUGE_NBYTES,
    Range,
    batches,
    common,
    pieces,
    whole_units,
    without,
)
from ckptd_client._save.late.choice import Choice


@st.composite
def ranges(draw, most=40):
    """In order, without overlaps; some touch."""
    ends = sorted(draw(st.lists(st.integers(0, most), max_size=12, unique=True)))
    return [Range(*pair) for pair in zip(ends[::2], ends[1::2], strict=False)]


def each(found):
    return {n for one in found for n in range(*one)}


@given(ranges(), ranges())
def test_common_and_without_are_those_of_sets(some, others):
    assert each(common(some, others)) == each(some) & each(others)
    assert each(without(some, others)) == each(some) - each(others)
    for found in (common(some, others), without(some, others)):
        assert found == sorted(found)
        assert all(one.start < one.stop for one in found)


@given(
    st.lists(st.tuples(st.integers(0, 12 * HUGE_NBYTES), st.integers(1, 3 * HUGE_NBYTES)), max_size=6),
    st.integers(0, 9000),
)
def test_units_lie_inside_and_none_is_left_out(spans, gap):
    asked = [Range(start, start + nbytes) for start, nbytes in spans]
    united = []
    for one in sorted(asked):
        if united and one.start - united[-1].stop <= gap:
            united[-1] = Range(united[-1].start, max(united[-1].stop, one.stop))
        else:
            united.append(one)
    units = {
        at for at in range(0, 20 * HUGE_NBYTES, HUGE_NBYTES)
        if any(one.start <= at and at + HUGE_NBYTES <= one.stop for one in united)
    }  # fmt: skip
    found = whole_units(asked, gap)
    assert {at for one in found for at in range(*one, HUGE_NBYTES)} == units
    assert all(one.stop < other.start for one, other in itertools.pairwise(found))


@given(st.lists(st.integers(1, 3 * CALL_NBYTES), max_size=5), st.integers(0, 700))
def test_batches_are_the_same_bytes_in_small_calls(large, small):
    rows, to, start = [], 10_000, 99
    for nbytes in [*large, *[7] * small]:
        rows.append((to, start, nbytes))
        to, start = to + nbytes + 3, start + nbytes + 5
    found = list(batches(pieces(rows)))
    assert all(len(batch) <= 512 and int(batch[:, 2].sum()) <= CALL_NBYTES for batch in found)
    joined = []
    for to, start, nbytes in (row for batch in found for row in batch.tolist()):
        if joined and (joined[-1][0] + joined[-1][2], joined[-1][1] + joined[-1][2]) == (to, start):
            joined[-1] = (*joined[-1][:2], joined[-1][2] + nbytes)
        else:
            joined.append((to, start, nbytes))
    assert joined == rows


HALF = HUGE_NBYTES // 2


def scaled(found, by):
    return [Range(one.start * by, one.stop * by) for one in found]


@settings(max_examples=200)
@given(ranges(40), ranges(20), ranges(20), ranges(20))
def test_each_byte_is_copied_once_before_or_after_save_returns(tensors, armed, own, shared):
    """Tensors begin and end anywhere, at halves of units here; what is armed is of whole units."""
    spans = list(enumerate(scaled(tensors, HALF)))
    armed, own, shared = (scaled(one, HUGE_NBYTES) for one in (armed, own, shared))
    shared, offsets = without(shared, own), [1000 * HUGE_NBYTES * i for i in range(len(spans) + 1)]
    watched = without(armed, sorted([*own, *shared]))
    found = divide(spans, offsets, [len(spans)], armed=armed, own=own, shared=shared, watched=watched)
    late = common(sorted([*own, *shared]), armed)
    memory = [span for _, span in spans]
    assert from_of(found.late) == numbers(common(memory, late))
    assert from_of(found.rehearsed) == numbers(common(memory, common(watched, armed)))
    partly = {i for i, span in spans if common([span], late)}
    assert {*found.late_of} == partly == {*found.large}
    assert from_of(found.early) == numbers(without([memory[i] for i in sorted(partly)], late))
    assert found.whole == [i for i, _ in spans if i not in partly]
    for pieces_of in (found.late, found.early):
        for to, start, nbytes in pieces_of.tolist():
            position = to // (1000 * HUGE_NBYTES)
            assert start - memory[position].start == to - offsets[position]
            assert start + nbytes <= memory[position].stop


def from_of(found):
    """Halves of units that are read; each once."""
    halves = [at for _, start, nbytes in found.tolist() for at in range(start // HALF, (start + nbytes) // HALF)]
    assert len(halves) == len({*halves})
    return {*halves}


def numbers(found):
    return {at for one in found for at in range(one.start // HALF, one.stop // HALF)}


def test_pages_that_a_save_does_not_read_are_not_asked_for():
    """Of a tensor whose rows another rank saves only a digest is taken, and not in each save."""
    saved, read = Range(HALF, 7 * HALF), Range(9 * HALF, 15 * HALF)
    choice = Choice([], [(0, saved)], [read])
    assert choice.units(read=False).all == (Range(2 * HALF, 6 * HALF),)
    assert choice.units(read=True).own == (Range(2 * HALF, 6 * HALF), Range(10 * HALF, 14 * HALF))


def test_units_are_shared_where_what_lies_between_tensors_is_little():
    tensors = [(0, Range(HALF, 5 * HALF - 100)), (1, Range(5 * HALF, 9 * HALF)), (2, Range(10 * HALF, 13 * HALF))]
    units = Choice([], tensors, []).units(read=True)
    assert units.own == (Range(2 * HALF, 4 * HALF), Range(6 * HALF, 8 * HALF), Range(10 * HALF, 12 * HALF))
    assert units.shared == (Range(4 * HALF, 6 * HALF),)
    assert units.all == (Range(2 * HALF, 8 * HALF), Range(10 * HALF, 12 * HALF))
