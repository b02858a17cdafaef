"""Whose bytes a reader takes when every rank takes those of the lowest rank that has them."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from ckptd.shared.format.layout import TensorEntry
from ckptd.shared.format.rank_members import members_of
from ckptd.shared.format.replica_attestations import WHOLE, Attestation, compared
from ckptd_client._state.replica_choice import notes_of, taken_of
from ckptd_client._state.reshard import Box, Saved, cover

ROWS, COLUMNS = 6, 4


def saved(rank, offsets, sizes):
    nbytes = sizes[0] * sizes[1]
    return Saved(rank, TensorEntry("t", "U8", (ROWS, COLUMNS), offsets, sizes, 0, nbytes))


@st.composite
def boxes(draw):
    row, column = draw(st.integers(0, ROWS - 1)), draw(st.integers(0, COLUMNS - 1))
    return (row, column), (draw(st.integers(1, ROWS - row)), draw(st.integers(1, COLUMNS - column)))


def elements(box):
    return itertools.product(*(range(at, at + size) for at, size in zip(*box, strict=True)))


@given(st.lists(boxes(), min_size=1, max_size=8), boxes())
def test_each_element_is_of_the_lowest_rank_that_has_it_whatever_is_wanted(there, wanted):
    files = {rank: saved(rank, *box) for rank, box in enumerate(there)}
    lowest = {}
    for rank, box in enumerate(there):
        for element in elements(box):
            lowest.setdefault(element, rank)
    runs = cover(Box(*wanted), reversed(files.values()), prefer=None)
    if not lowest.keys() >= set(elements(wanted)):
        assert runs is None
        return
    got = {}
    for run in runs:
        (top, left), (_, width) = there[run.rank]
        for i in range(run.nbytes):
            row, column = divmod(run.source + i, width)
            target = divmod(run.target + i, wanted[1][1])
            element = (target[0] + wanted[0][0], target[1] + wanted[0][1])
            assert element == (row + top, column + left)
            assert got.setdefault(element, run.rank) == run.rank
    assert got == {element: lowest[element] for element in elements(wanted)}


def test_the_note_names_the_ranks_and_only_where_replicas_differed():
    lines = [saved(0, (0, 0), (3, 4)), saved(1, (3, 0), (3, 4)), saved(2, (0, 0), (3, 4)), saved(3, (3, 0), (3, 4))]
    taken = taken_of(["line", "w"], {"line": lines, "w": [lines[2], lines[0]]}, {"line": "s['line']", "w": "s['w']"})
    assert taken == {(0, 1): ["s['line']"], (0,): ["s['w']"]}
    said = {
        rank: (Attestation(members_of((0, 1)), b"c" * 8, WHOLE + bytes([rank] * 7), only_told=True),)
        for rank in range(2)
    }
    assert notes_of(taken, compared(said)) == [
        "s['w']: the bytes of rank 0 were taken, on every rank; those of other ranks differed",
        "s['line']: the bytes of ranks 0 to 1 were taken, on every rank; those of other ranks differed",
    ]
    assert notes_of(taken, compared({0: said[0], 1: said[0]})) == []
    assert notes_of({}, compared(said)) == []
