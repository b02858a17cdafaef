"""Which committed checkpoints may go. Pure."""

from collections.abc import Iterable

from ckptd.protocol.ids import SaveId


def superfluous(committed: Iterable[SaveId], *, keep_last: int) -> list[SaveId]:
    """Committed saves beyond the newest keep_last, oldest first. The newest one always stays; keep_last 0 keeps all."""
    if keep_last <= 0:
        return []
    return sorted(committed)[:-keep_last]
