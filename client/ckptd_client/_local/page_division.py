"""Divides the bytes of a plan's tensors into those that are copied before save returns, and those copied late. Pure.

Bytes that share a page with other memory are first copied early and read late again as a rehearsal, until it is known
that nothing writes to the page.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ckptd_client._local.page_guard import Pieces, Range, common, pieces, whole_units

_LARGE_NBYTES = 1 << 20


class Cut(NamedTuple):
    """The bytes of one tensor in one range."""

    position: int
    offset: int  # of the first, in the tensor
    nbytes: int


def cuts(spans: Sequence[tuple[int, Range]], armed: Sequence[Range]) -> tuple[list[Cut], list[Cut]]:
    """The parts of tensors inside and outside the armed ranges. armed: in order."""
    inside: list[Cut] = []
    outside: list[Cut] = []
    firsts = [one.start for one in armed]
    for position, span in spans:
        at, k = span.start, max(0, bisect_right(firsts, span.start) - 1)
        while at < span.stop:
            one = next((one for one in armed[k : k + 2] if one.stop > at), None)
            if one is None or one.start >= span.stop:
                outside.append(Cut(position, at - span.start, span.stop - at))
                break
            if at < one.start:
                outside.append(Cut(position, at - span.start, one.start - at))
                at = one.start
            stop = min(one.stop, span.stop)
            inside.append(Cut(position, at - span.start, stop - at))
            at, k = stop, bisect_right(firsts, stop) - 1
    return inside, outside


@dataclass(frozen=True, slots=True)
class Division:
    """The division of one plan's tensors at their current addresses. Offsets count from the begin of the slot."""

    armed: tuple[Range, ...]  # on which the division depends
    own: tuple[Range, ...]  # units of tensors alone
    late_ranges: tuple[Range, ...]  # copied late: own units, and shared ones
    watched: tuple[Range, ...]  # copied early and read late
    late: Pieces
    late_of: list[int]  # position of the tensor of each row
    large: list[int]  # positions of late tensors that are not small
    rehearsed: Pieces
    early: Pieces  # the early parts of tensors that are partly late
    whole: list[int]  # positions of tensors that are copied early completely

    @property
    def nbytes(self) -> int:
        """Bytes that are copied late."""
        return int(self.late[:, 2].sum())


def divide(  # noqa: PLR0913 - keyword-only
    spans: Sequence[tuple[int, Range]], offsets: Sequence[int], excluded: Sequence[int], *, armed: Sequence[Range],
    own: Sequence[Range], shared: Sequence[Range], watched: Sequence[Range],
) -> Division:  # fmt: skip
    """Divides the copy of a plan's tensors by armed memory.

    spans: of tensors that may be late, with their positions, in order of addresses. offsets: of each of the plan's
    tensors in the slot. excluded: positions that are copied in another way. own, shared, watched: units without
    overlaps, of tensors alone, shared with other memory and late, shared and not late yet.
    """
    own, watched = common(own, armed), common(watched, armed)
    late = whole_units([*own, *common(shared, armed)])
    inside, outside = cuts(spans, late)
    partly = {cut.position for cut in inside}
    rehearsed, _ = cuts(spans, watched)
    starts = {position: span.start for position, span in spans}

    def rows(found: Sequence[Cut]) -> Pieces:
        return pieces(
            (offsets[cut.position] + cut.offset, starts[cut.position] + cut.offset, cut.nbytes) for cut in found
        )

    done = partly.union(excluded)
    return Division(
        armed=tuple(armed),
        own=tuple(own),
        late_ranges=tuple(late),
        watched=tuple(watched),
        late=rows(inside),
        late_of=[cut.position for cut in inside],
        large=sorted({cut.position for cut in inside if cut.nbytes >= _LARGE_NBYTES}),
        rehearsed=rows(rehearsed),
        early=rows([cut for cut in outside if cut.position in partly]),
        whole=[i for i in range(len(offsets)) if i not in done],
    )


def placed(found: Pieces, base: int) -> Pieces:
    """The same rows with addresses in a slot that begins at base."""
    return found + np.array([base, 0, 0], np.uint64)
