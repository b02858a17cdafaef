"""Which damaged bytes of a redundancy set follow from the sound ones, and by which XORs. Pure.

Damage is counted in bytes, not in files: of two files that are both damaged each can be mended as long as no group of
strips lacks more, at the same offset of its symbols, than its scheme bears.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ckptd.parity.code import Code, Step, peel
from ckptd.shared.format.schemes.layout import Equation, Symbol

Target = tuple[str, int]  # ("image", rank) or ("parity", member)


class Bad(NamedTuple):
    """Bytes start to stop of a member's column or parity are not known. They belong at ``at`` of ``into``.

    into None: nobody wants them, or they are found otherwise; but they cannot be used.
    """

    start: int
    stop: int
    into: Target | None
    at: int


class Output(NamedTuple):
    """A solved symbol's bytes, and where they belong."""

    symbol: Symbol
    into: Target
    at: int


class Fix(NamedTuple):
    """Bytes first to last of a group's symbols: steps to solve, outputs to keep."""

    group: int
    first: int
    last: int
    steps: tuple[Step, ...]
    outputs: tuple[Output, ...]


class _Gap(NamedTuple):
    symbol: Symbol
    first: int
    last: int
    into: Target | None
    at: int


def solve(
    code: Code, columns: Mapping[int, Sequence[Bad]], parities: Mapping[int, Sequence[Bad]]
) -> tuple[list[Fix], set[Target]]:
    """How to find what is wanted, and the targets of which some byte cannot be found. Both by member."""
    fixes: list[Fix] = []
    lost: set[Target] = set()
    equations = code.equations
    known: dict[tuple[frozenset[Symbol], tuple[Symbol, ...]], tuple[Step, ...] | None] = {}
    for group in range(code.members):
        gaps = list(_gaps(code, group, columns, parities))
        edges = sorted({edge for gap in gaps for edge in (gap.first, gap.last)})
        for first, last in itertools.pairwise(edges):
            here = [gap for gap in gaps if gap.first <= first and last <= gap.last]
            unknown = frozenset(gap.symbol for gap in here)
            outputs = [Output(g.symbol, g.into, g.at + first - g.first) for g in here if g.into is not None]
            key = unknown, tuple(sorted(output.symbol for output in outputs))
            if key not in known:
                known[key] = peel(equations, unknown, key[1])
            steps = known[key]
            if steps is None:
                outputs, gone = _split(equations, unknown, outputs)
                lost |= gone
                steps = peel(equations, unknown, [output.symbol for output in outputs]) or ()
            if outputs:
                fixes.append(Fix(group, first, last, steps, tuple(outputs)))
    return fixes, lost


def _split(
    equations: Sequence[Equation], unknown: frozenset[Symbol], outputs: Iterable[Output]
) -> tuple[list[Output], set[Target]]:
    """What can be found nevertheless, and what cannot."""
    able, gone = [], set()
    for output in outputs:
        if peel(equations, unknown, [output.symbol]) is None:
            gone.add(output.into)
        else:
            able.append(output)
    return able, gone


def _gaps(
    code: Code, group: int, columns: Mapping[int, Sequence[Bad]], parities: Mapping[int, Sequence[Bad]]
) -> Iterable[_Gap]:
    """The damage of one group, symbol by symbol."""
    size, data = code.strip_nbytes, code.data(group)
    streams = [(columns.get(member, ()), code.strip(member, group) * size) for member in data]
    streams += [(parities.get(member, ()), place * size) for place, member in enumerate(code.holders(group))]
    for column, (bads, base) in enumerate(streams):
        for bad in bads:
            start, stop = max(bad.start, base) - base, min(bad.stop, base + size) - base
            symbol = code.symbol_nbytes
            for row in range(start // symbol, -(-stop // symbol)) if start < stop else ():
                first, last = max(start - row * symbol, 0), min(stop - row * symbol, symbol)
                at = bad.at + base + row * symbol + first - bad.start
                yield _Gap(Symbol(column, row), first, last, bad.into, at)
