"""A job on one node for tests of the core: says events, keeps every action, answers nothing by itself."""

from ckptd.core import actions as act
from ckptd.core import events as ev
from ckptd.core.beside import Beside
from ckptd.core.coordinator.state_table import Table
from ckptd.core.jobs import Catalogue
from ckptd.core.node.load_reports import HOLD_S
from ckptd.core.policy import Policy
from ckptd.shared.base.ids import NO_RUN, JobKey, SaveId
from ckptd.shared.protocol.messages import Cadence, Progress, Reply, Tier
from tests.runs import RUN, STORE_ID
from tests.seals import a_seal

Table.strict = True  # a step that no table of the core has is an error
Beside.strict = True  # so is a bug that costs no save its orders
KEY = JobKey("/store", "job")
CAPACITY = 4096
LATE = 10**8  # a scan that began after every number that was taken


class AJob:
    """``did`` is every action so far; ``take`` empties it. checked: the core's invariants, at each event."""

    def __init__(
        self, *, world: int = 2, cadence: Cadence | None = None, checked: bool = True, **policy: object
    ) -> None:
        self.catalogue = Catalogue("node", Policy(**policy))
        self.world = world
        self.cadence = cadence or Cadence()
        self.checked = checked
        self.now = 0.0
        self.seq = 0
        self.serial = 0
        self.did: list[act.Action] = []
        self.taking: list[act.TakeIncarnation] = []  # not answered yet

    # --- saying

    def say(self, event: ev.Event) -> list[act.Action]:
        done = self.catalogue.handle(event, self.now)
        self.did += done
        self.taking += [action for action in done if isinstance(action, act.TakeIncarnation)]
        if self.checked:
            self.catalogue.check()
        return done

    def tick(self, seconds: float = 0.0) -> list[act.Action]:
        self.now += seconds
        done = self.catalogue.tick(self.now)
        self.did += done
        self.taking += [action for action in done if isinstance(action, act.TakeIncarnation)]
        due = self.catalogue.next_deadline()
        assert due is None or due > self.now, "the loop would spin"
        if self.checked:
            self.catalogue.check()
        return done

    def hold(self) -> None:
        """Time passes until the node reports what some of its ranks say in a load while others do not."""
        self.tick()
        self.tick(HOLD_S)

    def request(self) -> int:
        self.seq += 1
        return self.seq

    def attach(self, rank: int, session: str = "a", *, incarnation: int = 0, takeover: bool = False, world: int = 0):
        seq = self.request()
        self.say(ev.RankAttached(
            job=KEY, request=seq, session=session, rank=rank, world_size=world or self.world, host="host",
            pid=100 + rank, incarnation=incarnation, run=RUN if incarnation else NO_RUN,
            takeover=takeover, cadence=self.cadence,
        ))  # fmt: skip
        return seq

    def start(self, session: str = "a", *, number: int = 1, committed: tuple[SaveId, ...] = ()) -> "AJob":
        """All ranks attach, the store answers, slots come."""
        for rank in range(self.world):
            self.attach(rank, session)
        if self.of(act.ScanStore):
            self.scan(*committed)
        self.number(number)
        for rank in range(self.world):
            self.slots(rank, session)
        return self

    def number(self, number: int = 1) -> list[act.Action]:
        """The oldest question for a number is answered."""
        session = self.taking.pop(0).session if self.taking else "a"
        return self.say(ev.IncarnationTaken(job=KEY, session=session, number=number, run=RUN))

    def scan(self, *committed: SaveId, partials: tuple[ev.Partial, ...] = (), **words: object) -> list[act.Action]:
        found = tuple(ev.OnStore(save, self.world, 10, save.dirname) for save in committed)
        return self.say(
            ev.StoreScanned(
                job=KEY,
                store_id=STORE_ID,
                after=LATE,
                committed=found,
                partials=partials,
                **{"claimed": self.claimed, **words},
            )
        )

    @property
    def claimed(self) -> int:
        """By the last look at the store that was asked for."""
        claims = [action.claim for action in self.did if isinstance(action, act.ScanStore)]
        return claims[-1].incarnation if claims and claims[-1] is not None else 0

    def ask(self, rank: int, session: str = "a", capacity: int = CAPACITY) -> int:
        seq = self.request()
        self.say(ev.SlotsAsked(job=KEY, request=seq, rank=rank, session=session, capacity=capacity))
        return seq

    def slots(self, rank: int, session: str = "a", capacity: int = CAPACITY) -> None:
        self.take()
        self.ask(rank, session, capacity)
        for action in self.of(act.AllocateSlots):
            self.say(ev.SlotsFit(job=KEY, rank=rank))
            for _ in range(action.count):
                self.ready(rank, capacity)

    def ready(self, rank: int, capacity: int = CAPACITY) -> str:
        self.serial += 1
        name = f"r{rank:05d}-{self.serial:06d}.slot"
        self.say(ev.SlotReady(job=KEY, rank=rank, slot=name, capacity=capacity))
        return name

    def idle(self, rank: int) -> str:
        """A slot the rank may write."""
        return next(s.name for s in self.catalogue.jobs[KEY].node.slots.of_rank(rank) if s.granted)

    def stage(
        self, rank: int, save: SaveId, *, session: str = "a", slot: str = "", drain: bool = False, **words: object
    ) -> int:
        seq = self.request()
        self.say(ev.SegmentStaged(
            job=KEY, request=seq, rank=rank, session=session, world_size=self.world, slot=slot or self.idle(rank),
            save=save, nbytes=10, drain=drain, **words,
        ))  # fmt: skip
        return seq

    def stage_all(self, save: SaveId, **words: object) -> None:
        for rank in range(self.world):
            self.stage(rank, save, **words)

    def digest_all(self, save: SaveId) -> None:
        for slot in list(self.catalogue.jobs[KEY].node.slots.holding(save)):
            self.say(ev.DigestsSealed(job=KEY, slot=slot.name, save=save, seal=a_seal(KEY, save, slot.rank)))

    def drain(self, save: SaveId) -> None:
        """The drain that runs ends well."""
        self.digest_all(save)
        self.say(ev.Drained(job=KEY, save=save))
        self.say(ev.VoteWritten(job=KEY, save=save))
        self.say(ev.CommitEnded(job=KEY, save=save, nbytes=20))

    def gone(self, rank: int, session: str = "a") -> list[act.Action]:
        return self.say(ev.RankGone(job=KEY, rank=rank, session=session))

    def detach(self, rank: int, session: str = "a", *, failed: bool = False) -> int:
        seq = self.request()
        self.say(ev.RankDetached(job=KEY, request=seq, rank=rank, session=session, failed=failed))
        return seq

    def ask_load(self, rank: int, session: str = "a", step: int | None = None) -> int:
        seq = self.request()
        self.say(ev.LoadAsked(job=KEY, request=seq, rank=rank, session=session, step=step))
        return seq

    def report(self, rank: int, save: SaveId, tier: Tier, problem: str = "", *, session: str = "a", **words: bool):
        seq = self.request()
        self.say(ev.LoadReported(
            job=KEY, request=seq, rank=rank, session=session, save=save, tier=tier, problem=problem, **words
        ))  # fmt: skip
        return seq

    def report_both(self, save: SaveId, problem: str = "", **words: bool) -> list[int]:
        """Both ranks, of what they read in memory."""
        return [self.report(rank, save, Tier.ARENA, problem, **words) for rank in range(2)]

    # --- seeing

    def of(self, kind: type[act.Action]) -> list:
        return [a for a in self.did if isinstance(a, kind)]

    def take(self) -> list[act.Action]:
        did, self.did = self.did, []
        return did

    def told(self, rank: int, session: str = "a") -> list[Reply]:
        return [a.message for a in self.of(act.ToRank) if (a.rank, a.session) == (rank, session)]

    def answer(self, seq: int) -> Reply | None:
        """The one answer to a request, None when there is none yet."""
        found = [a.message for a in self.of(act.ToRank) if getattr(a.message, "reply_to", None) == seq]
        assert len(found) <= 1, found
        return found[0] if found else None

    def ends(self, save: SaveId, rank: int = 0, session: str = "a") -> list[str]:
        news = [m for m in self.told(rank, session) if isinstance(m, Progress) and m.save == save]
        return [str(m.end) for m in news if m.end is not None and not m.notice]

    @property
    def saves(self):
        return self.catalogue.jobs[KEY].coordinator.saves

    @property
    def facts(self):
        return self.catalogue.jobs[KEY].coordinator.facts

    @property
    def sessions(self):
        return self.catalogue.jobs[KEY].coordinator.sessions

    @property
    def node(self):
        return self.catalogue.jobs[KEY].node
