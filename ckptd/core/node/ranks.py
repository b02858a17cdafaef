"""The ranks of a job on this node: admitted, waiting to join, living; and how to send to them. Pure."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ckptd.core import events as ev
from ckptd.core.actions import Action, ToRank
from ckptd.core.node.slot_retention import SlotRetention
from ckptd.core.node.slots import SlotTable
from ckptd.shared.base.errors import joined
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.base.wording import named_ranks
from ckptd.shared.protocol.messages import Done, End, Milestone, Notice, Progress, Refused, Reply


@dataclass(slots=True)
class LocalRank:
    """A rank that presented itself here."""

    attached: ev.RankAttached
    late: str = ""  # what verifies its late copies, as of its last save
    load_request: int | None = None
    load_asked: ev.LoadAsked | None = None  # what it asked for first
    load_order: ev.LoadOrdered | None = None  # the answer, kept back until the slot's digests are taken

    @property
    def waits_for_load(self) -> bool:
        """Whether it waits for a word of the coordinator about a load."""
        return self.load_request is not None and self.load_order is None

    @property
    def rank(self) -> int:
        """Its number."""
        return self.attached.rank

    @property
    def session(self) -> str:
        """Those it was started with."""
        return self.attached.session

    @property
    def host(self) -> str:
        """The machine's name, as the rank sees it."""
        return self.attached.host

    @property
    def pid(self) -> int:
        """Of its process."""
        return self.attached.pid


class LocalRanks:
    """By rank, or by rank and session where there may be several processes of one rank."""

    def __init__(self, job: JobKey, slots: SlotTable) -> None:
        self._job = job
        self._slots = slots
        self.admitted: dict[int, LocalRank] = {}  # let in by the coordinator
        self.waiting: dict[tuple[int, str], LocalRank] = {}  # waiting to join
        self.replaced: dict[tuple[int, str], LocalRank] = {}  # they still receive what becomes of their saves
        self.live: dict[tuple[int, str], ev.RankFound] = {}
        self._awaited = ev.SlotsAwaited(job=job)  # as it was reported last

    @property
    def living(self) -> tuple[ev.Living, ...]:
        """All processes that live here."""
        return tuple(ev.Living(one.rank, one.session, one.pid, one.host) for one in self.live.values())

    def of(self, session: str) -> tuple[int, ...]:
        """Ranks of the session that live here."""
        return tuple(rank for rank, live in sorted(self.live) if live == session)

    @property
    def slots_changed(self) -> bool:
        """Whether memory is being allocated for other ranks than was reported last."""
        return self._slots.awaited != self._awaited.ranks

    def slots_awaited(self) -> ev.SlotsAwaited:
        """The report for whom memory is being allocated."""
        self._awaited = ev.SlotsAwaited(job=self._job, ranks=self._slots.awaited)
        return self._awaited

    def found(self, event: ev.RankFound) -> list[Action]:
        """A process that may never have called this daemon."""
        self.live[event.rank, event.session] = event
        return []

    def lives(self, event: ev.RankAttached) -> None:
        """Its process holds the lock of its file."""
        self.live[event.rank, event.session] = ev.RankFound(
            job=self._job, rank=event.rank, session=event.session, pid=event.pid, host=event.host
        )

    def unattached(self, rank: int) -> ev.RankFound | None:
        """The rank's process where it lives and has called an earlier daemon of this node, and not this one."""
        called = {*self.waiting, *self.replaced}
        found = [live for key, live in self.live.items() if key[0] == rank and key not in called]
        return found[0] if found and rank not in self.admitted else None

    @property
    def world_size(self) -> int:
        """Of the session that is in, 0 while no rank of it is here."""
        return next((local.attached.world_size for local in self.admitted.values()), 0)

    def came(self, event: ev.RankAttached) -> None:
        """A rank waits to join."""
        self.waiting[event.rank, event.session] = LocalRank(event)

    def saves_late(self, event: ev.SegmentStaged) -> None:
        """Notes what verifies a rank's late copies."""
        self.admitted[event.rank].late = event.late

    def is_in(self, event: ev.FromRank) -> bool:
        """Whether the sender is the rank."""
        local = self.admitted.get(event.rank)
        return local is not None and local.session == event.session

    def stranger(self, event: ev.FromRank) -> Action:
        """An answer for a rank that was replaced, or is not let in yet: its words count for nothing."""
        if (event.rank, event.session) in self.waiting:
            code, text = "protocol", "this rank is not attached yet"
        else:
            code, text = "stale", f"another process is rank {event.rank} of the job now"
        refusal = Refused(reply_to=event.request, code=code, message=text)
        return ToRank(job=self._job, rank=event.rank, session=event.session, message=refusal)

    def admit(self, local: LocalRank) -> list[Action]:
        """The rank is in. What another process of that rank may still be writing is given up."""
        self.admitted[local.rank] = local
        others = any(rank == local.rank and session != local.session for rank, session in self.live)
        return self._slots.rank_left(local.rank, writer_gone=False) if others else []

    def refused(self, order: ev.SessionRefused) -> list[Action]:
        """These ranks may not come in; all that wait of the session, where the order names none."""
        actions: list[Action] = []
        for rank in order.ranks or sorted(rank for rank, session in self.waiting if session == order.session):
            admitted = self.admitted.get(rank)
            if order.code == "stale" and admitted is not None and admitted.session == order.session:
                actions += self._put_out(admitted)  # its node slept while another incarnation of the job began
            local = self.waiting.pop((rank, order.session), None)
            if local is not None:
                refusal = Refused(
                    reply_to=local.attached.request, code=order.code, message=order.message, hint=order.hint
                )
                actions.append(self.to(local, refusal))
        return actions

    def session_waits(self, order: ev.SessionWaits) -> list[Action]:
        """A rank that waits to join, or calls load, receives the ranks that its session waits for."""
        local, call = self.waiting.get((order.rank, order.session)), "connect"
        if local is None:
            local, call = self.admitted.get(order.rank), "load"
            if local is None or local.session != order.session or local.load_request is None:
                return []
        return [self.to(local, Notice(message=order.message, hint=order.hint, call=call))]

    def replace(self, session: str) -> list[Action]:
        """Another session is the job now: those of others are out."""
        actions: list[Action] = []
        for old in [local for local in self.admitted.values() if local.session != session]:
            actions += self._put_out(old)
        return actions

    def _put_out(self, old: LocalRank) -> list[Action]:
        """What it says counts for nothing any more."""
        actions: list[Action] = []
        del self.admitted[old.rank]
        lives = (old.rank, old.session) in self.live
        if lives:
            self.replaced[old.rank, old.session] = old
        if old.load_request is not None:
            text = f"another process is rank {old.rank} of the job now"
            actions.append(self.to(old, Refused(reply_to=old.load_request, code="stale", message=text)))
        return [*actions, *self._slots.rank_left(old.rank, writer_gone=not lives)]

    def drop(self, rank: int, session: str) -> list[Action]:
        """The rank is gone: its demand for slots ends."""
        self.waiting.pop((rank, session), None)
        self.replaced.pop((rank, session), None)
        local = self.admitted.get(rank)
        if local is None or local.session != session:
            return []
        del self.admitted[rank]
        return self._slots.rank_left(rank, writer_gone=True)

    # --- words

    def to(self, local: LocalRank, message: Reply) -> Action:
        """A word for one of them."""
        return ToRank(job=self._job, rank=local.rank, session=local.session, message=message)

    def tell(self, rank: int, message: Reply) -> list[Action]:
        """A word for the rank, if it is in."""
        local = self.admitted.get(rank)
        return [self.to(local, message)] if local else []

    def answer(self, asked: ev.FromRank, message: Reply) -> list[Action]:
        """The answer to what a process asked some time ago: it may have been replaced since, or be gone."""
        local = self.admitted.get(asked.rank)
        if local is None or asked.session not in {"", local.session}:
            local = self.replaced.get((asked.rank, asked.session))
        return [self.to(local, message)] if local else []

    def tell_all(self, message: Reply) -> list[Action]:
        """A word for all that are, or were, in.

        A save that is durable, and has a reason why that is worth nothing to its ranks, has failed for them.
        """
        told = [self.to(local, message) for local in self.admitted.values()]
        if isinstance(message, Progress) and message.end is End.DURABLE and message.reason:
            message = Progress(save=message.save, end=End.FAILED, reason=message.reason)
        return [*told, *(self.to(local, message) for local in self.replaced.values())]

    def save_reached(self, milestone: Milestone) -> Callable[[ev.SaveStaged | ev.SaveProtected], list[Action]]:
        """Notifies all that are, or were, in."""
        return lambda order: self.tell_all(Progress(save=order.save, milestone=milestone))

    def save_ended(self, order: ev.SaveEnded) -> list[Action]:
        """Notifies all that are, or were, in."""
        milestone = Milestone.DURABLE if order.end is End.DURABLE else None
        return self.tell_all(
            Progress(
                save=order.save, milestone=milestone, end=order.end, reason=order.reason,
                mismatched=order.mismatched, where=order.where,
            )
        )  # fmt: skip

    def save_waits(self, order: ev.SaveWaits) -> list[Action]:
        """Those that have delivered the save receive the ranks that it waits for; the others have no such save."""
        news = Progress(save=order.save, reason=order.reason, idle=order.idle)
        return [action for slot in self._slots.holding(order.save) for action in self.tell(slot.rank, news)]

    def missed(self, rank: int, pending: Iterable[SaveId]) -> list[Action]:
        """The rank closes: it receives the saves of other ranks that can never be complete without it."""
        actions: list[Action] = []
        for save in sorted(pending):
            others = sorted({slot.rank for slot in self._slots.holding(save)})
            if others and rank not in others:
                text = f"{named_ranks(others)} saved it, and rank {rank} has not"
                reason = joined(text, "call client.save(state, step) on every rank")
                actions += self.tell(rank, Progress(save=save, end=End.ABANDONED, reason=reason))
        return actions

    def coordinator_lost(
        self, node: str, slot_retention: SlotRetention, written: SaveId | None, voted: SaveId | None
    ) -> list[Action]:
        """Before the node answers, these saves stay undecided: ranks that have delivered one receive that.

        Of what is staged already one rank receives it, for all. written, voted: what this node writes its part of, or
        has voted for, and another node may commit.
        """
        actions: list[Action] = []
        for save in sorted(slot_retention.pending):
            reason = f"waits for {_coordinator(node)} and does not answer: ckptd status there"
            actions += self.save_waits(ev.SaveWaits(job=self._job, node=node, save=save, reason=reason))
        if unended := slot_retention.unended - {voted}:
            why = "the commit is made once all nodes have voted" if max(unended) == written else ""
            actions += self.not_durable(node, max(unended), why)
        return actions

    def not_durable(self, node: str, save: SaveId, why: str = "") -> list[Action]:
        """The save is not durable while its coordinator, of this node, does not answer: for one rank, for all."""
        if not self.admitted:
            return []
        text = f"{_coordinator(node)}, does not answer"
        verdict = f"is not durable yet ({why})" if why else "is not durable before it does"
        notice = f"{text}: step {save.step} {verdict}; ckptd status there"
        return self.tell(min(self.admitted), Progress(save=save, notice=notice, stuck=text))

    def done(self, rank: int, request: int) -> list[Action]:
        """Its request is taken over."""
        return self.tell(rank, Done(reply_to=request))

    def taken_over(self, event: ev.FromRank) -> list[Action]:
        """What it asked for will be done."""
        return self.done(event.rank, event.request)

    def refuse(self, rank: int, request: int, code: str, message: str, hint: str = "") -> list[Action]:
        """Its request is not."""
        return self.tell(rank, Refused(reply_to=request, code=code, message=message, hint=hint))


def _coordinator(node: str) -> str:
    return f"node {node}, whose daemon coordinates the job"
