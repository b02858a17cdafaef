"""One parity: the XOR of a group's data. Of two nodes each has a copy of the other."""

from ckptd.shared.format.schemes.layout import Equation, Layout, Symbol


class Xor(Layout):
    """Member g holds P of group g."""

    name = "xor"
    losses = 1
    keeps = "1/(N-1) of a node's bytes"

    def equations(self, members: int) -> tuple[Equation, ...]:
        """P and all data."""
        return (frozenset(Symbol(column, 0) for column in range(members)),)
