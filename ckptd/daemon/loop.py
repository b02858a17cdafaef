"""The loop: one event at a time into the catalogue, its actions out to arena, stores and ranks."""

import gc
import logging
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import zmq

from ckptd.arena.known_stores import KnownStores
from ckptd.core import actions as act
from ckptd.core import events as ev
from ckptd.core.jobs import Catalogue
from ckptd.core.policy import Policy
from ckptd.daemon import status, systemd
from ckptd.daemon.action_executor import ActionExecutor
from ckptd.daemon.adoption import Adoption, open_arena
from ckptd.daemon.background import Background, Rounds
from ckptd.daemon.bug_fence import BugFence
from ckptd.daemon.bulk_host import BulkHost
from ckptd.daemon.event_log import EventLog
from ckptd.daemon.forget import Forgetting
from ckptd.daemon.journals import Journals
from ckptd.daemon.liveness import Liveness, somebody_waits
from ckptd.daemon.pace import Pace
from ckptd.daemon.parity_executor import ParityExecutor
from ckptd.daemon.rank_gateway import RankConnection, RankGateway, logout_warnings
from ckptd.daemon.rank_socket import Incoming, RankSocket
from ckptd.daemon.readiness import Readiness, readable
from ckptd.daemon.scrubbing import ScrubExecutor
from ckptd.daemon.status_service import Sources, StatusService
from ckptd.daemon.step_marks import StepMarks
from ckptd.daemon.stopping import Stopping
from ckptd.peers.identity import identify
from ckptd.peers.plane import PeerPlane
from ckptd.shared.base.errors import CkptdError
from ckptd.shared.base.ids import JobKey
from ckptd.shared.base.log_line import line
from ckptd.shared.protocol.messages import (
    AskDrain,
    AskForget,
    AskNode,
    AskPublish,
    AskStatus,
    AskSteps,
    AskStop,
    Done,
    Refused,
    StatusReply,
)
from ckptd.store.worker_link import StoreLink
from ckptd.store.workers import Stores
from ckptd.system.config import Config
from ckptd.system.niceness import Niceness

log = logging.getLogger("ckptd")
_EMPTY_GRACE_S = 3.0  # a client-started daemon waits so long for its first rank, and for a next one
_SWEEP_S = 2.0  # how often ranks without a pidfd are looked at
_LOOK_S = 5.0  # how often the arena is looked for
_LAST_WORDS_S = 0.5  # a rank that waits for the end may take so long to receive it
_PULLS = 4  # encodes at once, of all jobs, and as many fetches: ranks wait for these, and not for an encode that hangs


class Daemon:
    """Owns everything. ``run`` returns the exit status."""

    def __init__(self, config: Config) -> None:
        self._config = config
        arena = self._arena = open_arena(config)
        self._started = time.monotonic()
        self._plane = self._start_plane(config)
        self._pace = Pace(self._plane)
        self._node = self._plane.peer.node
        self._catalogue = Catalogue(self._node, Policy.of(config, client_started=config.exit_when_empty))
        self._liveness, self._known_stores = Liveness(), KnownStores(config.arena)
        self._digesting = Background(config.hash_threads, "digest")
        self._allocating, self._cleaning = Background(1, "allocate"), Background(1, "clean")
        niceness = Niceness(config.worker_nice, config.worker_ionice)
        self._stores = Stores(niceness=niceness, hang_s=config.store_hang_s, integrity=arena.integrity)
        self._executor = self._make_executor(config)
        marks = StepMarks(arena.path, self._catalogue, self._handle)
        self._journals = Journals(arena.path, self._stores, self._known_stores, self._uses, marks)
        self._scrubs = ScrubExecutor(arena, self._stores, self._known_stores, self._handle, config.scrub_store)
        self._bulk = BulkHost(self._arena, self._plane, config.bulk_port)
        self._encoding, self._fetching = Background(_PULLS, "encode"), Background(_PULLS, "fetch")
        self._protect = ParityExecutor(
            node=self._node,
            arena=self._arena,
            peers=self._plane,
            encoding=self._encoding,
            fetching=self._fetching,
            cleaning=self._cleaning,
            deliver=self._handle,
        )
        self._socket = RankSocket(self._arena.socket_path)
        self._gateway = RankGateway(self._socket, self._arena, self._known_stores, self._liveness, self._plane.peer)
        self._gateway.warnings += logout_warnings(self._arena.path)
        self._status_service, self._event_log = self._open_status_service(), EventLog()
        self._forgetting = Forgetting(
            self._catalogue, self._known_stores, self._cleaning, self._perform, self._executor.looks.look
        )
        self.actions = self._table()
        self._queue: deque[ev.Event] = deque()
        self._handling, self._fence = False, BugFence()
        self._wake, self._signals = socket.socketpair()
        self._ready, self._changed = Readiness(), True  # changed: something happened since the log was written
        self._stop = Stopping(config, self._catalogue, self._handle)
        self._empty_since: float | None = None
        self._sweep_at, self._homeless = 0.0, False
        self._look_at = self._started + _LOOK_S
        self._manager = systemd.Manager(lambda: status.one_line(self._catalogue))
        fds = (self._wake.fileno(), *(work.fileno() for work in self._backgrounds))
        self._always = readable(self._socket.pollable, *self._plane.pollables, *fds)

    # --- life

    def _start_plane(self, config: Config) -> PeerPlane:
        try:
            return PeerPlane(identify(config), timeout_s=config.peer_timeout_s)
        except BaseException:
            self._arena.close(remove=False)
            raise

    def _make_executor(self, config: Config) -> ActionExecutor:
        return ActionExecutor(
            node=self._node,
            arena=self._arena,
            known_stores=self._known_stores,
            stores=self._stores,
            digesting=self._digesting,
            allocating=Rounds(self._allocating),
            cleaning=self._cleaning,
            deliver=self._handle,
            store_timeout_s=config.store_timeout_s,
            bandwidth=config.drain_bandwidth,
            note=lambda job, text: self._status_service.note(job, text),  # noqa: PLW0108 - there is none yet
        )

    def _open_status_service(self) -> StatusService:
        sources = Sources(
            self._node, self._arena, self._catalogue, self._stores, self._plane, self._pace, self._journals.accounts.of,
            refused=lambda: self._socket.refused + self._fence.bugs, problems=self._bulk.problems,
        )  # fmt: skip
        return StatusService(sources, self._gateway.answer)

    def run(self) -> int:
        """Serves until SIGTERM, or until it is empty where that ends it; 1 when its arena was removed."""
        self._catch_signals()
        gc.callbacks.append(self._pace.collecting)
        adoption = Adoption(
            self._arena,
            self._known_stores,
            self._protect.parities,
            self._liveness,
            self._catalogue,
            self._handle,
            self._perform,
        )
        self._journals.adopt()
        self._status_service.own.extend(adoption.run(time.monotonic()))
        systemd.ready("serving")
        seconds = time.monotonic() - self._started
        log.info(line("ready", arena=self._arena.path, node=self._node, pid=os.getpid(), seconds=seconds))
        while not self._ends():
            self._wait()
            with self._pace.turn():
                self._work()
        if self._homeless:  # whatever lies at the arena's path by now is another daemon's
            self._stores.close()
            return 1
        self._close()
        return 0

    def _catch_signals(self) -> None:
        for end in (self._wake, self._signals):
            end.setblocking(False)
        signal.set_wakeup_fd(self._signals.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._stop.signalled())
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def _ends(self) -> bool:
        """Whether to leave now: asked to and nothing worth waiting for, or empty long enough."""
        now = time.monotonic()
        if self._stop.asked:
            begins, over = self._stop.until is None, self._stop.over(now)
            if begins:
                self._journals.put_now(now)  # beside the drain: of its time nothing may be left
            waits = self._stop.last and self._stop.asked == 1
            return over and not (waits and self._journals.ending(now, self._stop.until))
        if not self._config.exit_when_empty:
            return False
        at_work = self._cleaning.busy or self._encoding.busy or self._fetching.busy
        if at_work or self._stores.busy or not self._catalogue.empty:
            self._empty_since = None
            return False
        later = now + self._executor.numbers.needed_beyond_s(_EMPTY_GRACE_S)
        self._empty_since = later if self._empty_since is None else self._empty_since
        if now - self._empty_since < _EMPTY_GRACE_S or self._journals.ending(now):
            return False
        waited_for = somebody_waits(self._arena.path)  # for the other ranks of a job, to attach together
        self._empty_since = now if waited_for else self._empty_since
        return not waited_for

    def _close(self) -> None:
        systemd.stopping()
        log.info(line("stopping", empty=self._catalogue.empty))
        self._stop.say_what_is_left()
        for incoming in self._stop.waiters:
            self._gateway.answer(
                incoming.identity, StatusReply(reply_to=incoming.request.seq, status=self._status_service.status())
            )
        self._stores.close()
        self._liveness.close()
        self._protect.close()
        for work in self._backgrounds:
            work.close()
        self._bulk.close()
        self._plane.close()
        self._socket.close(linger_s=_LAST_WORDS_S if self._stop.asked else 0.0)
        remove = self._catalogue.empty and self._config.exit_when_empty
        self._journals.close(remove=remove)
        self._arena.close(remove=remove)

    # --- loop

    @property
    def _backgrounds(self) -> tuple[Background, ...]:
        threads = (self._digesting, self._allocating, self._cleaning, self._encoding, self._fetching)
        return (*threads, self._executor.boards.work, self._scrubs.work)

    def _wait(self) -> None:
        """Sleeps until something is readable or due."""
        ranks = readable(*self._liveness.descriptors)
        stores = ((one.fileno(), zmq.POLLIN | (zmq.POLLOUT if one.wants_write else 0)) for one in self._stores.links)
        self._ready.wait((*self._always, *ranks, *stores), self._timeout_ms())

    def _timeout_ms(self) -> int:
        now = time.monotonic()
        times = [self._catalogue.next_deadline(), self._stores.next_deadline(), self._stop.until]
        times += [self._plane.next_deadline(), self._status_service.next_deadline(), self._look_at]
        times += [self._manager.next_deadline(), self._journals.next_deadline()]
        if self._liveness.unwatched:
            times.append(self._sweep_at)
        if self._empty_since is not None:
            times.append(self._empty_since + _EMPTY_GRACE_S)
        due = min(t for t in times if t is not None)
        return int(max(0.0, due - now) * 1000) + 1  # at once may be said as -inf

    def _work(self) -> None:
        """One round: everything that is ready or due."""
        now = time.monotonic()
        if self._wake.fileno() in self._ready:
            self._wake.recv(4096)
        self._pace.section("requests of ranks")
        for incoming in self._socket.receive() if self._socket.pollable in self._ready else ():
            try:
                self._open(incoming)
            except Exception as error:  # noqa: BLE001 - whatever it is, the loop continues
                self._fence.met(error, type(incoming.request).__name__, partial(self._refuse, incoming))
        self._pace.section("packets of other nodes")
        events = self._plane.receive(self._ready)
        self._pace.section("links to other nodes")
        for event in [*events, *self._plane.tick()]:
            try:
                self._handle(event)
            except Exception as error:  # noqa: BLE001 - as above
                what = f"{type(event).__name__} of another node"
                self._fence.met(error, what, partial(self._status_service.note, event.job))
        served = (partial(self._serve, link) for link in self._stores.links)
        done = (work.deliver for work in self._backgrounds if work.fileno() in self._ready)
        due = (partial(self._sweep, now), self._stores.tick, self._tick, self._journals.tick, partial(self._tell, now))
        self._pace.section("answers")
        self._fence.each((self._status_service.read_mail, *served, *done), self._status_service.own.append)
        self._pace.section("what is due")
        self._fence.each(due, self._status_service.own.append)
        self._pace.section("bundles of packets")

    def _serve(self, link: StoreLink) -> None:
        flags = self._ready.of(link.fileno())
        if flags & zmq.POLLOUT:
            link.on_writable()
        if flags & ~zmq.POLLOUT:
            self._stores.receive(link)

    def _tick(self) -> None:
        now = time.monotonic()
        if (due := self._catalogue.next_deadline()) is None or now < due:
            return
        self._changed = True
        for action in self._catalogue.tick(now):
            self._perform(action)

    def _refuse(self, incoming: Incoming, text: str) -> None:
        """A rank's message led to a bug: the rank and the status of its job report it."""
        self._status_service.own.append(text)
        refusal = Refused(reply_to=incoming.request.seq, code="bug", message=text, hint="the daemon's log has more")
        self._gateway.answer(incoming.identity, refusal)

    def _sweep(self, now: float) -> None:
        ended = any(fd in self._ready for fd in self._liveness.descriptors)
        if not ended and not (self._liveness.unwatched and now >= self._sweep_at):
            return
        self._sweep_at = now + _SWEEP_S
        self._journals.marks.look()  # the boards of ranks that have ended go
        for live in self._liveness.ended():
            log.info(line("rank ended", job=live.job.job, rank=live.rank, pid=live.pid))
            self._handle(ev.RankGone(job=live.job, rank=live.rank, session=live.session))
            self._arena.keep_ballast()  # of its file's page, before somebody else has it
            self._gateway.left(live.job, live.rank, live.session)

    def _open(self, incoming: Incoming) -> None:
        answer = partial(self._gateway.answer, incoming.identity)
        match incoming.request, self._gateway.connection_of(incoming.identity):
            case AskNode(), _:
                self._gateway.describe_node(incoming, self._config)
            case AskStatus(), _:
                self._status_service.asked(incoming)
            case AskSteps(), RankConnection(job=job):
                self._status_service.steps(incoming, job)
            case AskPublish() as request, RankConnection(job=job):
                self._executor.publishing.asked(job, request, answer)
            case AskStop(wait=wait), _:
                self._stop_for(incoming, wait=wait)
            case AskForget() as request, _:
                self._forgetting.forget(request, answer)
            case AskDrain(job=JobKey() as job, preempt=preempt), _:
                self._drain_for(incoming, job, preempt=preempt)
            case _:
                self._events_of(incoming)

    def _events_of(self, incoming: Incoming) -> None:
        for event in self._gateway.events_of(incoming):
            if isinstance(event, ev.RankDetached):
                self._journals.marks.look()
                self._gateway.unwatch(event.job, event.rank, event.session)
            self._handle(event)
            if isinstance(event, ev.RankDetached):
                self._gateway.left(event.job, event.rank, event.session)

    def _drain_for(self, incoming: Incoming, job: JobKey, *, preempt: bool) -> None:
        """The command line asks, on behalf of nobody."""
        if job not in self._catalogue.jobs:
            text = f"this daemon has no job {job.job!r} with store {job.store!r}"
            refusal = Refused(reply_to=incoming.request.seq, code="usage", message=text, hint="ckptd status")
            self._gateway.answer(incoming.identity, refusal)
            return
        if preempt:
            self._handle(ev.PreemptAsked(job=job, why=f"ckptd drain on node {self._node}"))
        self._handle(ev.DrainAsked(job=job))
        self._gateway.answer(incoming.identity, Done(reply_to=incoming.request.seq))

    def _stop_for(self, incoming: Incoming, *, wait: bool) -> None:
        """As SIGTERM does; unlike it, asked twice it still finishes what runs."""
        self._stop.ask()
        if wait:
            self._stop.waiters.append(incoming)
        else:
            self._gateway.answer(
                incoming.identity, StatusReply(reply_to=incoming.request.seq, status=self._status_service.status())
            )

    def _handle(self, event: ev.Event) -> None:
        """One event through the catalogue. Events that its actions cause wait for their turn."""
        self._queue.append(event)
        self._changed = True
        if self._handling:
            return
        self._handling = True
        try:
            while self._queue:
                event = self._queue.popleft()
                if not isinstance(event, ev.DrainMoved):
                    log.debug("event %s", event)
                with self._pace.part(type(event).__name__):
                    for action in self._catalogue.handle(event, time.monotonic()):
                        self._perform(action)
        finally:
            self._handling = False

    def _perform(self, action: act.Action) -> None:
        log.debug("action %s", action)
        self._changed = True
        try:
            for part in self.actions[type(action)]:
                part(action)
        except (OSError, CkptdError, zmq.ZMQError) as error:  # one that costs a job something, and not the daemon
            log.exception(line("could not do", job=action.job.job, action=type(action).__name__))
            self._status_service.note(action.job, f"{type(action).__name__}: {error}")

    def _table(self) -> dict[type[act.Action], tuple[Callable[[Any], None], ...]]:
        """Which parts carry out which action, in this order."""
        executor, plane, protect = self._executor, self._plane, self._protect
        return {
            **{kind: (part.perform,) for part in (executor, protect, self._scrubs) for kind in part.table},
            act.ToRank: (executor.hear, self._gateway.send),
            act.Note: (self._note,),
            act.KeepEntry: (self._journals.keep,),
            **dict.fromkeys((act.ScanStore, act.TakeIncarnation), (executor.perform, self._journals.accounts.expect)),
            act.ToNode: (plane.carry,),
            act.MeetPeers: (lambda action: plane.meet(action.job, action.peers), lambda _: self._bulk.open()),
            act.Meet: (lambda it: plane.meet_at(it.job, it.session, it.rendezvous), lambda _: self._bulk.open()),
            act.EndMeeting: (lambda action: plane.meetings.end(action.job, action.session),),
            act.KeepLinks: (lambda action: plane.keep_links(action.job, action.nodes, action.relays),),
            act.KeepTopology: (executor.perform, lambda it: plane.keep(it.job, it.topology, it.outside)),
            act.ForgetJob: (lambda action: protect.forget(action.job), executor.perform, self._forgotten),
        }

    def _note(self, action: act.Note) -> None:
        log.warning(line("note", job=action.job.job, text=action.text))
        self._status_service.note(action.job, action.text)

    def _forgotten(self, action: act.ForgetJob) -> None:
        self._status_service.errors.pop(action.job, None)
        self._plane.forget(action.job)
        self._journals.forget(action.job)
        if not self._uses(action.job.store):
            self._stores.retire(action.job.store)

    def _uses(self, store: str) -> bool:
        return any(key.store == store for key in self._catalogue.jobs)

    def _tell(self, now: float) -> None:
        """What has become of all that: to the ranks that asked, to the log, to systemd."""
        self._status_service.tick(time.monotonic())
        if self._changed:
            self._changed = False
            for entry in self._event_log.news(self._catalogue.jobs, now):
                log.log(*entry)
        self._manager.tell(now)
        self._look(now)

    def _look(self, now: float) -> None:
        """A daemon whose arena was removed serves nobody: no rank or command finds it. Its unit starts another."""
        if now < self._look_at or self._homeless:
            return
        self._look_at = now + _LOOK_S
        self._homeless = not self._arena.in_place()
        self._arena.keep_ballast()
        if self._homeless:
            hint = "logind does that to /dev/shm at a user's last logout: loginctl enable-linger"
            log.error(line("the arena was removed, and what was staged with it", arena=self._arena.path, hint=hint))
            self._stop.ask(homeless=True)  # a drain that runs has its files open
