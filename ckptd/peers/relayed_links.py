"""Links whose packets may go by a leader: this daemon's own, and those of others that it passes on as their leader.

A link stays between its two ends: numbers, acknowledgements, timeouts and PeerUp know nothing of the way. A leader
keeps nothing but the bundle that leaves next, so with it packets are lost and no state.
"""

import abc
import logging
import math
from collections.abc import Callable, Iterable, Iterator

import msgspec

from ckptd.core import events as ev
from ckptd.peers.bundles import Bundles, Hop, opened
from ckptd.peers.group import SIGN, Group
from ckptd.peers.link import KEEPALIVES
from ckptd.peers.links import PeerLinks
from ckptd.peers.packets import Bundle, Forward, Forwarded, Letter, Packet, encode_body
from ckptd.peers.path import Via
from ckptd.peers.remote import Remote
from ckptd.shared.base.ids import JobKey
from ckptd.shared.base.log_line import line

log = logging.getLogger("ckptd")
HOLD_S = 0.01  # between two bundles that a leader passes on to one daemon
GROUP_S = 0.25  # a report of how far a save is waits so long at a leader for those of the rest of its group
_CALM = 20  # a sign of life waits for others for one of so many parts of the timeout at most, where it is made
_CALM_ON = 10  # and at a leader
_SPREAD_PEER_S = 0.001  # as links dial again: all members of a group lose their leader at the same moment
_SPREAD_S = 1.0
_MOST_HOPS = 256  # of which it is known when the last bundle left


class RelayedLinks(PeerLinks, abc.ABC):
    """Nothing blocks; belongs to the loop's thread."""

    def __init__(self, node: str, *, timeout_s: float, clock: Callable[[], float]) -> None:
        super().__init__(node, timeout_s=timeout_s, clock=clock)
        self._relays: dict[JobKey, dict[str, str]] = {}  # node -> leader
        self._tries: dict[JobKey, bool] = {}
        self._leaders: set[str] = set()
        self._bundles = Bundles()
        self._behind: list[tuple[Remote, Packet]] = []  # of this turn, to leaders: they leave after the bundles
        self._passed_at: dict[Hop, float] = {}
        self._groups: dict[Hop, Group] = {}  # whose packets this daemon passes on

    # --- which relays there are

    def keep_links(self, job: JobKey, nodes: Iterable[str] | None, relays: Iterable[tuple[str, str]] = ()) -> None:
        """As ``PeerLinks`` has it. relays: pairs of a node and the leader by which packets of and to it may go.

        This end tries to go over to the leader; one that keeps links to all nodes follows.
        """
        before, after = self._relays.get(job, {}), dict(relays)
        self._relays[job], self._tries[job] = after, nodes is not None
        self._leaders = {leader for some in self._relays.values() for leader in some.values()}
        if nodes is not None or not self._book.keeps_all(job):
            super().keep_links(job, nodes)
        for node in {**before, **after} if nodes is not None else ():
            remote = self._remote_of(job, node)
            if remote is not None and remote.link.up and before.get(node) != after.get(node):
                self._other_relay(remote)

    def _other_relay(self, remote: Remote) -> None:
        now = self._clock()
        if self._via_to(remote) is not None:
            remote.path.try_soon(now, self._drawn())
        elif remote.path.relayed:
            self._go_direct(remote, now)
        else:
            remote.path.try_never()
        self._turns.see_to(remote, self._due(remote))

    def _via_to(self, remote: Remote) -> Via | None:
        """The relay that this end is to try."""
        for job in sorted(remote.jobs):
            leader = self._relays.get(job, {}).get(remote.peer.node) if self._tries.get(job) else None
            peer = self._book.peer(job, leader) if leader is not None else None
            if peer is not None:
                return Via(job, peer.node, peer.key)
        return None

    def _is_relay_of(self, via: Via, remote: Remote) -> bool:
        """Whether packets of the remote are taken from this relay: the core named it, or the path in force has it."""
        return remote.path.via == via or self._relays.get(via.job, {}).get(remote.peer.node) == via.node

    def forget(self, job: JobKey) -> None:
        """As ``PeerLinks`` has it."""
        self._relays.pop(job, None)
        self._tries.pop(job, None)
        self._leaders = {leader for some in self._relays.values() for leader in some.values()}
        super().forget(job)

    # --- out

    def _deliver(self, remote: Remote, packet: Packet, waits: int = 0) -> bool:
        path, sign = remote.path, remote.link.keepalive
        if path.via is not None and sign is not None and packet.end == sign.end:
            return self._post(path.via, path.number, remote, packet, waits)
        if path.relayed:  # it is an offer to a newer process of the other side
            self._wake(remote)
        if remote.peer.node in self._leaders:
            self._behind.append((remote, packet))
            return True
        return self._transmit(remote, packet)

    def _wake(self, remote: Remote) -> None:
        if remote.asleep:
            remote.asleep, remote.woken_at = False, self._clock()
            self.unconnected.append(remote)

    def _post(self, via: Via, number: int, remote: Remote, packet: Packet, waits: int = 0) -> bool:
        """Hands a packet of this daemon to a leader, with all others of this turn; False: its link is down."""
        if self._leader(via) is None:
            return False
        path, now = remote.path, self._clock()
        calm = not packet.seq and packet.ack <= path.acked and number == path.number
        path.acked = max(path.acked, packet.ack)
        step = self._timeout_s / _CALM  # at moments that all leaders share: the loop wakes once for all of them
        due = now - now % step + step if calm else now
        hop = Hop(via.node, via.key, via.job, Forward)
        self._bundles.add(hop, Letter(remote.peer.node, number, packet, 0, SIGN if calm else waits), due)
        return True

    def _drawn(self) -> float:
        return self._between(0.5, 1.0)

    def _leader(self, via: Via) -> Remote | None:
        leader = self._remotes.get((via.node, via.key))
        return leader if leader is not None and via.job in leader.shared.told and not leader.path.relayed else None

    def send_bundles(self) -> None:
        """Those that are due: at the end of each turn of the loop; then what goes to leaders themselves.

        In this order, since a leader that learns of the end of a job forgets it, and passes nothing on any more.
        """
        now = self._clock()
        for hop, bundle in self._bundles.take(now):
            self._send_bundle(hop, bundle, now)
        behind, self._behind = self._behind, []
        for remote, packet in behind:
            self._send_behind(remote, packet, now)
        if len(self._passed_at) > _MOST_HOPS:
            self._passed_at = {hop: at for hop, at in self._passed_at.items() if now < at + HOLD_S}
            self._groups = {hop: group for hop, group in self._groups.items() if hop in self._passed_at}

    def _send_bundle(self, hop: Hop, bundle: Bundle, now: float) -> None:
        remote = self._remotes.get((hop.node, hop.key))
        packet = remote.link.aside(self._packed(bundle)) if remote is not None else None
        sent = remote is not None and packet is not None and self._transmit(remote, packet)
        if isinstance(bundle, Forwarded):
            self._passed_at[hop] = now
        elif not sent:
            for letter in bundle.letters:
                self._dropped(self._remote_of(bundle.job, letter.node), now)

    def _send_behind(self, remote: Remote, packet: Packet, now: float) -> None:
        if not self._transmit(remote, packet):
            self._dropped(remote, now)

    def _dropped(self, remote: Remote | None, now: float) -> None:
        if remote is not None and not remote.closed:
            remote.link.dropped(now)
            self._turns.see_to(remote, self._due(remote))

    def _packed(self, bundle: Bundle) -> bytes:
        """The body with a bundle."""
        return encode_body(bundle)

    # --- in

    def _heard(self, remote: Remote, packet: Packet, path: int, now: float, via: Via | None = None) -> None:
        sign = remote.link.keepalive
        if sign is None or (packet.end, packet.to) != (sign.to, sign.end):
            return
        if remote.path.heard(path, via, now):
            self._note(remote)
            if via is None:
                self._wake(remote)
                self._try_later(remote, now)
                remote.link.dropped(now)
            else:
                remote.sleep()
            self._deliver(remote, sign)  # so that the other end learns it

    @staticmethod
    def _note(remote: Remote) -> None:
        via = remote.path.via
        log.debug(line("path", node=remote.peer.node, number=remote.path.number, by=via.node if via else "direct"))

    def _take_bundle(self, remote: Remote, bundle: Bundle) -> None:
        if bundle.job not in remote.jobs or remote.path.relayed:
            self.refused["job"] += 1
        elif isinstance(bundle, Forward):
            self._pass_on(remote, bundle)
        else:
            self._open(remote, bundle)

    def _pass_on(self, remote: Remote, bundle: Forward) -> None:
        """As the leader of one side."""
        now, alone = self._clock(), len(bundle.letters) == 1
        for letter in bundle.letters:
            packet, to = opened(letter, bundle.bodies), self._up_for(bundle.job, letter.node)
            if packet is None or to is None or to is remote or to.path.relayed:
                self.refused["relay"] += packet is None  # who is only down is called again by its other end
                continue
            hop = Hop(to.peer.node, to.peer.key, bundle.job, Forwarded)
            group = self._groups.setdefault(hop, Group(self._timeout_s))
            if group.passes(remote.peer.node, letter.waits, now):
                due = now
            elif letter.waits > SIGN:
                due = now + GROUP_S
            elif letter.waits and alone:
                due = now + self._timeout_s / _CALM_ON
            else:
                due = self._passed_at.get(hop, 0.0) + HOLD_S
            self._bundles.add(hop, Letter(remote.peer.node, letter.path, packet, 0, letter.waits), due)

    def _open(self, remote: Remote, bundle: Forwarded) -> None:
        """Packets for this daemon, which a leader has passed on."""
        now, via = self._clock(), Via(bundle.job, remote.peer.node, remote.peer.key)
        touched: dict[int, Remote] = {}
        for letter in bundle.letters:
            sender = self._remote_of(bundle.job, letter.node)
            if sender is not None and self._open_next(sender, letter, bundle, via):
                continue
            packet = opened(letter, bundle.bodies)
            if packet is None or sender is None or not letter.path % 2 or not self._is_relay_of(via, sender):
                self.refused["relay"] += 1
                continue
            sender.link.receive(packet, now)
            self._heard(sender, packet, letter.path, now, via)
            if letter.waits != SIGN:  # that calls for nothing
                touched[id(sender)] = sender
        for sender in touched.values():
            self._flush(sender)

    def _open_next(self, sender: Remote, letter: Letter, bundle: Forwarded, via: Via) -> bool:
        """A letter as nearly all are: of the path in force, with the next body of its link. False: it is another."""
        path, link, now = sender.path, sender.link, self._clock()
        if (path.number, path.via) != (letter.path, via) or letter.body > len(bundle.bodies):
            return False
        body = bundle.bodies[letter.body - 1] if letter.body else b""
        if not link.take_next(letter.packet, body, now):
            return False
        path.heard(letter.path, via, now)
        if body:
            self._got(sender, body)
        due = link.next_deadline()
        if due <= now or not link.settled:
            self._flush(sender)
        else:
            self._turns.see_to(sender, due)
        return True

    # --- time

    def tick(self) -> list[ev.Event]:
        """As ``PeerLinks`` has it, and bundles that are due."""
        events = super().tick()
        self.send_bundles()
        return events

    def next_deadline(self) -> float | None:
        """As ``PeerLinks`` has it; a bundle may be due before."""
        behind = 0.0 if self._behind else None
        times = [due for due in (super().next_deadline(), self._bundles.next, behind) if due is not None]
        return min(times, default=None)

    def _due_beside(self, remote: Remote) -> float:
        return min(super()._due_beside(remote), remote.path.next_deadline() if remote.link.up else math.inf)

    def _look_at(self, remote: Remote, now: float) -> None:
        super()._look_at(remote, now)
        path, sign = remote.path, remote.link.keepalive
        if remote.closed or sign is None:
            return
        if path.relayed and not remote.asleep and now >= remote.woken_at + self._timeout_s / KEEPALIVES:
            remote.sleep()
        if now < path.next_deadline():
            return
        if path.is_silent(min(now, self._listened_at)):
            self._go_direct(remote, now)
        if path.is_to_try(now):
            self._try(remote, sign, now)
        if path.is_to_nudge(now):
            path.nudged(now)
            self._deliver(remote, sign)
        self._turns.see_to(remote, self._due(remote))

    def _try(self, remote: Remote, sign: Packet, now: float) -> None:
        """A sign of life by the relay: an answer on the same way brings this end there."""
        via = self._via_to(remote)
        if via is None or via == remote.path.via:
            remote.path.try_never()
            return
        remote.path.try_later(now, self._drawn())
        self._post(via, remote.path.next_relayed, remote, sign)

    def _try_later(self, remote: Remote, now: float) -> None:
        if self._via_to(remote) is not None:
            remote.path.try_later(now, self._drawn())

    def _go_direct(self, remote: Remote, now: float) -> None:
        remote.path.go_direct(now)
        remote.link.dropped(now)  # what went by the leader may be lost
        self._note(remote)
        self._try_later(remote, now)
        if remote.asleep:
            peers = max((self._book.count(job) for job in remote.jobs), default=0)
            remote.redial_at = now + self._between(0.0, min(_SPREAD_S, peers * _SPREAD_PEER_S))
        self._turns.see_to(remote, self._due(remote))

    # --- what becomes of links

    def _up(self, remote: Remote, now: float, *, fresh: bool) -> None:
        remote.path.begin(now)
        if self._via_to(remote) is not None:
            remote.path.try_soon(now, self._drawn())
        super()._up(remote, now, fresh=fresh)
        for job in [job for job in remote.jobs if self._tries.get(job)]:
            for node in [node for node, leader in self._relays[job].items() if leader == remote.peer.node]:
                led = self._remote_of(job, node)
                if led is not None and led.link.up:
                    self._other_relay(led)

    def _down(self, remote: Remote, now: float) -> None:
        remote.path.begin(now)
        super()._down(remote, now)

    def _close(self, remote: Remote) -> None:
        now = self._clock()
        if not remote.closed:  # last words
            for hop, bundle in self._bundles.take_all(remote.node_key):
                self._send_bundle(hop, bundle, now)
            for one, packet in self._behind:
                if one is remote:
                    self._send_behind(remote, packet, now)
            self._behind = [(one, packet) for one, packet in self._behind if one is not remote]
        super()._close(remote)
        self._lost(remote.peer.node, now)

    def _lost(self, node: str, now: float) -> None:
        """What goes by it goes directly from now on."""
        for remote in self._remotes.values() if node in self._leaders else ():
            if remote.path.via is not None and remote.path.via.node == node:
                self._go_direct(remote, now)

    # --- in another thread

    def _signs_of_life(self) -> Iterator[tuple[Remote, Packet]]:
        """Packets that show that this daemon lives, one for each direct link. From any thread."""
        letters: dict[Via, list[Letter]] = {}
        for remote in list(self._remotes.values()):
            sign, via, number = remote.link.keepalive, remote.path.via, remote.path.number
            if sign is not None and via is not None:
                letters.setdefault(via, []).append(Letter(remote.peer.node, number, sign))
            elif sign is not None:
                yield remote, sign
        for via, some in letters.items():
            leader = self._remotes.get((via.node, via.key))
            sign = leader.link.keepalive if leader is not None else None
            if leader is not None and sign is not None:
                body = self._packed(Forward(via.job, tuple(some)))
                yield leader, msgspec.structs.replace(sign, body=body)
