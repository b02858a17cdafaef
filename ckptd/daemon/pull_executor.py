"""Carries out what the core orders about parts of other nodes' segments: pulls in threads, outcomes as events."""

import logging
from collections.abc import Callable
from typing import Any

from ckptd.arena.arena import Arena
from ckptd.arena.partial_segments import PartialSegments
from ckptd.core import actions as act
from ckptd.core import events as ev
from ckptd.daemon.background import Background
from ckptd.parity.pulls import Pulled, parts_by_node, pull
from ckptd.parity.sources import Sources
from ckptd.shared.base.errors import CkptdError
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.base.log_line import line
from ckptd.shared.bulk.sockets import Cancel

log = logging.getLogger("ckptd")


class PullExecutor:
    """Each pull runs in a thread of ``pulling``; memory is given back in ``cleaning``. sources: for one pull."""

    def __init__(
        self,
        *,
        arena: Arena,
        sources: Callable[[JobKey, Cancel], Sources],
        pulling: Background,
        cleaning: Background,
        deliver: Callable[[ev.Event], None],
    ) -> None:
        self._arena, self._sources = arena, sources
        self._pulling, self._cleaning, self._deliver = pulling, cleaning, deliver
        self._partials: dict[tuple[JobKey, SaveId], PartialSegments] = {}
        self._running: dict[Cancel, PartialSegments] = {}
        self.table: dict[type[act.Action], Callable[[Any], None]] = {
            act.PullSegments: self._pull,
            act.DropPulled: lambda action: self._drop(action.job, action.save),
        }

    def forget(self, job: JobKey) -> None:
        """Gives back all of the job, before its directory goes."""
        for key in [key for key in self._partials if key[0] == job]:
            self._take(key).give_back()

    def close(self) -> None:
        """Gives all back: nobody finds it again."""
        for key in [*self._partials]:
            self._take(key).give_back()

    def _take(self, key: tuple[JobKey, SaveId]) -> PartialSegments:
        """What is pulled for it from here on goes into others."""
        partials = self._partials.pop(key)
        for cancel in [cancel for cancel, into in self._running.items() if into is partials]:
            cancel.cancel()
        return partials

    def _pull(self, action: act.PullSegments) -> None:
        key, cancel = (action.job, action.save), Cancel()
        if key not in self._partials:
            self._partials[key] = PartialSegments(self._arena, action.job)
        partials = self._running[cancel] = self._partials[key]
        wanted, sources = parts_by_node(action.pulls), self._sources(action.job, cancel)

        def done(outcome: Pulled | Exception) -> None:
            del self._running[cancel]
            if isinstance(outcome, Pulled):
                log.info(
                    line("pulled", save=action.save, rank=action.rank, nbytes=outcome.nbytes, of=len(action.pulls))
                )
            self._deliver(_ended(action, outcome))

        self._pulling.run(lambda: pull(partials, action.job, wanted, sources), done)

    def _drop(self, job: JobKey, save: SaveId) -> None:
        if (job, save) not in self._partials:
            return
        partials = self._take((job, save))

        def done(outcome: Exception | None) -> None:
            if outcome is not None:
                log.error(line("could not give back what was pulled", error=repr(outcome)))

        self._cleaning.run(partials.give_back, done)


def _ended(action: act.PullSegments, outcome: Pulled | Exception) -> ev.SegmentsPulled:
    said: dict[str, Any] = {
        "job": action.job, "rank": action.rank, "session": action.session, "request": action.request,
        "save": action.save,
    }  # fmt: skip
    if isinstance(outcome, Pulled):
        files, lacks = tuple(outcome.files.items()), tuple(outcome.lacks.items())
        return ev.SegmentsPulled(**said, files=files, lacks=lacks, nbytes=outcome.nbytes)
    if not isinstance(outcome, (CkptdError, OSError)):
        log.error(line("pull failed", save=action.save, error=repr(outcome)), exc_info=outcome)
    told = outcome.message if isinstance(outcome, CkptdError) else str(outcome) or repr(outcome)
    return ev.SegmentsPulled(**said, refused=told)
