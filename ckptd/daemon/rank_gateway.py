"""Between messages and events: knows which connection is which rank, checks what a rank claims, sends answers."""

import logging
import os
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from ckptd import __version__
from ckptd.arena.arena import Arena
from ckptd.arena.known_stores import KnownStores
from ckptd.core import events as ev
from ckptd.core.actions import ToRank
from ckptd.daemon.liveness import Liveness
from ckptd.daemon.rank_socket import Incoming, RankSocket
from ckptd.doctor import run as doctor
from ckptd.shared.base.errors import CkptdError
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.base.log_line import line
from ckptd.shared.format import arena_paths
from ckptd.shared.format.layout import are_parts
from ckptd.shared.format.slot import PAGE, SEALS_NBYTES, SlotState
from ckptd.shared.protocol.messages import (
    VERSION,
    AskDrain,
    AskLoad,
    AskPlace,
    AskPreempt,
    AskSegments,
    AskSlots,
    Attach,
    Attached,
    Detach,
    DropSegments,
    HandOver,
    Milestone,
    NodeInfo,
    Progress,
    Refused,
    Reply,
    ReportLoad,
    Request,
    Skip,
)
from ckptd.shared.protocol.publication import Publication, check_publication
from ckptd.shared.protocol.topology import Peer
from ckptd.shared.protocol.versions import SAME_CKPTD, Speaker, other_version
from ckptd.system import failpoints
from ckptd.system.config import Config

log = logging.getLogger("ckptd")
E = TypeVar("E", bound=ev.Event)


@dataclass(frozen=True, slots=True)
class RankConnection:
    """A rank of a session of a job."""

    job: JobKey
    rank: int
    session: str


class RankGateway:
    """Turns letters into events. Requests it can answer itself (a misuse, a stranger) it refuses at once."""

    def __init__(
        self, socket: RankSocket, arena: Arena, known_stores: KnownStores, liveness: Liveness, own: Peer
    ) -> None:
        self._own = own
        self._socket = socket
        self._arena = arena
        self._known_stores = known_stores
        self._liveness = liveness
        self._connections: dict[bytes, RankConnection] = {}
        self._identities: dict[RankConnection, bytes] = {}
        self._let_in: set[RankConnection] = set()  # one that is replaced later still receives what becomes of its saves
        self.warnings: list[str] = []  # sent to each rank that attaches

    def describe_node(self, incoming: Incoming, config: Config) -> None:
        """Somebody is about to attach, once all ranks of its job have done the same."""
        info = NodeInfo(
            reply_to=incoming.request.seq, peer=self._own, scheme=config.redundancy, set_size=config.set_size,
            balance=config.balance == "rows", store=config.store or "", integrity=self._arena.integrity.label,
        )  # fmt: skip
        self.answer(incoming.identity, info)

    def events_of(self, incoming: Incoming) -> list[ev.Event]:
        """What the letter means, nothing when it was refused. AskStatus and AskSteps (of a rank) are not for it."""
        request = incoming.request
        try:
            if isinstance(request, Attach):
                return self._attach(incoming.identity, request)
            connection = self._connections.get(incoming.identity)
            if connection is None:
                raise _error("detached", "this connection is not attached to a job", "attach first")
            return [self._event(connection, request)]
        except (CkptdError, OSError, ValueError) as error:  # the arena is not as the message says
            refusal = Refused.of(request, error, "protocol")
        self._socket.refused += not isinstance(request, Detach)  # a goodbye of one who never came in is nobody's fault
        self.answer(incoming.identity, refusal)
        return []

    def _attach(self, identity: bytes, request: Attach) -> list[ev.Event]:
        if request.version != VERSION:
            theirs = Speaker("the client", request.version, request.release)
            raise other_version(theirs, Speaker("this daemon", VERSION, __version__), SAME_CKPTD)
        _check_rendezvous(request, self._own)
        directory = self._arena.job_path(request.job)
        found = [
            ev.RankFound(job=request.job, rank=live.rank, session=live.session, pid=live.pid, host=live.host)
            for live in self._liveness.look(directory)[0]
        ]
        path = os.path.join(directory, arena_paths.rank_file_name(request.rank, request.session))
        if not self._liveness.knows(path):
            raise _error("protocol", f"rank {request.rank} does not hold the lock of its rank file {path}", "")
        connection = RankConnection(request.job, request.rank, request.session)
        self._leave(self._identities.get(connection))
        self._connections[identity], self._identities[connection] = connection, identity
        attached = _as(ev.RankAttached, request, request=request.seq, here=self._own)
        known = self._known_stores.of(request.job)
        remembered = [ev.StoreRemembered(job=request.job, store_id=known)] if known is not None else []
        return [*remembered, *found, attached]

    def _event(self, connection: RankConnection, request: Request) -> ev.Event:
        if isinstance(request, HandOver):
            return self._hand_over(connection, request)
        if isinstance(request, AskSlots) and (request.capacity < SEALS_NBYTES or request.capacity % PAGE):
            raise _error("protocol", f"{request.capacity} bytes are no slot: whole pages, two of them for seals", "")
        if (kind := _EVENTS.get(type(request))) is None:
            raise _error("protocol", f"{type(request).__name__} is not understood here", "")
        return _as(
            kind, request, job=connection.job, rank=connection.rank, session=connection.session, request=request.seq
        )

    def _hand_over(self, connection: RankConnection, request: HandOver) -> ev.SegmentStaged:
        """The event, once the slot's own seal confirms every word of the descriptor."""
        parsed = arena_paths.parse_slot_name(request.slot)
        path = self._arena.slot_path(connection.job, request.slot)
        if parsed is None or parsed[0] != connection.rank or not os.path.exists(path):
            raise _error("protocol", f"slot {request.slot} is not one of rank {connection.rank}'s", "")
        seal = self._arena.seal_of(connection.job, request.slot)
        fits = seal.content_nbytes + SEALS_NBYTES <= os.stat(path).st_size
        fits = fits and (not seal.parts or are_parts(seal.parts, seal.image_nbytes, raw=seal.raw))
        claimed = (seal.job, seal.save, seal.rank)
        if seal.state is SlotState.FREE or claimed != (connection.job, request.save, connection.rank) or not fits:
            raise _error("protocol", f"slot {request.slot} does not hold the sealed segment of {request.save}", "")
        if request.publication is not None:
            self._keep(connection.job, request.save, request.publication)
        failpoints.reach("stage.segment-received")
        return ev.SegmentStaged(
            job=connection.job,
            request=request.seq,
            rank=connection.rank,
            session=connection.session,
            world_size=seal.world_size,
            slot=request.slot,
            save=request.save,
            nbytes=seal.image_nbytes,
            drain=request.drain,
            attestations=seal.attestations,
            late=request.late,
            stall_s=request.stall_s,
            late_nbytes=request.late_nbytes,
            late_s=request.late_s,
        )

    def _keep(self, job: JobKey, save: SaveId, to: Publication) -> None:
        """Where it is to be published is on record, or, with no memory left at all, is said nowhere."""
        check_publication(to, job)
        try:
            self._arena.publications.keep(job, save, to)
        except OSError as error:  # the checkpoint counts for more: it is committed, and says that it is unpublished
            log.error(line("publication not kept", job=job.job, save=save, error=error))  # noqa: TRY400 - no bug

    def send(self, action: ToRank) -> None:
        """Delivers a message to a rank, if it is still there."""
        identity = self._identities.get(RankConnection(action.job, action.rank, action.session))
        if identity is None:
            return
        point = _told_point(action.message)
        if point:
            failpoints.reach(f"{point[0]}.before-{point[1]}-told")
        message = action.message
        if isinstance(message, Attached):
            self._let_in.add(RankConnection(action.job, action.rank, action.session))
            message = msgspec.structs.replace(message, warnings=[*message.warnings, *self.warnings])
        self.answer(identity, message)
        if point:
            failpoints.reach(f"{point[0]}.after-{point[1]}-told")
        refused = isinstance(action.message, Refused) and action.message.code in ("connect", "stale", "config")
        if refused and RankConnection(action.job, action.rank, action.session) not in self._let_in:
            self._leave(identity)

    def answer(self, identity: bytes, message: Reply) -> None:
        """Delivers to a connection."""
        self._socket.send(identity, message)

    def connection_of(self, identity: bytes) -> RankConnection | None:
        """Who sits behind a connection."""
        return self._connections.get(identity)

    def unwatch(self, job: JobKey, rank: int, session: str) -> None:
        """The rank says goodbye: its rank file is of no use any more, though it may still hold it."""
        directory = os.path.join(self._arena.path, arena_paths.job_dir(job))
        self._liveness.forget(os.path.join(directory, arena_paths.rank_file_name(rank, session)))

    def left(self, job: JobKey, rank: int, session: str) -> None:
        """The rank is gone or closed: its connection means nothing any more."""
        self._leave(self._identities.get(RankConnection(job, rank, session)))

    def _leave(self, identity: bytes | None) -> None:
        connection = self._connections.pop(identity, None) if identity is not None else None
        if connection is not None:
            self._identities.pop(connection, None)
            self._let_in.discard(connection)


# What a request of a rank that is attached becomes. A HandOver is compared with its slot first.
_EVENTS: dict[type[Request], type[ev.Event]] = {
    AskSlots: ev.SlotsAsked,
    Skip: ev.SaveSkipped,
    AskDrain: ev.DrainAsked,
    AskPreempt: ev.PreemptAsked,
    AskLoad: ev.LoadAsked,
    ReportLoad: ev.LoadReported,
    AskPlace: ev.PlaceAsked,
    AskSegments: ev.SegmentsWanted,
    DropSegments: ev.SegmentsDropped,
    Detach: ev.RankDetached,
}


def _as(kind: type[E], message: Request, /, **given: Any) -> E:
    """The event with the fields that the message has under the same names, and those given."""
    names = [name for name in kind.__struct_fields__ if name in message.__struct_fields__]
    return kind(**{name: getattr(message, name) for name in names} | given)


def _check_rendezvous(request: Attach, own: Peer) -> None:
    """Raises an error when the ranks are to meet at another daemon of this node's name."""
    named = request.rendezvous.peer if request.rendezvous is not None else own
    if request.incarnation == 0 and named.node == own.node and (named.arena, named.key) != (own.arena, own.key):
        text = f"the daemon of node {own.node} was replaced while the ranks connected: other nodes would not know it"
        raise _error("connect", text, "connect again")


def _told_point(message: Reply) -> tuple[str, str] | None:
    """The pair of crash points around telling a rank a milestone."""
    if isinstance(message, Progress) and message.milestone is Milestone.STAGED:
        return ("stage", "staged")
    if isinstance(message, Progress) and message.milestone is Milestone.DURABLE:
        return ("commit", "durable")
    return None


def _error(code: str, message: str, hint: str) -> CkptdError:
    error = CkptdError(message, hint=hint)
    error.code = code
    return error


def logout_warnings(arena: str) -> list[str]:
    """What each rank that attaches should know of what a logout does to the arena."""
    found = doctor.examine_remove_ipc(arena)
    return [] if found.verdict == "ok" else [f"{found.detail}; {found.fix}"]
