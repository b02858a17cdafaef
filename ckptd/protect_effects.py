"""Carries out what concerns parity and other nodes' segments, in threads; each outcome comes back as an event."""

import logging
from collections.abc import Callable
from dataclasses import replace

from ckptd.arena import Arena
from ckptd.background import Background
from ckptd.bulk import wire
from ckptd.bulk.served import open_served
from ckptd.bulk.server import BulkServer, Served
from ckptd.bulk.sockets import Cancel
from ckptd.core import actions as act
from ckptd.core import events as ev
from ckptd.parity.encode import encode
from ckptd.parity.rebuild import Fetched, Place, copy_segment, rebuild_segment
from ckptd.parity.sources import Sources
from ckptd.parity_files import Parities
from ckptd.peers.plane import PeerPlane
from ckptd.protocol.errors import CkptdError, PeerError
from ckptd.protocol.ids import JobKey, SaveId
from ckptd.protocol.messages import Tier

log = logging.getLogger("ckptd")
_THREADS = 4  # pieces of work at once: encodes and fetches of all jobs
Key = tuple[JobKey, SaveId, int]  # epoch of a piece; rank of a segment
ProtectAction = act.Encode | act.StopEncode | act.DropPiece | act.FetchSegment


class ProtectEffects:
    """Owns the bulk server from its making to close. ``deliver`` is called with each outcome, in the main thread."""

    def __init__(self, arena: Arena, plane: PeerPlane, deliver: Callable[[ev.Event], None]) -> None:
        self._arena = arena
        self._plane = plane
        self._deliver = deliver
        self.parities = Parities(arena)
        self.work = Background(_THREADS, "protect")
        self._given_back = Background(1, "parity")  # in order, one after the other
        self._encodes: dict[Key, Cancel] = {}
        self._again: dict[Key, act.Encode] = {}  # ordered again before the one that was stopped had ended
        self._fetches: dict[Key, Cancel] = {}
        self._server: BulkServer | None = None

    def serve(self) -> None:
        """Lets peers fetch bytes, from the first time that there are any."""
        if self._server is None:
            host = self._plane.peer.endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
            self._server = BulkServer(self._open, self._secret_of, host=host)
            self._server.start()
            self._plane.offer_bulk(self._server.port)

    @property
    def backgrounds(self) -> tuple[Background, ...]:
        """To be polled, and delivered from, by the loop."""
        return self.work, self._given_back

    def close(self) -> None:
        """Breaks off what runs."""
        for cancel in (*self._encodes.values(), *self._fetches.values()):
            cancel.cancel()
        if self._server is not None:
            self._server.close()
        for background in self.backgrounds:
            background.close()

    def perform(self, action: ProtectAction) -> None:
        """Starts the action; none of them blocks."""
        match action:
            case act.Encode():
                self._encode(action)
            case act.StopEncode():
                self._again.pop((action.job, action.save, action.epoch), None)
                cancel = self._encodes.get((action.job, action.save, action.epoch))
                if cancel is not None:
                    cancel.cancel()
            case act.DropPiece():
                self._drop(action)
            case act.FetchSegment():
                self._fetch(action)

    # --- parity

    def _encode(self, action: act.Encode) -> None:
        job, piece = action.job, action.piece
        key = job, piece.save, piece.epoch
        running = self._encodes.get(key)
        if running is not None:  # both would write the same file
            if running.cancelled:
                self._again[key] = action
            return
        cancel = self._encodes[key] = Cancel()

        def done(outcome: Exception | None) -> None:
            del self._encodes[key]
            again = self._again.pop(key, None)
            if again is not None:
                self._encode(again)
                return
            problem = _problem(outcome) if outcome is not None else ""
            self._deliver(ev.Encoded(job=job, save=piece.save, epoch=piece.epoch, problem=problem))

        self.work.run(lambda: encode(self.parities, job, piece, self._sources(cancel), _count), done)

    def _drop(self, action: act.DropPiece) -> None:
        def done(outcome: Exception | None) -> None:
            if outcome is not None:
                log.error("could not give parity back: %r", outcome)

        self._given_back.run(lambda: self.parities.give_back(action.job, action.save, action.epoch), done)

    # --- segments

    def _fetch(self, action: act.FetchSegment) -> None:
        key = action.job, action.save, action.rank
        if key in self._fetches:
            return
        cancel = self._fetches[key] = Cancel()

        def done(outcome: Fetched | Exception) -> None:
            self._fetches.pop(key, None)
            fetched = ev.SegmentFetched(job=action.job, rank=action.rank, save=action.save, tier=action.tier)
            if isinstance(outcome, Exception):
                self._deliver(replace(fetched, problem=_problem(outcome)))
            else:
                self._deliver(replace(fetched, slot=outcome.slot, capacity=outcome.capacity, seal=action.seal))

        self.work.run(lambda: self._pull(action, self._sources(cancel)), done)

    def _pull(self, action: act.FetchSegment, sources: Sources) -> Fetched:
        assert action.seal is not None  # noqa: S101 - the core asked for it first
        place = Place(self._arena, action.job, action.seal)
        if action.tier is Tier.PEER:
            return copy_segment(place, action.holder, sources, _count)
        assert action.piece is not None  # noqa: S101
        return rebuild_segment(place, action.piece, dict(action.homes), dict(action.pieces), sources, _count)

    # --- bytes

    def _sources(self, cancel: Cancel) -> Sources:
        return Sources(self._plane.peer.node, self._arena, self._plane.bulk_address, cancel)

    def _open(self, link_id: str, ask: wire.Ask, rank: int) -> Served:
        """What a peer asks for, if it is of a job that both belong to."""
        guest = self._plane.bulk_guest(link_id)
        if guest is None or ask.job not in guest.jobs:
            raise PeerError(f"job {ask.job.job!r} is none that you have here")
        return open_served(self._arena, ask, rank)

    def _secret_of(self, link_id: str) -> bytes | None:
        guest = self._plane.bulk_guest(link_id)
        return guest.secret if guest is not None else None


def _count(_nbytes: int) -> None:
    """Nobody counts yet."""


def _problem(error: Exception) -> str:
    if isinstance(error, CkptdError):
        return f"{error.message} ({error.hint})" if error.hint else error.message
    log.error("work on parity failed", exc_info=error)
    return str(error) or repr(error)
