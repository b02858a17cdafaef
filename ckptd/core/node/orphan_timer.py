"""How long a node where no rank lives has received nothing from a coordinator of the job. Pure."""

from ckptd.core.policy import Policy


class LeftAlone:
    """Its memory is kept for orphan_ttl_s, mere room for empty_ttl_s."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._since: float | None = None

    def spoken_to(self) -> None:
        """An order has come, or a rank: the time begins again."""
        self._since = None

    def begin_anew(self, now: float) -> None:
        """It was too long, and what could go is gone."""
        self._since = now

    def until(self, *, held: bool) -> float:
        """When it ends; in the past while nobody has looked at the clock. held: something of a checkpoint lies here."""
        ttl = self._policy.orphan_ttl_s if held else self._policy.empty_ttl_s
        return float("-inf") if self._since is None else self._since + ttl

    def too_long(self, now: float, *, held: bool) -> bool:
        """Whether the time is over."""
        self._since = now if self._since is None else self._since
        return now >= self.until(held=held)
