"""The jobs that this daemon and a peer both belong to, and what the core learns of the peer for each. Pure."""

import math

from ckptd.core import events as ev
from ckptd.peers.packets import MAX_JOBS
from ckptd.shared.base.ids import JobKey

LINGER_S = 5.0  # a link that is of no use any more


class SharedJobs:
    """With one peer. Each side names the jobs whose messages it takes; PeerUp follows when both have named one."""

    def __init__(self, node: str, timeout_s: float) -> None:
        self._node = node
        self._timeout_s = timeout_s
        self.ours: set[JobKey] = set()
        self.theirs: set[JobKey] = set()  # it says so, since the link is up
        self.told: set[JobKey] = set()  # PeerUp was given for
        self.awaited: set[JobKey] = set()  # PeerUp was given, and its new process or link has not joined yet
        self.awaited_until = 0.0
        self.needed: dict[JobKey, float] = {}  # here, until when
        self._needed_there: set[JobKey] = set()
        self._idle_from = 0.0
        self._met: set[JobKey] = set()  # PeerUp was given at some time for this process

    def connected(self, now: float, *, fresh: bool) -> None:
        """The link is up, with no job joined. It will join again in a moment; only if it does not is it lost to a job.

        fresh: it is another process.
        """
        self.theirs.clear()
        self._needed_there.clear()
        if fresh:
            self._met.clear()
        self.awaited |= self.told
        self.awaited_until = now + self._timeout_s
        self._idle_from = now + LINGER_S
        self.told.clear()

    def disconnected(self) -> list[ev.Event]:
        """The link is down."""
        self.theirs.clear()
        self._needed_there.clear()
        return self.lost(self.told | self.awaited)

    def joined(self, job: JobKey, *, needed: bool) -> list[ev.Event]:
        """It takes the job's messages. needed: it has use for the link."""
        if len(self.theirs) >= MAX_JOBS:
            return []
        self.theirs.add(job)
        (self._needed_there.add if needed else self._needed_there.discard)(job)
        return self.announce()

    def left(self, job: JobKey) -> list[ev.Event]:
        """It takes them no more."""
        self.theirs.discard(job)
        self._needed_there.discard(job)
        return self.lost({job})

    def parted(self, job: JobKey, *, tell: bool) -> list[ev.Event]:
        """This daemon takes them no more; tell: the job continues here."""
        self.ours.discard(job)
        self.needed.pop(job, None)
        self._met.discard(job)
        events = self.lost({job})
        return events if tell else []

    def announce(self) -> list[ev.Event]:
        """PeerUp for each job that both name by now. The link must be up."""
        events: list[ev.Event] = []
        for job in sorted((self.ours & self.theirs) - self.told):
            self.told.add(job)
            self.awaited.discard(job)
            events.append(ev.PeerUp(job=job, node=self._node, fresh=job not in self._met))
            self._met.add(job)
        return events

    def rested(self) -> list[ev.Event]:
        """The link is over, and it is not silent."""
        jobs, self.told, self.awaited = self.told | self.awaited, set(), set()
        return [ev.PeerDown(job=job, node=self._node, rests=True) for job in sorted(jobs)]

    # --- whether the link is of use

    def needs(self, job: JobKey, until: float) -> bool:
        """This daemon has use for the link until then, or longer if it said so before. Returns whether that is new."""
        new = job not in self.needed
        self.needed[job] = max(until, self.needed.get(job, until))
        return new

    def kept_until(self, job: JobKey, until: float) -> None:
        """It is not kept for the job any more, if it was."""
        if self.needed.get(job) == math.inf:
            self.needed[job] = until

    def is_needed(self, job: JobKey) -> bool:
        """Whether it has use for it here."""
        return job in self.needed

    def expired(self, now: float) -> list[JobKey]:
        """Jobs that have use for it no more, here."""
        over = [job for job, until in self.needed.items() if now >= until]
        for job in over:
            del self.needed[job]
        return over

    def idle(self, now: float) -> bool:
        """Whether neither side has use for it, and has had the time to say so."""
        return not self.needed and not self._needed_there and now >= self._idle_from

    def next_deadline(self, *, rests: bool) -> float:
        """When overdue, expired or (the link could rest) idle may have something."""
        due = self.awaited_until if self.awaited else math.inf
        for until in self.needed.values():
            due = min(due, until)
        return min(due, self._idle_from) if rests and not self.needed and not self._needed_there else due

    def overdue(self, now: float) -> list[ev.Event]:
        """It has not joined again in time."""
        return self.lost(set(self.awaited)) if self.awaited and now >= self.awaited_until else []

    def lost(self, jobs: set[JobKey]) -> list[ev.Event]:
        """PeerDown for those of these that PeerUp was given for."""
        events: list[ev.Event] = [
            ev.PeerDown(job=job, node=self._node) for job in sorted(jobs & (self.told | self.awaited))
        ]
        self.told -= jobs
        self.awaited -= jobs
        return events
