"""No parity: a node that is lost takes what only its memory had."""

from ckptd.shared.format.schemes.layout import Equation, Layout


class NoParity(Layout):
    """Of no set."""

    name = "none"
    losses = 0
    keeps = "nothing"

    def equations(self, members: int) -> tuple[Equation, ...]:  # noqa: ARG002
        """None."""
        return ()
