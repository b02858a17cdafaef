"""This rank's link to its daemon: attaches, attaches again after the daemon ended, asks for slots, sends requests."""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable

import msgspec

from ckptd.shared.base.errors import (
    BudgetError,
    CkptdError,
    ConnectError,
    StaleIncarnationError,
    WaitTimeoutError,
    is_failure,
)
from ckptd.shared.base.ids import NO_RUN, JobKey, RunId, SaveId
from ckptd.shared.format import arena_paths
from ckptd.shared.protocol.endpoints import host_of
from ckptd.shared.protocol.messages import (
    AskNode,
    AskSlots,
    Attach,
    Attached,
    Detach,
    NodeInfo,
    Notice,
    Progress,
    Reply,
    Request,
    SlotGranted,
    SlotsComing,
    SlotsRefused,
)
from ckptd.shared.protocol.topology import Rendezvous
from ckptd_client._daemon.channel import Channel, ChannelLostError, PreemptedError, Push, channel_listens
from ckptd_client._daemon.options import Settings
from ckptd_client._daemon.outbox import Outbox
from ckptd_client._daemon.reach import log_started, reach, retry_while_daemons_end, starts_of
from ckptd_client._daemon.rendezvous import agree, announce_failure, check_alike, record_of, why_unprotected
from ckptd_client._daemon.siblings import Claim, cause_of
from ckptd_client._local.rank import Group
from ckptd_client._local.save_record import HandleBook
from ckptd_client._local.slots import RankFile, Slots
from ckptd_client._state.sampling import Sampling, listed

log = logging.getLogger("ckptd_client")
_HURRIED_S = 4.0  # limit of a save's wait for a daemon that another program, such as systemd, restarts
_ADMISSION_S = 5.0  # connect waits so much longer than admission, whose refusal has the reason
_SILENT_S = 6.0  # connect warns after this what it waits for, unless the daemons have reported it
_POLL_S = 0.1  # between two checks whether a slot can still become free
_RETRY_S = 15.0  # after a failed attempt to attach, saves fail at once for so long, or until a daemon listens

_ALLOCATED_PER_S = 100e6  # bytes; even a slow machine touches pages five times as fast


class Link:
    """The link of one client. Call its methods under the client's lock."""

    def __init__(self, job: JobKey, group: Group, settings: Settings) -> None:
        self.job = job
        self.group = group
        self.settings = settings
        self.incarnation = 0
        self.run: RunId = NO_RUN  # chosen with the incarnation
        self._store_id = settings.store_id  # requested; later the store's own id, so that no other store is used
        self.rendezvous: Rendezvous | None = None  # agreed at connect; each daemon gets it
        self.endpoint = ""  # of this node's daemon, for others
        self.ranks_here: tuple[int, ...] = (group.rank,)  # of the job, on this node
        self.nodes = 1  # of the job
        self.reads = 0  # by all ranks so far, which begin them in the same order
        self.balance = bool(settings.balance)  # whether replicas save slices of replicated tensors
        self.sampling = Sampling(settings.verify, settings.cadence)
        self.book = HandleBook()
        self.capacity = 0  # of the requested slots; 0: none
        self._had = 0  # capacity of the last granted slot
        self.refusal: CkptdError | None = None  # why slots are missing
        self.slots = Slots(os.path.join(settings.arena, arena_paths.job_dir(job)))
        self.on_slots_coming: Callable[[], None] = lambda: None
        self._channel: Channel | None = None
        self._rank_file: RankFile | None = None
        self._holding = Claim(settings.arena, job, group.rank)
        self.is_restartable = settings.autostart  # whether clients start the next daemon
        self.rivals: set[object] = set()  # callers with priority that wait for the client's lock
        self.yields = False  # whether they may interrupt the current call
        self.staging: SaveId | None = None  # the caller's current save
        self.unsealed: set[SaveId] = set()  # begun, and sealed by a later call
        self.outbox = Outbox(self._ask, self.book)
        self.waits_for = ""  # reason of a wait in connect or load, as far as this rank knows
        self._held_up: ConnectError | None = None  # the daemon's reason of a wait
        self._retry_at = 0.0
        self._unwanted: Callable[[], bool] = bool  # whether the current call is obsolete
        self._was_absent = False  # whether no daemon listened at the last failed attempt
        self._replaced: StaleIncarnationError | None = None
        self.attachments = 0  # number so far; grants of an earlier one are void
        self._grants = 0  # received so far
        self._grants_due = 0  # number once all promised slots are granted
        self._grants_before = 0  # number when they were promised
        self._allocated_by = 0.0  # time of the first grant even on a slow machine

    # --- the connection

    def connect(self) -> list[str]:
        """Attaches for the first time, in a new incarnation. Returns warnings. Raises ConnectError."""
        warning = threading.Timer(_SILENT_S, self._warn_of_wait)
        warning.daemon = True
        warning.start()
        try:
            with announce_failure(self.group):
                self._holding.claim(takeover=self.settings.takeover)
                self._make_rank_file().meet(self.group)
                deadline = time.monotonic() + self.settings.connect_timeout_s  # begins after the wait for other ranks
                info = retry_while_daemons_end(lambda: self._ask_node(deadline), deadline)
            self.balance = info.balance if self.settings.balance is None else self.settings.balance
            settings = self.settings
            alike = settings.alike(self.job)
            record = record_of(info, settings.arena, settings.redundancy, settings.set_size, alike)
            began = time.monotonic()
            self.waits_for = "for all its ranks to find their daemons"
            self.rendezvous, self.endpoint = agree(self.group, record, info), info.peer.endpoint
            self.waits_for = f"for the store {self.job.store} to answer, or for old ranks of it to end"
            deadline += time.monotonic() - began  # the wait for late ranks does not count
            return retry_while_daemons_end(lambda: self._enter(deadline), deadline)
        finally:
            warning.cancel()

    def _ask_node(self, deadline: float) -> NodeInfo:
        self._drop_channel()
        self._open_channel(deadline)
        answer = self._ask(lambda seq: AskNode(seq=seq), deadline)
        assert isinstance(answer, NodeInfo)  # noqa: S101 - the reply to AskNode
        check_alike(answer, self.settings.integrity)
        return answer

    def _enter(self, deadline: float) -> list[str]:
        if self._channel is None or self._channel.lost:  # the daemon has ended since
            self._drop_channel()
            self._open_channel(deadline)
        try:
            return self._attach(deadline + _ADMISSION_S)
        except WaitTimeoutError:
            if self._held_up is None:
                raise
            raise self._held_up from None  # it has the reason
        except ConnectError as error:
            raise self._of_ranks(error) from None

    def _of_ranks(self, error: ConnectError) -> ConnectError:
        lone = self.group.world_size == 1 and not isinstance(error, ChannelLostError)
        return cause_of(error, self.job.job, self._rank_file.path) if lone and self._rank_file is not None else error

    def _warn_of_wait(self) -> None:
        if self.group.rank == 0 and self.waits_for:
            patience_s = self.settings.connect_timeout_s
            log.warning("ckptd: job %s waits, up to %g s, %s", self.job.job, patience_s, self.waits_for)

    def _make_rank_file(self) -> RankFile:
        """The rank file, a new one if the arena was removed: a daemon takes a rank without a file for ended."""
        if self._rank_file is not None and self._rank_file.lost:
            self._rank_file.close()
            self._rank_file = None
        if self._rank_file is None:
            self._rank_file = RankFile(self.settings.arena, self.job, self.group.rank, self.group.session)
        return self._rank_file

    def patient_until(self, patience_s: float | None) -> float:
        """The deadline (time.monotonic) of a wait for a new daemon, for a caller's timeout."""
        most = self.settings.connect_timeout_s
        return time.monotonic() + (most if patience_s is None else min(most, patience_s))

    def ensure(self, deadline: float, *, hurried: bool = False) -> None:
        """Makes sure that this rank is attached to a daemon; reports its saves to a new one. Raises ConnectError.

        hurried: training waits, so the wait for a daemon that another program starts is short, and skipped soon after a
        failure.
        """
        if self._replaced is not None:
            raise self._replaced
        self.pump(time.monotonic())
        if self._channel is not None and not self._channel.lost:
            return
        now = time.monotonic()
        if hurried and now < self._retry_at and not (self._was_absent and channel_listens(self._socket_path)):
            raise ConnectError("the daemon is gone and did not come back", hint=f"see {self.log_path}")
        try:
            patience = min(deadline, now + _HURRIED_S) if hurried and not self.is_restartable else deadline
            retry_while_daemons_end(lambda: self._reattach(patience), patience)
        except PreemptedError:
            self._drop_channel()  # the attachment was not complete
            raise
        except Exception:
            self._drop_channel()
            self._retry_at = time.monotonic() + _RETRY_S
            self._was_absent = not channel_listens(self._socket_path)
            raise

    def _reattach(self, deadline: float) -> None:
        self._drop_channel()
        self._make_rank_file()
        self._open_channel(deadline)
        self._attach(deadline)
        try:
            self.outbox.repeat(deadline)
        finally:
            self._replaced = None  # this daemon has just accepted the rank, whatever it answers about an old save
        self.outbox.skip_again(deadline)
        self.slots.give_back()
        capacity = self.capacity if self.refusal is None else self._had
        if capacity:
            self.ask_slots(capacity, deadline)

    @property
    def is_lost(self) -> bool:
        """Whether the daemon ended and no other was found yet."""
        return self._channel is None or self._channel.lost

    def revive(self, deadline: float, unwanted: Callable[[], bool]) -> None:
        """The same as ensure for a background thread: a failure does not shorten the wait of the next save.

        unwanted: called ten times a second; if it returns True, the attempt ends with PreemptedError.
        """
        before, self._unwanted = self._retry_at, unwanted
        try:
            self.ensure(deadline)
        finally:
            self._retry_at, self._unwanted = before, bool

    @property
    def host(self) -> str:
        """The host at which other nodes reach this one."""
        return host_of(self.endpoint)

    @property
    def log_path(self) -> str:
        """The log of a daemon that clients start."""
        return os.path.join(self.settings.arena, arena_paths.LOG)

    @property
    def _socket_path(self) -> str:
        return os.path.join(self.settings.arena, arena_paths.SOCKET)

    def _open_channel(self, deadline: float) -> None:
        self._channel = Channel(self._socket_path, self._on_push, self._give_way)
        starts = starts_of(self.settings, here=self.is_restartable, again=self.attachments > 0)
        try:
            log_of_new = reach(self._channel, self.settings.arena, starts, deadline)
        except CkptdError:
            self._drop_channel()
            raise
        if log_of_new and self.group.rank == 0:
            log_started(self.settings.arena, log_of_new, self.job, self.group, again=self.attachments > 0)

    def _attach(self, deadline: float) -> list[str]:
        answer = self._ask(
            lambda seq: Attach(
                seq=seq,
                job=self.job,
                session=self.group.session,
                rank=self.group.rank,
                world_size=self.group.world_size,
                host=os.uname().nodename,
                pid=os.getpid(),
                incarnation=self.incarnation,
                run=self.run,
                store_id=self._store_id,
                takeover=self.settings.takeover,
                cadence=self.settings.cadence,
                rendezvous=self.rendezvous,
            ),
            deadline,
        )
        assert isinstance(answer, Attached)  # noqa: S101 - the reply to an Attach
        self.incarnation, self.run = answer.incarnation, answer.run
        self._store_id = answer.store_id or self._store_id
        self.attachments += 1
        if answer.nodes:  # a coordinator that has just restarted may not know it
            self.ranks_here, self.nodes = tuple(answer.ranks), answer.nodes
        why = why_unprotected(self.rendezvous, self.nodes, answer.node) if self.rendezvous is not None else ""
        self.book.outlook.scheme, self.book.outlook.why_none = answer.scheme, why
        held = [*self.outbox.held, *self.unsealed, *([self.staging] if self.staging is not None else [])]
        self.book.orphan([news.save for news in answer.known], held)
        self.is_restartable = self.settings.autostart and answer.client_started
        return answer.warnings

    def _drop_channel(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def close(self, error: BaseException | None = None) -> None:
        """Detaches if there is a daemon, and releases the arena. error: what ended the training."""
        self._holding.give_up()
        if self._channel is not None:
            with contextlib.suppress(CkptdError):
                self._ask(lambda seq: Detach(seq=seq, failed=is_failure(error)), time.monotonic() + 2.0)
        self._drop_channel()
        self.slots.close()
        if self._rank_file is not None:
            self._rank_file.close()
            self._rank_file = None

    def _give_way(self) -> None:
        if self.yields and (self.rivals or self._unwanted()):
            raise PreemptedError

    # --- messages

    def _on_push(self, push: Push) -> None:
        if isinstance(push, Progress):
            push = self._with_names(push)
            self.book.hear([push])
            if push.notice:
                log.warning("ckptd: %s", push.notice)
                self.book.outlook.notice = push.notice
            if push.mismatched and self.balance:
                self.balance = False
                log.warning("ckptd: from now on each rank saves all of its own: %s", push.reason)
            self.outbox.update(push)
        elif isinstance(push, Notice) and push.call == "load":
            self.waits_for = ""
            log.warning("ckptd: load of job %s %s: %s", self.job.job, push.message, push.hint)
        elif isinstance(push, Notice):
            self.waits_for = ""  # the daemon has the reason
            self._held_up = reason = self._of_ranks(ConnectError(push.message, hint=push.hint))
            log.warning("ckptd: connect waits: %s; %s", reason.message, reason.hint)
        elif isinstance(push, SlotGranted):
            self.refusal, self._had = None, push.capacity
            self._grants += 1
            self.slots.grant(push.slot, push.capacity)
        elif isinstance(push, SlotsRefused):
            self.refusal = BudgetError(push.message, hint=push.hint)

    def _with_names(self, push: Progress) -> Progress:
        """Adds the keys of differing replicas: daemons know only the numbers of their tensors."""
        names = self.sampling.names(push.save, push.where) if push.where is not None else []
        return msgspec.structs.replace(push, reason=f"{push.reason}: {listed(names)}") if names else push

    @property
    def _limit(self) -> str:
        return "save_timeout_s" if self.staging is not None else "" if self.attachments else "connect_timeout_s"

    def _ask(self, make: Callable[[int], Request], deadline: float | None) -> Reply:
        if self._channel is None:
            raise ChannelLostError("no daemon")
        try:
            return self._channel.request(make, deadline, self._limit)
        except StaleIncarnationError as error:
            self._replaced = error  # the daemon refuses this rank from now on
            raise

    def ask(self, make: Callable[[int], Request], deadline: float | None) -> Reply:
        """Sends a request, after ensure, and returns the answer.

        With a deadline it sends the request again to the next daemon if one ends; else that is the caller's task.
        """
        patience = deadline if deadline is not None else time.monotonic() + self.settings.connect_timeout_s

        def once() -> Reply:
            self.ensure(patience)
            return self._ask(make, deadline)

        return once() if deadline is None else retry_while_daemons_end(once, deadline)

    def pump(self, deadline: float) -> bool:
        """Receives messages of the daemon; waits for the first one until the deadline. False if none came."""
        return self._channel is not None and self._channel.pump(deadline)

    # --- slots and segments

    def ask_slots(self, capacity: int, deadline: float) -> None:
        """Asks for slots of this size; the daemon grants them one by one.

        A wait for the first slot may last beyond the deadline while its memory is allocated.
        """
        self.refusal, before = None, self._grants
        self.slots.unmap_below(capacity)  # the daemon frees them, and counts that memory for the larger ones
        answer = self._ask(lambda seq: AskSlots(seq=seq, capacity=capacity), deadline)
        assert isinstance(answer, SlotsComing)  # noqa: S101 - the reply to AskSlots
        self.capacity, self._grants_before, self._grants_due = capacity, before, before + answer.count
        self._allocated_by = deadline + capacity / _ALLOCATED_PER_S
        self.slots.withdraw_below(capacity)
        self.on_slots_coming()

    @property
    def all_granted(self) -> bool:
        """Whether every promised slot is granted."""
        return self._grants >= self._grants_due

    @property
    def allocating(self) -> bool:
        """Whether slots are promised and the first is not granted yet."""
        return self._grants_before == self._grants < self._grants_due

    def wait_slot(self, nbytes: int, deadline: float) -> str:
        """Name of a granted slot of at least so many bytes.

        Raises BudgetError if there will be none; WaitTimeoutError if none is free by the deadline, or if none can
        become free because other ranks do not save. While the first slot is allocated the deadline is extended: its
        pages are touched once, and the first save needs it.
        """
        while True:
            name = self.slots.fitting(nbytes)
            if name is not None:
                return name
            if self.refusal is not None and not self.slots.count:
                raise self.refusal
            until = max(deadline, self._allocated_by) if self.allocating else deadline
            if not self.pump(min(until, time.monotonic() + _POLL_S)):
                if self._channel is not None and self._channel.lost:
                    raise ChannelLostError("the daemon ended while a save waited for a slot")
                begun = self.unsealed | ({self.staging} if self.staging is not None else set())
                if time.monotonic() >= until or self.book.in_vain(len(self.slots.lent()), begun):
                    raise WaitTimeoutError("no slot was free in time")

    def why_gone(self, name: str, deadline: float) -> CkptdError:
        """Why the file of a granted slot is missing: the arena was removed, or another run took the job over."""
        self.slots.withdraw(name)
        if not os.path.exists(self._socket_path):
            text = f"the arena {self.settings.arena} was removed, and what was staged in it"
            return ConnectError(text, hint="its daemon ends by itself; the next save that finds none starts another")
        try:
            self.ask_slots(self.capacity, deadline)  # raises if the daemon has attached another run
        except CkptdError as error:
            return error
        return ConnectError(f"the memory {self.slots.path(name)} is gone", hint="the next save asks for another")

    def begin_incarnation(self, incarnation: int, run: RunId) -> None:
        """Starts an incarnation that a load has begun; gives up saves that were not handed over."""
        if incarnation > self.incarnation:
            self.incarnation, self.run = incarnation, run
        self.sampling = self.sampling.restarted()
        self.outbox.begin()
