"""``python -m bench.letters [MEMBERS]``: what a letter of a bundle costs the loop of a coordinator, in and out.

Real links, bundles and messages of one group and its leader, in one process, without sockets: what is sent is handed
over as the bytes that a socket would carry. CPU time, the best of many rounds: a report of each member in one bundle,
from its bytes to the event of the core; an order to each member, up to the bytes of the bundle.
"""

import argparse
import gc
import sys
import time
from collections import deque

from ckptd.core import events as ev
from ckptd.peers.link import Link
from ckptd.peers.packets import Packet, decode_envelope, wrap
from ckptd.peers.relayed_links import HOLD_S, RelayedLinks
from ckptd.peers.remote import Remote
from ckptd.shared.base.ids import NO_RUN, JobKey, SaveId
from ckptd.shared.protocol.topology import Peer

_JOB = JobKey("/store", "job")
_CHIEF, _LEADER = "chief", "leader"
_RANKS = 8
_ROUNDS = 60
_TIMEOUT_S = 10.0


class _Remote(Remote):
    def connect(self) -> None:
        self.asleep = False

    def look(self, now: float) -> None:
        pass

    def _disconnect(self, linger_ms: int) -> None:
        pass


class _Plane(RelayedLinks):
    """One daemon. ``out``: frames that it has sent, and to whom."""

    def __init__(self, node: str, clock: list[float]) -> None:
        super().__init__(node, timeout_s=_TIMEOUT_S, clock=lambda: clock[0])
        self.peer = Peer(node, "arena", f"tcp://{node}:1", node.ljust(40, "-"))
        self.out: deque[tuple[str, bytes]] = deque()

    def _make_remote(self, peer: Peer, link: Link) -> Remote:
        return _Remote(None, None, peer, None, link)  # type: ignore[arg-type]

    def _admit(self, key: str) -> None:
        pass

    def _transmit(self, remote: Remote, packet: Packet) -> bool:
        number = remote.path.number
        self.out.append((remote.peer.node, wrap(packet, self._node, remote.peer.node, self.peer.endpoint, number)))
        return True

    @property
    def direct(self) -> set[str]:
        """Nodes that it speaks to without a leader."""
        return {remote.peer.node for remote in self._remotes.values() if not remote.path.relayed}

    def listens(self) -> None:
        """All that has arrived was read."""
        self._listened_at = self._clock()
        self.tick()

    def takes(self, sender: "_Plane", frame: bytes) -> None:
        """A frame from its bytes on."""
        remote = self._take_packet((sender.peer.node, sender.peer.key), decode_envelope(frame), self._clock())
        if remote is not None:
            self._flush(remote)


class Group:
    """``members`` nodes, their leader and the coordinator, whose links go by the leader."""

    def __init__(self, members: int) -> None:
        self._clock = [100.0]
        self.members = [f"n{number:03d}" for number in range(members)]
        self.planes = {node: _Plane(node, self._clock) for node in (_CHIEF, _LEADER, *self.members)}
        self.chief, self.leader = self.planes[_CHIEF], self.planes[_LEADER]
        for plane in self.planes.values():
            plane.meet(_JOB, [other.peer for other in self.planes.values()])
        for node in self.members:
            self.planes[node].keep_links(_JOB, [_CHIEF, _LEADER], [(_CHIEF, _LEADER)])
        self.leader.keep_links(_JOB, [_CHIEF])
        self.chief.keep_links(_JOB, None, [(node, _LEADER) for node in self.members])
        while self.chief.direct != {_LEADER}:
            self.spend(0.1)

    def spend(self, seconds: float) -> None:
        """All that is due and under way."""
        until = self._clock[0] + seconds
        while self._clock[0] < until:
            self._clock[0] += HOLD_S
            for plane in self.planes.values():
                plane.listens()
            while any(plane.out for plane in self.planes.values()):
                for plane in self.planes.values():
                    self.carry(plane)
                    plane.send_bundles()
        for plane in self.planes.values():
            plane.take_events()

    def carry(self, plane: _Plane, to: str = "") -> None:
        """What it has sent; to: to that one alone."""
        frames, plane.out = plane.out, deque()
        for node, frame in frames:
            if to in {"", node}:
                self.planes[node].takes(plane, frame)
            else:
                plane.out.append((node, frame))

    def report(self, facts: list[ev.Fact]) -> float:
        """Seconds of the coordinator for a report of each member, which leave the leader in one bundle."""
        for node, fact in zip(self.members, facts, strict=True):
            plane = self.planes[node]
            plane.send(_JOB, _CHIEF, ev.Report(job=_JOB, node=node, event=fact))
            plane.send_bundles()
            self.carry(plane, _LEADER)
        self.leader.send_bundles()
        began = time.thread_time()
        self.carry(self.leader, _CHIEF)
        events = self.chief.take_events()
        took_s = time.thread_time() - began
        if [len(getattr(event, "reports", ())) for event in events] != [len(facts)]:
            raise RuntimeError(f"the reports of {len(facts)} members came as {len(events)} events")
        return took_s

    def order(self, order: ev.Message) -> float:
        """Seconds of the coordinator for an order to each member."""
        began = time.thread_time()
        for node in self.members:
            self.chief.send(_JOB, node, order)
        self.chief.send_bundles()
        return time.thread_time() - began


def main() -> int:
    """Prints microseconds a letter."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("members", nargs="?", type=int, default=100)
    members = parser.parse_args().members
    group, took = Group(members), dict[str, list[float]]()
    gc.disable()
    for number in range(1, _ROUNDS + 1):
        save = SaveId(1, number, 10 * number, NO_RUN)
        staged: list[ev.Fact] = []
        for first in range(0, _RANKS * members, _RANKS):
            segments = tuple(ev.StagedSegment(rank, 1 << 30) for rank in range(first, first + _RANKS))
            staged.append(ev.SegmentsStaged(job=_JOB, save=save, world_size=_RANKS * members, segments=segments))
        group.spend(2.0)
        took.setdefault("in, staged", []).append(group.report(staged))
        group.spend(2.0)
        took.setdefault("in, encoded", []).append(group.report([ev.Encoded(job=_JOB, save=save, epoch=1)] * members))
        took.setdefault("out", []).append(group.order(ev.SaveStaged(job=_JOB, node=_CHIEF, save=save)))
    for name, seconds in took.items():
        print(f"{name:12s} {min(seconds) / members * 1e6:5.1f} us a letter")
    return 0


if __name__ == "__main__":
    sys.exit(main())
