"""The shape of a set: which strip of which member is in which group, and in what order lost bytes are found. Pure.

Which member holds which parity, and the equations, are of the scheme: ``ckptd/shared/format/schemes/``. Equations hold
for the bytes at each offset of their symbols alone: to solve them takes a slice of each symbol at a time.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ckptd.parity.streams import column_nbytes
from ckptd.shared.format.schemes.layout import Equation, Layout, Symbol
from ckptd.shared.format.slot import PAGE, align_up
from ckptd.shared.protocol.parity_types import ParityChunk


class Step(NamedTuple):
    """target is the XOR of sources, each known before or the target of an earlier step."""

    target: Symbol
    sources: tuple[Symbol, ...]


@dataclass(frozen=True)
class Code:
    """The shape of a set: its scheme, its members, and the bytes of its longest column."""

    layout: Layout
    members: int
    longest_nbytes: int

    def __post_init__(self) -> None:
        if not 0 < self.layout.losses < self.members:
            raise ValueError(f"{self.layout.name} of {self.members} members")

    @cached_property
    def width(self) -> int:
        """Data columns of a group, and strips of a member's column."""
        return len(self._data[0])

    @property
    def columns(self) -> int:
        """Columns of a group: data, then parities."""
        return self.width + self.layout.losses

    @cached_property
    def rows(self) -> int:
        """Symbols of a strip."""
        return self.layout.rows(self.members)

    @cached_property
    def strip_nbytes(self) -> int:
        """Bytes of a strip and of a parity: whole pages for each symbol."""
        return align_up(-(-self.longest_nbytes // self.width), PAGE * self.rows)

    @property
    def symbol_nbytes(self) -> int:
        """Bytes of a symbol."""
        return self.strip_nbytes // self.rows

    @property
    def parity_nbytes(self) -> int:
        """Bytes of parity on each member."""
        return self.layout.losses * self.strip_nbytes

    @cached_property
    def equations(self) -> tuple[Equation, ...]:
        """Of one group, the same for all."""
        return self.layout.equations(self.members)

    # --- what each member has

    @cached_property
    def _data(self) -> tuple[tuple[int, ...], ...]:
        return tuple(self.layout.data(self.members, group) for group in range(self.members))

    @cached_property
    def _groups(self) -> tuple[tuple[int, ...], ...]:
        """Of each member, the group of each of its strips: they begin with the group that follows its own number."""
        after = ([(member + k) % self.members for k in range(1, self.members + 1)] for member in range(self.members))
        return tuple(tuple(g for g in groups if m in self._data[g]) for m, groups in enumerate(after))

    def data(self, group: int) -> tuple[int, ...]:
        """Members that give the group's data columns, in order."""
        return self._data[group]

    def holders(self, group: int) -> tuple[int, ...]:
        """Members with the group's parities, in order."""
        return self.layout.holders(self.members, group)

    def strip(self, member: int, group: int) -> int:
        """Number of the member's strip that belongs to the group."""
        return self._groups[member].index(group)

    def group(self, member: int, strip: int) -> int:
        """The group that the member's strip belongs to."""
        return self._groups[member][strip]

    def stored(self, member: int) -> tuple[tuple[int, int], ...]:
        """(group, column) of each parity that the member holds, in the order of its file."""
        places = [(self.holders(group), group) for group in range(self.members)]
        held = sorted((holders.index(member), group) for holders, group in places if member in holders)
        return tuple((group, self.width + place) for place, group in held)


def code_of(parity_chunk: ParityChunk) -> Code:
    """The shape of the parity chunk's set. Raises ValueError when it cannot be one."""
    longest = max(map(column_nbytes, parity_chunk.columns), default=0)
    return Code(parity_chunk.scheme.layout, len(parity_chunk.columns), longest)


def schedule(
    equations: Iterable[Equation], unknown: Collection[int], wanted: Collection[Symbol]
) -> tuple[Step, ...] | None:
    """Steps that find the wanted symbols when the unknown columns are not there. None: too many are missing."""
    left = list(equations)
    return peel(left, {symbol for equation in left for symbol in equation if symbol.column in unknown}, wanted)


def peel(
    equations: Iterable[Equation], unknown: Collection[Symbol], wanted: Collection[Symbol]
) -> tuple[Step, ...] | None:
    """The same with single symbols that are unknown.

    Peeling: an equation with one unknown symbol gives it. Equations are taken in their order, so that diagonals are
    used only where rows do not do; steps that nothing wanted depends on are left out.
    """
    left, missing = list(equations), set(unknown)
    steps: list[Step] = []
    while missing:
        ready = next((equation for equation in left if len(equation & missing) == 1), None)
        if ready is None:
            break
        left.remove(ready)
        (target,) = ready & missing
        steps.append(Step(target, tuple(sorted(ready - {target}))))
        missing.discard(target)
    if any(symbol in missing for symbol in wanted):
        return None
    return _needed(steps, wanted)


def _needed(steps: list[Step], wanted: Collection[Symbol]) -> tuple[Step, ...]:
    needed, kept = set(wanted), []
    for step in reversed(steps):
        if step.target in needed:
            needed.update(step.sources)
            kept.append(step)
    return tuple(reversed(kept))
