"""The tree of the nodes that read one checkpoint on the store together: a rule from their numbers alone. Pure.

The nodes are numbered from 0. Each group of FANOUT consecutive nodes has its first node as parent, each group of FANOUT
such parents the first of these, and so on: 32,768 nodes are three levels. A node receives the address of its
parent from the daemons, and every other address that it needs from the parent.
"""

from collections.abc import Iterator
from typing import Annotated, Final, NamedTuple

import msgspec

FANOUT: Final = 32
MAX_READERS: Final = 1 << 16  # nodes


class ExchangeAddress(msgspec.Struct, frozen=True, array_like=True):
    """An address, and the secret that proves membership of the job: sent over authenticated links, or in load plans."""

    host: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9.:_-]{1,255}\Z")]
    port: Annotated[int, msgspec.Meta(ge=1, lt=1 << 16)]
    secret: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]

    def __repr__(self) -> str:
        """Without the secret, because logs contain it."""
        return f"ExchangeAddress({self.host!r}, {self.port})"


class Place(NamedTuple):
    """The number of a node among all nodes of a tree."""

    number: int
    nodes: int

    @property
    def parent(self) -> int | None:
        """The number of its parent; None: it is the root."""
        return next((self.number - self.number % (span * FANOUT) for span in self._spans if self._is_child(span)), None)

    @property
    def levels(self) -> list[list[range]]:
        """The subtrees below it: for each level, from the leaves on, those of its children, by their first number."""
        found: list[list[range]] = []
        for span in self._spans:
            if self._is_child(span) or span >= self.nodes:
                break
            firsts = range(self.number + span, min(self.number + span * FANOUT, self.nodes), span)
            found.append([range(first, min(first + span, self.nodes)) for first in firsts])
        return found

    @property
    def subtree(self) -> range:
        """This node and all below it."""
        below = [one for level in self.levels for one in level]
        return range(self.number, below[-1].stop if below else self.number + 1)

    @property
    def height(self) -> int:
        """The levels of the whole tree."""
        return len(Place(0, self.nodes).levels)

    def _is_child(self, span: int) -> bool:
        """Whether it is a child, not the parent, in its group of subtrees of so many nodes."""
        return self.number % (span * FANOUT) != 0

    @property
    def _spans(self) -> Iterator[int]:
        span = 1
        while span < MAX_READERS:
            yield span
            span *= FANOUT
