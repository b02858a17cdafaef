"""The end of a daemon that was asked to end: what it still finishes, for how long, and what it says of the rest."""

import logging
from collections.abc import Callable

from ckptd.core import events as ev
from ckptd.core.jobs import Catalogue
from ckptd.core.last_drain import LastDrain
from ckptd.daemon import systemd
from ckptd.daemon.rank_socket import Incoming
from ckptd.shared.base.ids import JobKey
from ckptd.shared.base.log_line import line
from ckptd.system.config import Config

log = logging.getLogger("ckptd")


class Stopping:
    """``handle`` takes an event through the catalogue.

    A daemon that others start again (a unit) finishes the drain that runs: what is staged outlives it. One that a
    client started may be the last that its arena has: it drains the newest checkpoint of each job, due or not.
    """

    def __init__(self, config: Config, catalogue: Catalogue, handle: Callable[[ev.Event], None]) -> None:
        self._config = config
        self._catalogue = catalogue
        self._handle = handle
        self.asked = 0  # how often: a second signal ends it at once
        self.until: float | None = None  # at the latest, once it has begun
        self.waiters: list[Incoming] = []  # requests to answer when it ends
        self._signalled = False  # by a process that ends the ranks as well, not by ckptd stop
        self._homeless = False  # the arena was removed: nothing lies there that could be drained
        self._last_drains: dict[JobKey, LastDrain] = {}

    def signalled(self) -> None:
        """SIGTERM or SIGINT."""
        self.asked += 1
        self._signalled = True

    def ask(self, *, homeless: bool = False) -> None:
        """As a signal does; asked twice it still finishes what it finishes. homeless: its arena was removed."""
        self.asked, self._homeless = max(self.asked, 1), self._homeless or homeless

    def over(self, now: float) -> bool:
        """Whether to leave now: nothing is worth waiting for, or the time for it is over."""
        if self.until is None:
            self.until = now + self._config.stop_drain_s
            self._begin()
        if self.asked > 1 or now >= self.until:
            return True
        if self.last:
            return not any(f.waits for key, f in self._last_drains.items() if key in self._catalogue.jobs)
        return not any(job.coordinator.facts.active for job in self._catalogue.jobs.values())

    @property
    def last(self) -> bool:
        """Whether no other daemon may come after this one."""
        return self._config.exit_when_empty and not self._homeless

    def _begin(self) -> None:
        if not self.last:
            systemd.stopping("finishing the drain that runs", drain_s=self._config.stop_drain_s)
            return
        systemd.stopping("draining the newest checkpoints", drain_s=self._config.stop_drain_s)
        for key in list(self._catalogue.jobs) if self._config.stop_drain_s > 0 else []:
            if self._signalled:
                self._handle(ev.PreemptAsked(job=key, why=f"a signal to the daemon of node {self._catalogue.node}"))
            self._handle(ev.DrainAsked(job=key))
        for key, job in self._catalogue.jobs.items():
            self._last_drains[key] = LastDrain(job.coordinator, job.node, preempts=self._signalled)

    def say_what_is_left(self) -> None:
        """One line for each job whose newest checkpoint is in memory alone."""
        for key, last_drain in self._last_drains.items():
            left = last_drain.left if key in self._catalogue.jobs else None
            if left is None:
                continue
            late = f"it took longer than stop_drain_s, {self._config.stop_drain_s:g} s"
            why = left.why or ("a second signal ended it" if self.asked > 1 else late)
            hint = f"the next daemon on {self._config.arena} drains it if this memory is still there"
            text = "the newest checkpoint is in memory and not durable"
            log.error(line(text, job=key.job, step=left.step, durable=left.durable, why=why, hint=hint))
