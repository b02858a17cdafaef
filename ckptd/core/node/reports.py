"""What a node reports of its ranks to the daemons that coordinate their sessions: one message for all of them. Pure."""

from ckptd.core import events as ev
from ckptd.core.actions import Action, EndMeeting, Meet
from ckptd.core.node.ranks import LocalRank, LocalRanks
from ckptd.core.node.standing import Standing
from ckptd.shared.base.ids import JobKey
from ckptd.shared.format.schemes import Scheme
from ckptd.shared.protocol.topology import MIN_SET_SIZE, Peer, Rendezvous

_TOGETHER_S = 0.02  # ranks that come back together
_CONNECT_S = 1.0  # living ranks of a session that connects: it waits for them in any case


class Reports:
    """By session. ``due``: those with ranks that are not reported yet; ``changed_for``: nodes that lack processes."""

    def __init__(self, job: JobKey, node: str, ranks: LocalRanks, standing: Standing) -> None:
        self._job, self._node = job, node
        self._ranks, self._standing = ranks, standing
        self._meetings: dict[str, Rendezvous | None] = {}  # by session
        self._own: Peer | None = None
        self.due: set[str] = set()
        self.changed_for: set[str] = set()
        self._since: float | None = None  # when something became due

    def meet(self, event: ev.RankAttached) -> list[Action]:
        """A rank of a session waits: where it meets the others."""
        self._own = event.here or self._own
        before = self._meetings.get(event.session)
        self._meetings[event.session] = event.rendezvous
        if event.rendezvous is None or not event.rendezvous.ticket or event.rendezvous == before:
            return []
        return [Meet(job=self._job, session=event.session, rendezvous=event.rendezvous)]

    def candidate(self, session: str) -> str:
        """The node whose daemon coordinates the session."""
        rendezvous = self._meetings.get(session)
        return rendezvous.peer.node if rendezvous is not None else self._node

    @property
    def meets_here(self) -> bool:
        """Whether the daemons of other nodes meet at this one."""
        return any(place is not None and place.peer.node == self._node for place in self._meetings.values())

    @property
    def sessions(self) -> list[str]:
        """Those with ranks here that have come to this daemon."""
        return [session for session in self._meetings if self._of(session)]

    def waits(self, session: str) -> bool:
        """Whether a rank of the session has come to this daemon."""
        return bool(self._of(session))

    def _of(self, session: str) -> list[LocalRank]:
        everybody = (*self._ranks.waiting.values(), *self._ranks.admitted.values())
        return [local for local in everybody if local.session == session]

    def ranks_of(self, session: str) -> set[int]:
        """Those of the session that have come to this daemon."""
        return {local.rank for local in self._of(session)}

    def found(self) -> ev.RanksFound:
        """All processes that live here."""
        return ev.RanksFound(job=self._job, living=self._ranks.living)

    def attached(self, session: str, *, digest: bytes, former: ev.Former) -> ev.NodeAttached | None:
        """What the session's coordinator must know of its ranks here; None if there are none."""
        waiting = [local.attached for local in self._ranks.waiting.values() if local.session == session]
        members = [local.attached for local in self._ranks.admitted.values() if local.session == session]
        if not waiting and not members:
            return None
        last, known, rendezvous = (waiting or members)[-1], self._standing, self._meetings.get(session)
        stores = [event.store_id for event in waiting if event.store_id]
        stores += [known.sessions_store] if members else []
        stores += [event.store_id for event in members]
        return ev.NodeAttached(
            job=self._job,
            session=session,
            peer=self._own or Peer(self._node, "alone", "", "-" * 40),
            waiting=tuple(ev.Arrival(e.rank, e.world_size, e.incarnation, e.run) for e in waiting),
            members=tuple(event.rank for event in members),
            incarnation=known.incarnation if members else 0,
            run=known.run if members else last.run,
            world_size=last.world_size,
            store_id=next((store for store in stores if store), ""),
            takeover=any(event.takeover for event in waiting),
            cadence=last.cadence,
            alone=rendezvous is None or not rendezvous.ticket,
            scheme=rendezvous.scheme if rendezvous is not None else Scheme.NONE,
            set_size=rendezvous.set_size if rendezvous is not None else MIN_SET_SIZE,
            asked=rendezvous is not None and rendezvous.asked,
            living=self._ranks.living,
            digest=digest,
            former=former,
            known=known.incarnation,
            saved_to=known.store_id,
        )

    def end_meetings(self, session: str) -> list[Action]:
        """Tickets of sessions that are neither this one nor have a rank here are good for nothing."""
        over = [name for name in self._meetings if name != session and not self._of(name)]
        met = {name: rendezvous for name in over if (rendezvous := self._meetings.pop(name)) is not None}
        return [EndMeeting(job=self._job, session=name) for name, rendezvous in met.items() if rendezvous.ticket]

    # --- time

    def next_deadline(self) -> float | None:
        """When what is due is reported; in the past while nobody has looked at the clock."""
        if not self.due and not self.changed_for:
            return None
        if self.changed_for or self._since is None or any(map(self._all_here, self.due)):
            return float("-inf")
        return self._since + self._patience_s

    @property
    def _patience_s(self) -> float:
        connects = all(not local.attached.incarnation for session in self.due for local in self._of(session))
        return _CONNECT_S if connects else _TOGETHER_S

    def _all_here(self, session: str) -> bool:
        """Whether each living rank of the session has come to this daemon."""
        here = self.ranks_of(session)
        return all(rank in here for rank, of in self._ranks.live if of == session)

    def take_due(self, now: float) -> list[str]:
        """Sessions that are to be reported now."""
        if not self.due:
            self._since = None
            return []
        self._since = now if self._since is None else self._since
        ripe = sorted(self.due) if now >= self._since + self._patience_s else sorted(filter(self._all_here, self.due))
        self.due -= set(ripe)
        if not self.due:
            self._since = None
        return ripe

    def take_changed(self) -> set[str]:
        """Nodes that are to receive all processes that live here."""
        changed, self.changed_for = self.changed_for, set()
        return changed
