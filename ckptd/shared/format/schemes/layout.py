"""What a redundancy scheme is: which members of a set hold parity of which, and the equations of their bytes. Pure.

A set of N members has N groups. Some members give a group one strip of their column each, its data columns, and others
hold its parity columns. A strip is a range of the column's bytes; it has nothing to do with the blocks of 16 MiB that
have a digest, nor with a ``ParityChunk``, which is all that one member holds. Inside a group bytes stand in a table: a
column of ``rows`` symbols for each strip and for each parity. Equations are between symbols, and hold for the bytes at
each offset alone.
"""

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

MAX_SET_SIZE = 64


class Symbol(NamedTuple):
    """A place in a group's table: data columns count from 0, then the parities."""

    column: int
    row: int


Equation = frozenset[Symbol]  # their XOR is zero


class Layout(ABC):
    """A scheme. Unless it says otherwise, ``losses`` neighbours hold the group's parities and all others give data.

    Any ``losses`` columns of a group must follow from the rest, and each member must give as many strips as the others.
    """

    name: ClassVar[str]
    losses: ClassVar[int]  # nodes of a set that may be lost, and parity columns of a group
    max_set_size: ClassVar[int] = MAX_SET_SIZE
    keeps: ClassVar[str]  # for documents: what a node keeps for the others, in a set of N nodes

    def holders(self, members: int, group: int) -> tuple[int, ...]:
        """Members that hold the group's parities, in order."""
        return tuple((group + k) % members for k in range(self.losses))

    def data(self, members: int, group: int) -> tuple[int, ...]:
        """Members that give the group's data columns, in order."""
        holders = self.holders(members, group)
        return tuple(member for member in range(members) if member not in holders)

    def rows(self, members: int) -> int:  # noqa: ARG002 - a scheme may need more of a larger set
        """Symbols of a strip."""
        return 1

    @abstractmethod
    def equations(self, members: int) -> tuple[Equation, ...]:
        """Of one group, the same for all. The cheapest first: they are tried in this order."""
