"""The job that is measured: a daemon and a rank without torch for each node, all on loopback, and its phases."""

import contextlib
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Self

import zmq

from bench.large.daemon import RealDaemon, Sample
from bench.large.plan import node_name
from bench.large.rank import Rank, Saving, until
from bench.nodes.other_world import ResizedRank, moved
from ckptd.shared.base.ids import JobKey
from ckptd.shared.format.schemes import Scheme
from ckptd.shared.protocol import messages as m
from ckptd.shared.protocol.status import JobStatus
from ckptd.shared.protocol.topology import TICKET_NBYTES, Rendezvous

DRAINED, KEPT = 100, 101  # steps: of these two the first is due for a drain
_CADENCE = m.Cadence(steps=100)
_LOOK_S = 0.1


class Shape(NamedTuple):
    """Of a job. set_size: nodes of a redundancy set. nbytes: of the state of each rank.

    patience_s: for each phase. peer_timeout_s: as in the settings of the daemons.
    """

    nodes: int
    set_size: int = 8
    nbytes: int = 8 << 20
    patience_s: float = 120.0
    peer_timeout_s: float = 10.0


class RealJob:
    """Use with ``with``: it leaves no process and no file, whatever ends it.

    Methods block until all nodes are done, and raise RuntimeError when one takes longer than the job's patience.
    """

    def __init__(self, base: Path, store: Path, shape: Shape) -> None:
        """base: a directory on tmpfs, for arenas and logs. store: on a disk. Both are the caller's."""
        self.shape = shape
        settings = ("--peer-address", "127.0.0.1", "--peer-timeout-s", f"{shape.peer_timeout_s:g}s")
        names = map(node_name, range(shape.nodes))
        self.daemons = [RealDaemon(base / name, name, *settings) for name in names]
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        job = JobKey(str(store), "nodes")
        self.ranks = [
            ResizedRank(self._context, daemon.arena, rank, job, Saving(shape.nbytes, _CADENCE))
            for rank, daemon in enumerate(self.daemons)
        ]
        self._session = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.ExitStack() as stack:  # the next one ends, too, when one of them cannot
            stack.callback(self._context.destroy, 0)
            for daemon in self.daemons:
                stack.callback(daemon.kill)
            for rank in self.ranks:
                stack.callback(rank.close)

    def start_daemons(self) -> None:
        """Those that do not run, all at once."""
        new = [daemon for daemon in self.daemons if not daemon.runs]
        for daemon in new:
            daemon.spawn()
        for daemon in new:
            daemon.await_ready(self.shape.patience_s)

    def connect(self) -> None:
        """All ranks in a session of their own, as a launcher starts them: processes of an earlier one are gone."""
        self._session += 1
        rendezvous = Rendezvous(self.daemons[0].peer(), os.urandom(TICKET_NBYTES), Scheme.XOR, self.shape.set_size)
        for rank in self.ranks:
            rank.end()
        for rank in self.ranks:
            rank.start(f"s{self._session}")
        for rank in self.ranks:
            rank.attach(rendezvous, len(self.ranks))
        self._until(lambda rank: m.Attached in rank.told, "connected")

    def prepare(self, step: int) -> None:
        """Segments, and slots for them."""
        for rank in self.ranks:
            rank.prepare(step)

    def hand_over(self) -> None:
        """What was prepared, by one rank after the other."""
        for rank in self.ranks:
            rank.hand_over()

    def reach(self, step: int, milestone: m.Milestone) -> None:
        """Until all ranks know that the save of this step has reached the milestone."""
        self._until(lambda rank: (step, milestone) in rank.reached, milestone)

    def load(self) -> None:
        """All ranks load the newest."""
        going = list(self.ranks)
        for rank in going:
            rank.ask_load()

        def over() -> bool:
            going[:] = [rank for rank in going if rank.goes_on()]
            return not going

        until(over, self.ranks, self.shape.patience_s, "loaded")

    def compare(self) -> dict[m.Tier, int]:
        """How many ranks have read from where. Raises RuntimeError unless each has, to the bit, what it saved last."""
        tiers: dict[m.Tier, int] = {}
        for rank in self.ranks:
            if rank.loaded is None or rank.loaded.save.step != KEPT or not rank.is_intact:
                raise RuntimeError(f"rank {rank.rank} has not read what it saved as step {KEPT}")
            tiers[rank.loaded.tier] = tiers.get(rank.loaded.tier, 0) + 1
        return tiers

    # --- another world

    def shrink(self, count: int) -> None:
        """The next session has the first ranks alone. The other nodes stay, with what lies in their memory."""
        for rank in self.ranks[count:]:
            rank.close()
        self.ranks = self.ranks[:count]

    def pulled(self) -> int:
        """Bytes that all daemons have pulled so far."""
        return moved([Path(f"{daemon.arena}.log") for daemon in self.daemons])

    def check_shares(self) -> int:
        """Bytes that ranks needed of other nodes. Raises RuntimeError unless each has its share of the last save."""
        for rank in self.ranks:
            if rank.loaded is None or rank.loaded.save.step != KEPT or rank.loaded.tier is m.Tier.PFS:
                raise RuntimeError(f"rank {rank.rank} has not read its share of step {KEPT} from memory")
        return sum(rank.needed for rank in self.ranks)

    # --- losses

    def one_of_each_set(self) -> list[int]:
        """Numbers of nodes: as many as xor can lose, and the coordinator is none of them."""
        last: dict[int, str] = {}
        for node in self._status().nodes:
            if node.node != self.daemons[0].node:
                last[node.set_index] = node.node
        return [number for number, daemon in enumerate(self.daemons) if daemon.node in last.values()]

    def lose(self, numbers: list[int]) -> None:
        """SIGKILL to daemons and their ranks, and their memory is gone. Until the coordinator has noticed."""
        for number in numbers:
            self.daemons[number].kill()
            self.ranks[number].end()
            shutil.rmtree(self.daemons[number].arena)
        lost = {self.daemons[number].node for number in numbers}
        deadline = time.monotonic() + self.shape.patience_s
        while lost & {node.node for node in self._status().nodes if node.reachable}:
            if time.monotonic() >= deadline:
                raise RuntimeError(f"the loss was not noticed within {self.shape.patience_s:.0f} s")
            time.sleep(_LOOK_S)

    # --- what they use

    def samples(self) -> list[Sample]:
        """Of each daemon, by number."""
        return [daemon.sample() for daemon in self.daemons]

    def _status(self) -> JobStatus:
        return self.daemons[0].status().jobs[0]

    def _until(self, holds: Callable[[Rank], bool], what: str) -> None:
        until(lambda: all(map(holds, self.ranks)), self.ranks, self.shape.patience_s, what)
