"""Redundancy schemes: a file each, registered once, in ``Scheme``."""

import enum
from collections.abc import Iterable
from typing import Self

from ckptd.shared.format.schemes.double import Double
from ckptd.shared.format.schemes.layout import Layout
from ckptd.shared.format.schemes.none import NoParity
from ckptd.shared.format.schemes.xor import Xor


class Scheme(enum.StrEnum):
    """How the nodes of a set protect each other. The text is its name: in settings, messages and records."""

    layout: Layout

    def __new__(cls, layout: Layout) -> Self:
        """Named as its layout."""
        member = str.__new__(cls, layout.name)
        member._value_ = layout.name
        member.layout = layout
        return member

    NONE = NoParity()
    XOR = Xor()
    DOUBLE = Double()

    @property
    def losses(self) -> int:
        """Nodes of a set that may be lost."""
        return self.layout.losses

    @property
    def max_set_size(self) -> int:
        """The most nodes that a set may have."""
        return self.layout.max_set_size

    def among(self, members: int) -> "Scheme":
        """Itself, or where so few nodes cannot carry it the one that bears most of those they can."""
        return self if self.losses < members else _strongest(s for s in Scheme if s.losses < members)

    def for_sets_of(self, size: int) -> "Scheme":
        """Itself, or where its sets are never so large the one that bears most of those whose sets may be."""
        return self if size <= self.max_set_size else _strongest(s for s in Scheme if size <= s.max_set_size)


def _strongest(schemes: Iterable[Scheme]) -> Scheme:
    return max(schemes, key=lambda scheme: scheme.losses, default=Scheme.NONE)


DEFAULT = Scheme.XOR  # what protects a job for which nobody has chosen
