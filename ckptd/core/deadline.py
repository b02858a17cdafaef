"""When something is due next, of a part whose state changes only in calls that say so. Pure."""

from collections.abc import Callable


class Deadline:
    """``ask`` is called at most once after each ``changed``: a turn in which nothing happened costs nothing."""

    def __init__(self, ask: Callable[[], float | None]) -> None:
        self._ask = ask
        self._known = False
        self._at: float | None = None

    def changed(self) -> None:
        """The next answer may be another one."""
        self._known = False

    @property
    def at(self) -> float | None:
        """The earliest time at which something is due; in the past: at once; None: nothing is."""
        if not self._known:
            self._at, self._known = self._ask(), True
        return self._at

    def by(self, now: float) -> bool:
        """Whether something is due by now."""
        return (at := self.at) is not None and at <= now

    def check(self) -> None:
        """Asserts that nothing has changed without saying so since the last check; tests call it after every event."""
        assert self.at == (now := self._ask()), f"was due at {self._at}, is due at {now}"  # noqa: S101
