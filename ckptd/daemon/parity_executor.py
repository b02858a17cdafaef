"""Carries out what the core orders about parity and copies: encodes and fetches in threads, outcomes as events."""

import functools
import logging
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from ckptd.arena.arena import Arena
from ckptd.core import actions as act
from ckptd.core import events as ev
from ckptd.daemon.background import Background
from ckptd.daemon.pull_executor import PullExecutor
from ckptd.parity.encode import encode
from ckptd.parity.files import Parities
from ckptd.parity.rebuild import Fetched, Place, copy_segment, rebuild_segment
from ckptd.parity.sources import Sources
from ckptd.peers.plane import PeerPlane
from ckptd.shared.base.errors import CkptdError, PeerError
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.base.log_line import line
from ckptd.shared.bulk.client import TIMEOUT_S
from ckptd.shared.bulk.sockets import Cancel
from ckptd.shared.format.slot import Seal
from ckptd.shared.protocol.messages import Tier

log = logging.getLogger("ckptd")
Deliver = Callable[[ev.Event], None]
Key = tuple[JobKey, SaveId, int]  # of a chunk


class ParityExecutor:
    """Each runs in a thread of ``encoding`` or ``fetching``; ``deliver`` is called in the main thread.

    A parity file is given back in ``cleaning`` (it may unlink), after an encode of it that runs has ended.
    """

    def __init__(  # noqa: PLR0913 - the daemon's parts, by name
        self,
        *,
        node: str,
        arena: Arena,
        peers: PeerPlane,
        encoding: Background,
        fetching: Background,
        cleaning: Background,
        deliver: Deliver,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._node = node
        self._arena = arena
        self._peers = peers
        self._encoding = encoding
        self._fetching = fetching
        self._cleaning = cleaning
        self._deliver = deliver
        self._timeout_s = timeout_s
        self._pulls = PullExecutor(
            arena=arena, sources=self._sources, pulling=fetching, cleaning=cleaning, deliver=deliver
        )
        self.parities = Parities(arena)
        self._encodes: dict[Key, Cancel] = {}
        self._fetches: dict[tuple[JobKey, int, SaveId], Cancel] = {}
        self._drops: set[Key] = set()  # once their encode has ended
        self._dropping: set[Key] = set()
        self._again: dict[Key, act.Encode] = {}  # once what is left of an earlier one is gone
        self.table: dict[type[act.Action], Callable[[Any], None]] = {
            act.Encode: self._encode,
            act.StopEncode: lambda a: self._stop((a.job, a.save, a.epoch)),
            act.DropChunk: lambda a: self._drop((a.job, a.save, a.epoch)),
            act.FetchSegment: self._fetch,
            **self._pulls.table,
        }

    def perform(self, action: act.Action) -> None:
        """Starts the action. Never blocks."""
        self.table[type(action)](action)

    def forget(self, job: JobKey) -> None:
        """Breaks off whatever runs for the job; it leaves nothing behind. To be called before its files go."""
        for key, cancel in [*self._encodes.items(), *self._fetches.items()]:
            if key[0] == job:
                cancel.cancel(final=True)
        for again in [key for key in self._again if key[0] == job]:
            del self._again[again]
        self._pulls.forget(job)

    def close(self) -> None:
        """Breaks off whatever runs."""
        for cancel in [*self._encodes.values(), *self._fetches.values()]:
            cancel.cancel()
        self._pulls.close()

    def _sources(self, job: JobKey, cancel: Cancel) -> Sources:
        address = functools.partial(self._peers.bulk_address, job)
        return Sources(self._node, self._arena, address, cancel, timeout_s=self._timeout_s)

    # --- encodes

    def _encode(self, action: act.Encode) -> None:
        job, chunk = action.job, action.chunk
        key = job, chunk.save, chunk.epoch
        if key in self._encodes or key in self._dropping:
            if key in self._dropping or self._encodes[key].cancelled:
                self._again[key] = action
            return
        cancel = self._encodes[key] = Cancel()

        def done(outcome: Exception | None) -> None:
            del self._encodes[key]
            if key in self._drops:
                self._drop(key)
            elif key in self._again:
                self._encode(self._again.pop(key))
            elif not cancel.cancelled:
                problem = "" if outcome is None else _told("encode", chunk.save, outcome)
                self._deliver(ev.Encoded(job=job, save=chunk.save, epoch=chunk.epoch, problem=problem))

        self._encoding.run(lambda: encode(self.parities, job, chunk, self._sources(job, cancel), _ignore), done)

    def _stop(self, key: Key) -> None:
        self._again.pop(key, None)
        if key in self._encodes:
            self._encodes[key].cancel()

    def _drop(self, key: Key) -> None:
        """In order with what comes after: an encode that is asked for meanwhile waits for it."""
        if key in self._encodes:
            self._stop(key)
            self._drops.add(key)
            return
        self._drops.discard(key)
        self._dropping.add(key)

        def done(outcome: Exception | None) -> None:
            self._dropping.discard(key)
            if key in self._again:
                self._encode(self._again.pop(key))
            if outcome is not None:
                log.error(line("could not give parity back", error=repr(outcome)))

        self._cleaning.run(lambda: self.parities.give_back(*key), done)

    # --- segments

    def _fetch(self, action: act.FetchSegment) -> None:
        key = action.job, action.rank, action.save
        if key in self._fetches:
            return
        cancel = self._fetches[key] = Cancel()
        seal = _seal_of(action)

        def done(outcome: Fetched | Exception) -> None:
            del self._fetches[key]
            self._deliver(_fetched(action, seal, outcome))

        self._fetching.run(lambda: self._have(action, seal, cancel), done)

    def _have(self, action: act.FetchSegment, seal: Seal | None, cancel: Cancel) -> Fetched:
        """Blocks until the segment is in a slot."""
        cancel.check()
        if seal is None:
            raise PeerError(f"no seal of rank {action.rank} of {action.save} is known")
        place, sources = Place(self._arena, action.job, seal), self._sources(action.job, cancel)
        if action.tier is Tier.PEER:
            return copy_segment(place, action.holder, sources, _ignore)
        if action.chunk is None:
            raise PeerError(f"no parity of {action.save} is known")
        return rebuild_segment(place, action.chunk, dict(action.homes), dict(action.chunks), sources, _ignore)


def _seal_of(action: act.FetchSegment) -> Seal | None:
    if action.seal is not None or action.chunk is None:
        return action.seal
    seals = (seal for column in action.chunk.columns for seal in column.seals)
    return next((seal for seal in seals if seal.rank == action.rank), None)


def _fetched(action: act.FetchSegment, seal: Seal | None, outcome: Fetched | Exception) -> ev.SegmentFetched:
    fetched = ev.SegmentFetched(job=action.job, rank=action.rank, save=action.save, tier=action.tier)
    if isinstance(outcome, Exception):
        return replace(fetched, problem=_told("fetch", action.save, outcome))
    return replace(fetched, slot=outcome.slot, capacity=outcome.capacity, seal=seal)


def _told(what: str, save: SaveId, error: Exception) -> str:
    """The problem in a line; a bug of ours leaves its trace in the log."""
    if not isinstance(error, (CkptdError, OSError)):
        log.error(line(f"{what} failed", save=save, error=repr(error)), exc_info=error)
    return error.message if isinstance(error, CkptdError) else str(error) or repr(error)


def _ignore(_nbytes: int) -> None:
    return None
