"""Which run a node belongs to, to which store the job is saved, and since when no order or rank came. Pure."""

from ckptd.core import events as ev
from ckptd.core.actions import Action, RememberStore
from ckptd.core.policy import Policy
from ckptd.shared.base.ids import NO_RUN, JobKey, RunId


class Standing:
    """``incarnation``: the largest that was ever known here; ``run``: drawn with it, NO_RUN until a node reports it."""

    def __init__(self, job: JobKey, incarnation: int = 0) -> None:
        self._job = job
        self.incarnation = incarnation
        self.run: RunId = NO_RUN
        self.store_id = ""  # that the job was saved to last
        self.sessions_store = ""  # that the present session is saved to, as far as known here
        self._session = ""

    def heard(self, incarnation: int, run: RunId) -> None:
        """The job has this number, or had an older one."""
        if incarnation > self.incarnation or (incarnation == self.incarnation and run != NO_RUN):
            self.incarnation, self.run = incarnation, run

    def kept(self, event: ev.TopologyKept) -> list[Action]:
        """An earlier process of this daemon knew it."""
        self.heard(event.epoch, NO_RUN)
        return []

    def loads(self, order: ev.LoadOrdered) -> list[Action]:
        """A load that has ended begins an incarnation; one that fails leaves the ranks in the one they have."""
        if order.agreed or order.save is None:
            self.heard(order.incarnation, order.run)
        return []

    def opened(self, order: ev.SessionOpened) -> list[Action]:
        """This session is the job now. Its store is empty while it has seen none, or its coordinator forgot."""
        if order.session != self._session:
            self._session, self.sessions_store = order.session, ""
        self.heard(order.incarnation, order.run)
        return self.saved_to(order)

    def remembered(self, event: ev.StoreRemembered) -> list[Action]:
        """An earlier process of this daemon knew it."""
        self.store_id = event.store_id
        return []

    def saved_to(self, order: ev.SessionOpened | ev.DrainOrdered) -> list[Action]:
        """Later runs of the job learn from this arena to which store it was saved."""
        store_id = order.store_id
        self.sessions_store = store_id or self.sessions_store
        if not store_id or store_id == self.store_id:
            return []
        self.store_id = store_id
        return [RememberStore(job=self._job, store_id=store_id)]


class LeftAlone:
    """A node where no rank lives and no coordinator sends: memory stays for orphan_ttl_s, mere room empty_ttl_s."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._since: float | None = None

    def spoken_to(self) -> None:
        """An order has come, or a rank: the time begins again."""
        self._since = None

    def begin_anew(self, now: float) -> None:
        """It was too long, and what could go is gone."""
        self._since = now

    def until(self, *, held: bool) -> float:
        """When it ends; in the past while nobody has looked at the clock. held: something of a checkpoint lies here."""
        ttl = self._policy.orphan_ttl_s if held else self._policy.empty_ttl_s
        return float("-inf") if self._since is None else self._since + ttl

    def too_long(self, now: float, *, held: bool) -> bool:
        """Whether the time is over."""
        self._since = now if self._since is None else self._since
        return now >= self.until(held=held)
