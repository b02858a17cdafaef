"""A training process and its client: attaches, loads, saves, and comes back to a daemon that was restarted."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckptd.core import actions as act
from ckptd.core import events as ev
from ckptd.shared.base.ids import NO_RUN, SaveId
from ckptd.shared.format.replica_attestations import Attestation
from ckptd.shared.format.slot import Seal, SlotState
from ckptd.shared.protocol.messages import (
    Attached,
    LoadFrom,
    Milestone,
    Progress,
    Refused,
    SegmentsHere,
    SlotGranted,
    SlotsRefused,
)
from ckptd.shared.protocol.segments import Wanted
from tests.simulation.arena import content_of
from tests.simulation.machine import Machine, make
from tests.simulation.reading import ElsewhereError, Images, Read, read

if TYPE_CHECKING:
    from tests.simulation.session import Session

CAPACITY = 1 << 17
SAVE_TIMEOUT_S = 10.0
_ROUTE_S = 0.0005
_LOOK_S = 0.3  # how often it looks whether a daemon is back
_LOAD_TRIES = 3


@dataclass(eq=False, slots=True)
class Save:
    """What the rank's handle knows."""

    save: SaveId
    milestones: set[Milestone] = field(default_factory=set)
    end: str = ""
    slot: str = ""
    attestations: tuple[Attestation, ...] = ()
    acknowledged: bool = False


class Proc:
    """One rank. ``state``: new, waiting, in, lost (its daemon died), stale (told that it was replaced), out."""

    def __init__(self, session: "Session", rank: int, machine: Machine) -> None:
        self.session = session
        self.world = session.world
        self.job = session.job
        self.rank = rank
        self.machine = machine
        self.alive = True
        self.state = "new"
        self.life = 0  # of the daemon it speaks with
        self.incarnation, self.run = 0, NO_RUN
        self.counter = 0
        self.granted: dict[str, int] = {}
        self.asked_slots = False
        self.saves: dict[SaveId, Save] = {}
        self.loading = 0  # tries left
        self.reading: LoadFrom | None = None
        self.read: Read | None = None
        self.here: dict[int, str] = {}  # files that it was told of in a load, by the rank that saved what is in them
        self.balance = True  # saves slices, until it hears that they did not make a whole
        self._looked = False  # a save in which it looked at all that is shared was staged
        self._waits: dict[int, str] = {}
        self._staging: tuple[Save, float, bool] | None = None  # waits for a slot, until, drain
        self.copying = ""
        machine.arena.job(self.job).rank_files[rank, session.name] = self

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.session.name}"

    @property
    def doing(self) -> str:
        """For transcripts."""
        staging = f"stages {self._staging[0].save}" if self._staging else ""
        return f"waits for {list(self._waits.values())} {staging} load={self.loading} granted={list(self.granted)}"

    # --- to the daemon

    def _say(self, what: str, kind: type[Any], **values: Any) -> None:
        """A request, on its way to the daemon that it was attached to."""
        self.world.seq += 1
        seq = self.world.seq
        self._waits[seq] = what
        event = make(kind, job=self.job, rank=self.rank, session=self.session.name, request=seq, **values)
        self.world.clock.after(_ROUTE_S, self._arrive, event, self.life)

    def _arrive(self, event: ev.Event, life: int) -> None:
        machine = self.machine
        if machine.life != life or machine.catalogue is None or not self.alive:
            return
        if isinstance(event, ev.RankAttached):
            memory = machine.arena.job(self.job)
            for rank, session in [key for key, proc in memory.rank_files.items() if proc.alive]:
                machine.found(self.job, rank, session)
        elif isinstance(event, ev.SegmentStaged) and not self._door_agrees(event):
            answer = Refused(reply_to=event.request, code="protocol", message="the seal says otherwise")
            self.hear(act.ToRank(job=self.job, rank=self.rank, session=self.session.name, message=answer))
            return
        machine.say(event)

    def _door_agrees(self, event: ev.SegmentStaged) -> bool:
        slot = self.machine.arena.slot(self.job, event.slot)
        return slot is not None and slot.save == event.save and slot.rank == self.rank

    def attach(self) -> None:
        """Knocks, as soon as there is a daemon; looks again while there is none."""
        if not self.alive or self.state not in ("new", "lost"):
            return
        if self.machine.catalogue is None:
            self.world.clock.after(_LOOK_S, self.attach)
            return
        memory = self.machine.arena.job(self.job)
        memory.rank_files[self.rank, self.session.name] = self
        self.life = self.machine.life
        self.state = "waiting"
        self._say(
            "attach",
            ev.RankAttached,
            world_size=self.session.world_size,
            host=self.machine.name,
            pid=1,
            incarnation=self.incarnation,
            run=self.run,
            takeover=self.session.takeover,
            cadence=self.session.cadence,
            rendezvous=self.session.rendezvous,
            here=self.machine.peer,
        )

    def daemon_lost(self) -> None:
        """The connection broke. Who was saying goodbye ends without an answer."""
        if self.alive and self.state == "closing":
            self.alive, self.state = False, "out"
            self.session.closed(self)
            return
        if not self.alive or self.state not in ("waiting", "in"):
            return
        self.state = "lost" if self.incarnation else "new"
        self._waits.clear()
        self.reading = None
        self.granted = {self.copying: CAPACITY} if self.copying else {}
        self.asked_slots = False
        if self.loading:
            self.loading -= 1
            if not self.loading:
                self.session.failed(self, "the daemon died in each try of the load")
        self.world.clock.after(self.world.clock.between(0.5, 1.5) * _LOOK_S, self.attach)

    def die(self, *, told: bool = True) -> None:
        """The process ends without a word. told: its node still stands and can see it."""
        if not self.alive:
            return
        self.alive, self.state = False, "out"
        self.world.log(self.machine, f"{self} dies")
        watched = (self.job, self.rank, self.session.name)
        if told and self.machine.catalogue is not None and watched in self.machine.watched:
            self.world.clock.after(self.world.clock.mostly(0.01, 2.0), self._missed, self.machine.life)

    def _missed(self, life: int) -> None:
        if self.machine.life == life:
            self._leave_files()
            self.machine.say(make(ev.RankGone, job=self.job, rank=self.rank, session=self.session.name))

    def _leave_files(self) -> None:
        memory = self.machine.arena.jobs.get(self.job)
        if memory is not None:
            memory.rank_files.pop((self.rank, self.session.name), None)
        self.machine.watched.discard((self.job, self.rank, self.session.name))

    def close(self) -> None:
        """Says goodbye and ends; without a daemon it just ends."""
        if not self.alive:
            return
        if self.state != "in":
            self.die()
            return
        self._leave_files()
        self._say("detach", ev.RankDetached)
        self.state = "closing"

    # --- load and save

    def load(self) -> None:
        """Asks to restore; the session hears how it ended."""
        if self.alive and self.state == "in":
            self.loading = self.loading or _LOAD_TRIES
            self._ask_load()
        elif self.alive:
            self.loading = self.loading or _LOAD_TRIES  # asked when the daemon is back

    def _ask_load(self) -> None:
        step, run = self.session.named
        self._say("load", ev.LoadAsked, step=step, run=run)

    def save(self, step: int, *, drain: bool) -> None:
        """Into a slot, when one is granted in time."""
        if not self.alive:
            return
        self.counter += 1
        handle = Save(SaveId(self.incarnation, self.counter, step, self.run))
        self.saves[handle.save] = handle
        self.world.book.begun(self, handle.save)
        if len(self.saves) > 64:
            del self.saves[min(self.saves)]
        if self.state == "stale":
            self.session.saved(self)
            return
        self._ask_slots()
        self._staging = (handle, self.world.clock.now + SAVE_TIMEOUT_S, drain)
        self.world.clock.after(SAVE_TIMEOUT_S, self._too_late, handle)
        self._try_staging()

    def _ask_slots(self) -> None:
        if self.state == "in" and not self.asked_slots:
            self.asked_slots = True
            self.granted = {self.copying: CAPACITY} if self.copying else {}  # given back
            self._say("slots", ev.SlotsAsked, capacity=CAPACITY)

    def _try_staging(self) -> None:
        if self._staging is None or self.copying or not self.granted:
            return
        self.copying = next(iter(self.granted))
        self.world.clock.after(self.world.hardware.copy_s(self.world.clock), self._copied, self.copying)

    def _copied(self, name: str) -> None:
        """The segment is in the slot: seal it, and hand it over if there is somebody to take it."""
        self.granted.pop(name, None)
        staging, self.copying, self._staging = self._staging, "", None
        if staging is None or not self.alive:
            return
        handle, _, drain = staging
        slot = self.machine.arena.slot(self.job, name)
        if slot is None:  # unlinked under the mapping: the bytes go nowhere
            self.session.saved(self)
            return
        assert slot.save is None, f"{self} writes into {name}, which holds {slot.save}"
        if self.balance:
            handle.attestations = self.session.replicas.said(self.rank, handle.save.step, first_look=not self._looked)
        seal = Seal(
            state=SlotState.SEALED,
            job=self.job,
            save=handle.save,
            rank=self.rank,
            world_size=self.session.world_size,
            image_nbytes=10_000 + 997 * self.rank,
            leaves_digest=content_of(handle.save, self.rank, self.session.name),
            attestations=handle.attestations,
        )
        self.machine.arena.put_seal(self.job, slot, seal)
        handle.slot = name
        if self.state == "in":
            self._hand_over(handle, drain=drain)
        self.session.saved(self)

    def _hand_over(self, handle: Save, *, drain: bool = False) -> None:
        self._say(
            f"hand over {handle.save.text}",
            ev.SegmentStaged,
            world_size=self.session.world_size,
            slot=handle.slot,
            save=handle.save,
            nbytes=10_000 + 997 * self.rank,
            drain=drain,
            attestations=handle.attestations,
        )

    def _too_late(self, handle: Save) -> None:
        if self._staging is None or self._staging[0] is not handle or self.copying or not self.alive:
            return
        self._staging = None
        handle.end = "skipped"
        self.world.book.ended(self, handle.save, handle.end)
        if self.state == "in":
            self._say("skip", ev.SaveSkipped, save=handle.save, reason="no slot was free in time")
        self.world.counts["skips"] += 1
        self.session.saved(self)

    # --- from the daemon

    def hear(self, action: act.ToRank) -> None:  # noqa: C901 - one line per message
        """A reply or a push. Who is not attached any more hears nothing."""
        message = action.message
        if not self.alive or self.state in ("out", "lost", "stale", "new"):
            return
        what = ""
        if hasattr(message, "reply_to"):
            what = self._waits.pop(message.reply_to, "")
            assert what, f"{self} did not ask for {message}"
        match message:
            case Attached():
                self._welcome(message)
            case Refused():
                self._refused(what, message)
            case SlotGranted():
                self._grant(message)
            case SlotsRefused():
                self.asked_slots = False  # the next save asks again
            case Progress():
                self._news(message)
            case LoadFrom():
                self._ordered(message)
            case SegmentsHere():
                self._have_segments(message)
        if what == "detach":
            self.alive, self.state = False, "out"
            self.session.closed(self)
        elif what.startswith("hand over") and not isinstance(message, Refused):
            for handle in self.saves.values():
                handle.acknowledged |= what.endswith(handle.save.text)

    def _welcome(self, message: Attached) -> None:
        self.world.promises.welcomed(self, message.incarnation)
        again = bool(self.incarnation)
        self.state, self.incarnation, self.run = "in", message.incarnation, message.run
        for news in message.known:
            self._news(news)
        if not again:
            self.session.attached(self)
            return
        for handle in list(self.saves.values()):
            if handle.slot and not handle.acknowledged and handle.save.incarnation == self.incarnation:
                self._hand_over(handle)
        if self._staging is not None or self.saves:
            self._ask_slots()
        if self.loading:
            self._ask_load()

    def _refused(self, what: str, message: Refused) -> None:
        if what == "attach":
            self.session.failed(self, f"refused: {message.code}: {message.message}")
        elif what in ("load", "report"):
            self.loading, self.reading = 0, None
            self.session.failed(self, f"load: {message.code}: {message.message}")
        elif message.code == "stale":
            self.state = "stale"
            self._waits.clear()
            if self._staging is not None and not self.copying:
                self._staging = None
                self.session.saved(self)

    def _grant(self, message: SlotGranted) -> None:
        slot = self.machine.arena.slot(self.job, message.slot)
        assert slot is not None, f"{self} was granted {message.slot}, which is not there"
        assert slot.rank == self.rank, f"{self} was granted {message.slot}"
        assert slot.save is None, f"{self} was granted {message.slot}, which holds {slot.save}"
        self.world.promises.granted(self, message.slot)
        self.granted[message.slot] = message.capacity
        self._try_staging()

    def _news(self, news: Progress) -> None:
        self.world.promises.told(self, news)
        handle = self.saves.get(news.save)
        self.balance &= not news.mismatched
        self._looked |= news.milestone is not None
        if handle is not None and news.milestone is not None:
            handle.milestones.add(news.milestone)
        if news.end is not None:
            self.world.book.ended(self, news.save, str(news.end))
        if handle is not None and news.end is not None:
            handle.end = str(news.end)
        self.session.news(self, news)

    def _ordered(self, order: LoadFrom) -> None:
        self.reading = None
        if order.save is None or order.agreed:
            self.loading = 0
            if order.agreed or order.incarnation > self.incarnation:
                self.incarnation, self.run, self.counter = order.incarnation, order.run, 0
            self.session.loaded(self, order)
            return
        self.world.promises.read_from(self, order)
        self.reading, self.here = order, {}
        if order.saved_by:
            wanted = tuple(Wanted(rank) for rank in sorted(self.world.promises.needed(self, order.save)))
            self._say("segments", ev.SegmentsWanted, save=order.save, wanted=wanted)
            return
        self.world.clock.after(self.world.hardware.read_s(self.world.clock), self._have_read, order)

    def _have_segments(self, here: SegmentsHere) -> None:
        order = self.reading
        if order is None or order.save is None:
            return
        if here.refused or here.lacks:
            self.reading = self.read = None
            self.world.counts["segments lacked"] += 1
            problem, lacks = here.refused or here.lacks[0].problem, tuple(one.rank for one in here.lacks)
            self._say("report", ev.LoadReported, save=order.save, tier=order.tier, problem=problem, lacks=lacks)
            return
        self.here = {one.rank: one.name for one in here.files}
        self.world.clock.after(self.world.hardware.read_s(self.world.clock), self._have_read, order)

    def _have_read(self, order: LoadFrom) -> None:
        if self.reading is not order or not self.alive or self.state != "in":
            return
        self.reading = None
        assert order.save is not None
        problem, reshape, images = "", False, Images()
        try:
            images = read(self, order)
        except ElsewhereError as error:
            problem, reshape = str(error), True
        else:
            problem = "" if images else f"nothing to read at {order.slot or order.path}"
        self.read = Read(order.save, order.tier, images) if images else None
        if order.saved_by:
            self._say("drop", ev.SegmentsDropped, save=order.save)
        how = ", whole" * order.whole + ", pulled" * bool(order.saved_by)
        self.world.counts[f"read {order.tier}{how}"] += 1
        self.world.counts["reads of slices"] += len(images) > 1
        self._say("report", ev.LoadReported, save=order.save, tier=order.tier, problem=problem, reshape=reshape)
