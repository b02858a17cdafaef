"""Which bytes of a set are XORed into which parity, and in what order lost ones are found again. Pure.

A set of N members has N groups. Of group g member g holds the parity P; with `double` (row-diagonal parity, Corbett et
al., FAST 2004) member g+1 holds a second one, Q. The others give one chunk of their column each, so every byte of a
column is in one group, and every member holds as much parity as the others.

Inside a group bytes stand in a table: a column of `rows` symbols for each chunk, and for P and for Q. Equations are
between symbols, and hold for the bytes at each offset alone: to solve them takes a slice of each symbol at a time.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from ckptd.shared.format.slot import PAGE, align_up
from ckptd.shared.protocol.topology import Scheme


class Symbol(NamedTuple):
    """A place in a group's table: data columns count from 0, then P, then Q."""

    column: int
    row: int


class Step(NamedTuple):
    """target is the XOR of sources, each known before or the target of an earlier step."""

    target: Symbol
    sources: tuple[Symbol, ...]


Equation = frozenset[Symbol]  # their XOR is zero


@dataclass(frozen=True, slots=True)
class Code:
    """The shape of a set: its scheme, its members, and the bytes of its longest column."""

    scheme: Scheme
    members: int
    longest_nbytes: int

    def __post_init__(self) -> None:
        if self.scheme is Scheme.NONE or self.members < self.scheme.losses + 1:
            raise ValueError(f"{self.scheme} of {self.members} members")

    @property
    def width(self) -> int:
        """Data columns of a group, and chunks of a member's column."""
        return self.members - self.scheme.losses

    @property
    def prime(self) -> int:
        """Of the diagonals, one more than there are rows; 2 where there is a single row and no diagonal."""
        return next_prime(max(3, self.members - 1)) if self.scheme is Scheme.DOUBLE else 2

    @property
    def rows(self) -> int:
        """Symbols of a chunk."""
        return self.prime - 1

    @property
    def chunk_nbytes(self) -> int:
        """Bytes of a chunk and of P and Q: whole pages for each symbol."""
        return align_up(-(-self.longest_nbytes // self.width), PAGE * self.rows)

    @property
    def symbol_nbytes(self) -> int:
        """Bytes of a symbol."""
        return self.chunk_nbytes // self.rows

    @property
    def parity_nbytes(self) -> int:
        """Bytes of parity on each member."""
        return self.scheme.losses * self.chunk_nbytes

    # --- who has what

    def data(self, group: int) -> tuple[int, ...]:
        """Members that give the group's data columns, in order."""
        holders = self.holders(group)
        return tuple(member for member in range(self.members) if member not in holders)

    def holders(self, group: int) -> tuple[int, ...]:
        """Members with the group's P, and Q."""
        return tuple((group + k) % self.members for k in range(self.scheme.losses))

    def chunk(self, member: int, group: int) -> int:
        """Number of the member's chunk that belongs to the group."""
        return (group - member - 1) % self.members

    def group(self, member: int, chunk: int) -> int:
        """The group that the member's chunk belongs to."""
        return (chunk + member + 1) % self.members

    def stored(self, member: int) -> tuple[tuple[int, int], ...]:
        """(group, column) of each parity that the member holds, in the order of its file: P, then Q."""
        return tuple(((member - k) % self.members, self.width + k) for k in range(self.scheme.losses))

    # --- equations

    def equations(self) -> tuple[Equation, ...]:
        """Of one group, the same for all: rows first, then diagonals."""
        columns = range(self.width + 1)
        rows = [frozenset(Symbol(c, r) for c in columns) for r in range(self.rows)]
        if self.scheme is not Scheme.DOUBLE:
            return tuple(rows)
        # In the diagonals P stands in the last of the prime's columns; those between the data and it are zeros. The
        # diagonal prime - 1 has no parity: that there is one to begin with is what makes the chain of solutions end.
        place = {c: c if c < self.width else self.prime - 1 for c in columns}
        diagonals = [
            frozenset(Symbol(c, r) for c in columns for r in range(self.rows) if (r + place[c]) % self.prime == d)
            | {Symbol(self.width + 1, d)}
            for d in range(self.rows)
        ]
        return tuple(rows + diagonals)


def next_prime(number: int) -> int:
    """The smallest prime that is not smaller."""
    while any(number % k == 0 for k in range(2, int(number**0.5) + 1)):
        number += 1
    return number


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
