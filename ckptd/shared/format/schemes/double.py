"""Two parities by XOR alone: row-diagonal parity (Corbett et al., FAST 2004)."""

from ckptd.shared.format.schemes.layout import Equation, Layout, Symbol


class Double(Layout):
    """Member g holds P of group g, the XOR of its rows, and member g+1 holds Q, that of its diagonals."""

    name = "double"
    losses = 2
    max_set_size = 16  # what a rebuild costs to plan, and its memory, grow with the square
    keeps = "2/(N-2) of a node's bytes"

    def rows(self, members: int) -> int:
        """One less than there are diagonals, a prime."""
        return next_prime(max(3, members - 1)) - 1

    def equations(self, members: int) -> tuple[Equation, ...]:
        """Rows, then diagonals, which are needed only where rows do not do."""
        rows, width = range(self.rows(members)), members - 2
        prime, columns = len(rows) + 1, range(width + 1)
        horizontal = [frozenset(Symbol(c, r) for c in columns) for r in rows]
        # In the diagonals P stands in the last of the prime's columns; those between the data and it are zeros. The
        # diagonal prime - 1 has no parity: that there is one to begin with is what makes the chain of solutions end.
        place = {c: c if c < width else prime - 1 for c in columns}
        diagonals = [
            frozenset(Symbol(c, r) for c in columns for r in rows if (r + place[c]) % prime == d)
            | {Symbol(width + 1, d)}
            for d in rows
        ]
        return tuple(horizontal + diagonals)


def next_prime(number: int) -> int:
    """The smallest prime that is not smaller."""
    while any(number % k == 0 for k in range(2, int(number**0.5) + 1)):
        number += 1
    return number
