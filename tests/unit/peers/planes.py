"""Planes with real sockets on loopback, driven by one loop; as a program, one plane in a process of its own."""

import json
import os
import subprocess
import sys
import time

import msgspec
import zmq

from ckptd.core import events as ev
from ckptd.peers.identity import identify
from ckptd.peers.plane import PeerPlane
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.protocol.topology import Peer
from ckptd.system.config import Config
from tests import pythons
from tests.runs import RUN

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
JOB = JobKey("/store", "job")
OTHER = JobKey("/store", "other")
TIMEOUT_S = 3.0  # a busy machine lets nobody run for a second


class Kept(PeerPlane):
    """Keeps a link to each peer of each job."""

    def meet(self, job, peers):
        self.keep_links(job, None)
        super().meet(job, peers)


def a_plane(directory, node, *, timeout_s=TIMEOUT_S, **settings):
    """A plane whose arena is the directory, made if missing."""
    os.makedirs(directory, exist_ok=True)
    config = Config(arena=str(directory), node=node, peer_address="127.0.0.1", **settings)
    return Kept(identify(config), timeout_s=timeout_s)


def staged(node, counter, job=JOB):
    """A message with a number in it."""
    return ev.SaveStaged(job=job, node=node, save=SaveId(1, counter, counter, RUN))


class World:
    """Planes by node name and what each of them heard. A context manager that closes them."""

    def __init__(self, base):
        self.base = base
        self.planes = {}
        self.heard = {}

    def start(self, node, **settings):
        self.planes[node] = a_plane(self.base / node, node, **settings)
        self.heard[node] = []
        return self.planes[node]

    def stop(self, node):
        self.planes.pop(node).close()

    def all_meet(self, *jobs):
        peers = [plane.peer for plane in self.planes.values()]
        for plane in self.planes.values():
            for job in jobs or (JOB,):
                plane.meet(job, peers)

    def turn(self, timeout_ms=20):
        poller = zmq.Poller()
        for plane in self.planes.values():
            for socket in plane.pollables:
                poller.register(socket, zmq.POLLIN)
        due = min((plane.next_deadline() or 1e12 for plane in self.planes.values()), default=0.0)
        poller.poll(max(0, min(timeout_ms, int((due - time.monotonic()) * 1000) + 1)))
        for node, plane in self.planes.items():
            self.heard[node] += plane.receive()
            self.heard[node] += plane.tick()

    def until(self, what, timeout_s=60.0):
        deadline = time.monotonic() + timeout_s
        while not what():
            assert time.monotonic() < deadline, (self.heard, {n: p.problems() for n, p in self.planes.items()})
            self.turn()

    def spend(self, seconds):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.turn()

    def of(self, node, kind):
        return [event for event in self.heard[node] if isinstance(event, kind)]

    def ups(self, node, of=None, job=JOB):
        return [e.fresh for e in self.of(node, ev.PeerUp) if of in (None, e.node) and e.job == job]

    def counters(self, node):
        return [event.save.counter for event in self.of(node, ev.SaveStaged)]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for plane in self.planes.values():
            plane.close()


class Apart:
    """A plane in a process of its own, which meets the peer given and answers each message with the same number."""

    def __init__(self, directory, node, peer, **settings):
        self.process = pythons.Popen(
            [
                sys.executable,
                "-P",
                os.path.abspath(__file__),
                str(directory),
                node,
                peer_text(peer),
                json.dumps(settings),
            ],
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": ROOT},
        )
        self.peer = msgspec.json.decode(self.process.stdout.readline(), type=Peer)

    def kill(self):
        self.process.kill()
        self.process.wait(10)
        self.process.stdout.close()


def peer_text(peer):
    return msgspec.json.encode(peer).decode()


def main():
    directory, node, peer, settings = sys.argv[1:]
    plane = a_plane(directory, node, **json.loads(settings))
    print(peer_text(plane.peer), flush=True)
    plane.meet(JOB, [msgspec.json.decode(peer, type=Peer)])
    while True:
        poller = zmq.Poller()
        for socket in plane.pollables:
            poller.register(socket, zmq.POLLIN)
        poller.poll(max(0, min(1000, int(((plane.next_deadline() or 1e12) - time.monotonic()) * 1000) + 1)))
        for event in [*plane.receive(), *plane.tick()]:
            if isinstance(event, ev.SaveStaged):
                plane.send(event.job, event.node, staged(node, event.save.counter, event.job))


if __name__ == "__main__":
    main()
