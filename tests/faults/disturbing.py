"""How each disturbance is done to real processes, and undone."""

import contextlib
import functools
import glob
import os
import resource
import signal
import time
from collections.abc import Callable, Sequence

from tests.cluster import Node, wait_for
from tests.faults.kill_plan import RELAYED, Disturbance
from tests.faults.nodes.clusters import Cluster, Ranks
from tests.signals import send

_TICK_S = 0.03
_END_S = 60.0
_LOG_CHARS = 2000
_WORKER_S = 1.0
_FULL_NBYTES = 40 << 10  # of a file; images are larger
_NO_LIMIT = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)

Undo = Callable[[], object]


class Disturber:
    """Does them to a cluster and to the ranks there are. What it did is undone by recover, whatever came between."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._undo: list[Undo] = []
        self._cutting = False
        self.lost: list[str] = []  # nodes, since the last recover
        self.strays = 0  # stores that somebody made where the real one was away

    def disturb(self, ranks: Ranks, disturbances: Sequence[Disturbance]) -> list[Disturbance]:
        """One after the other, held side by side; those that found what they are done to. Blocks until all are over."""
        done, held_s = [], 0.0
        for one in disturbances:
            time.sleep(one.after_s)
            if self._do(one, ranks):
                done.append(one)
                held_s = max(held_s, one.hold_s)
        deadline = time.monotonic() + held_s
        while (left := deadline - time.monotonic()) > 0:
            if self._cutting:
                self._cluster.relays[RELAYED].bulk.cut()
            time.sleep(min(left, _TICK_S))
        self._undo_all()
        return done

    def recover(self) -> None:
        """All is undone; a daemon runs on every node, on an empty arena where the node was lost."""
        self._undo_all()
        for name in self.lost:
            self._cluster.add(name, ready=False)
        self.lost.clear()
        for name, node in self._cluster.nodes.items():
            if node.daemon is not None and node.daemon.poll() is not None:
                self._cluster.start(name, ready=False)
        for name, node in self._cluster.nodes.items():
            try:
                self._cluster.await_daemon(name)
            except AssertionError as error:
                raise AssertionError(
                    f"the daemon of {name} does not answer: {node.log_text()[-_LOG_CHARS:]}"
                ) from error

    def _undo_all(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _do(self, one: Disturbance, ranks: Ranks) -> bool:
        """Whether there was something to do it to."""
        kind, _, what = one.kind.partition("-")
        match kind, what:
            case "kill" | "stop", "rank":
                return ranks[int(one.victim)].alive and self._signal([ranks[int(one.victim)].pid], kind)
            case "kill" | "stop", "daemon" | "worker":
                node = self._cluster.nodes.get(one.victim)
                return node is not None and self._signal(_pids(node, what), kind)
            case "lose", _:
                return self._lose(one.victim)
            case "store", _:
                return self._store(what)
            case "cut" | "hold", _:
                return self._links(one.kind)
            case _:
                return self._everything(ranks, signal.SIGKILL if kind == "kill" else signal.SIGTERM)

    def _signal(self, pids: Sequence[int], kind: str) -> bool:
        if kind == "stop":
            self._undo += [functools.partial(send, pid, signal.SIGCONT) for pid in pids]
        number = signal.SIGKILL if kind == "kill" else signal.SIGSTOP
        return sum(send(pid, number) for pid in pids) > 0

    def _lose(self, name: str) -> bool:
        if name not in self._cluster.nodes:
            return False
        self._cluster.lose(name)
        self.lost.append(name)
        return True

    def _everything(self, ranks: Ranks, number: int) -> bool:
        """All ranks and all daemons."""
        ranks.kill()
        found = [node.daemon for node in self._cluster.nodes.values() if node.daemon is not None]
        for daemon in found:
            send(daemon.pid, signal.SIGCONT)  # one that is stopped would not hear of it
            send(daemon.pid, number)
        for daemon in found:
            daemon.wait(_END_S)
        return bool(found)

    # --- links

    def _links(self, kind: str) -> bool:
        relay = self._cluster.relays[RELAYED]
        if kind == "cut-links":
            relay.cut()
        elif kind == "cut-bulk":
            self._cutting = True
            self._undo.append(lambda: setattr(self, "_cutting", False))
        else:
            relay.bulk.held = True
            self._undo.append(lambda: setattr(relay.bulk, "held", False))
        return True

    # --- the store

    def _store(self, what: str) -> bool:
        if what == "away":
            os.rename(self._cluster.store, f"{self._cluster.store}.away")
            self._undo.append(self._bring_back)
            return True
        pids = [pid for node in self._cluster.nodes.values() for pid in _pids(node, "worker")]
        return sum(self._fill(pid) for pid in pids) > 0

    def _bring_back(self) -> None:
        if os.path.lexists(self._cluster.store):
            self.strays += 1
            os.rename(self._cluster.store, f"{self._cluster.store}.stray-{self.strays}")
        os.rename(f"{self._cluster.store}.away", self._cluster.store)

    def _fill(self, pid: int) -> bool:
        """A worker's writes beyond some bytes fail, as on a store that is full."""
        try:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (_FULL_NBYTES, resource.RLIM_INFINITY))
        except ProcessLookupError:
            return False
        self._undo.append(lambda: _unlimit(pid))
        return True


def _unlimit(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        resource.prlimit(pid, resource.RLIMIT_FSIZE, _NO_LIMIT)


def _pids(node: Node, what: str) -> list[int]:
    """Of the node's daemon, or of the processes that it has for stores, if they are there soon."""
    if node.daemon is None or node.daemon.poll() is not None:
        return []
    if what == "daemon":
        return [node.daemon.pid]
    with contextlib.suppress(AssertionError):
        return wait_for(lambda: _children(node.daemon.pid), _WORKER_S)
    return []


def _children(pid: int) -> list[int]:
    """Of all of its threads."""
    found: list[int] = []
    for path in glob.glob(f"/proc/{pid}/task/*/children"):
        with contextlib.suppress(OSError), open(path, encoding="ascii") as file:
            found += map(int, file.read().split())
    return found
