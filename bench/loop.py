"""A training loop of one or several ranks with saves: the cost of a save, and the time until it is on the disk."""

import contextlib
import itertools
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
import torch.distributed as dist

from bench import states
from bench.measure import tree_cpu_s
from bench.peers import Finish, Peer
from bench.training import Touching, Training

_FORWARD_BACKWARD_STEPS = 8  # of Training, between two of the optimizer: longer than a copy of the state
_QUIET_ITERATIONS = 3


@dataclass(frozen=True, slots=True)
class Save:
    """Seconds of one save in one rank.

    block: the call. lost: what the loop took longer until the save was on the disk. durable: from the call until then.
    cpu: of this rank and all below it, beyond what its training takes. step_ratio: an iteration meanwhile by an
    undisturbed one; none where no iteration ran.
    """

    block_s: float
    durable_s: float
    lost_s: float
    cpu_s: float
    step_ratio: float | None
    nbytes: int  # of this rank's files


@dataclass(frozen=True, slots=True)
class Loop:
    """One rank's training. All ranks run the same iterations, with a collective in each, as for gradients."""

    state: states.State
    training: Training
    optimizer: Touching

    def run(self, peer: Peer, count: int) -> list[Save]:
        """Makes saves, each until it is on the disk of all ranks, between undisturbed iterations."""
        undisturbed = [self._undisturbed(peer)]
        taken = []
        for step in range(count):
            taken.append(self._save(peer, step))
            undisturbed.append(self._undisturbed(peer))
        # Iterations before and after a save give its reference: the speed of a shared machine varies.
        quiet = [_Quiet.around(*pair) for pair in itertools.pairwise(undisturbed)]
        return [one.beside(both) for one, both in zip(taken, quiet, strict=True)]

    def _undisturbed(self, peer: Peer) -> "_Quiet":
        cpu_s = tree_cpu_s()
        seconds = [self._iteration(peer, done=True)[0] for _ in range(_QUIET_ITERATIONS)]
        return _Quiet(seconds, (tree_cpu_s() - cpu_s) / _QUIET_ITERATIONS)

    def _iteration(self, peer: Peer, *, done: bool) -> tuple[float, bool]:
        """Seconds of forward, backward, the collective and the optimizer's step; whether all ranks are done."""
        start = time.perf_counter()
        self.training.steps(_FORWARD_BACKWARD_STEPS)
        all_done = _all(done)
        peer.before_step()
        self.optimizer.step()
        return time.perf_counter() - start, all_done

    def _save(self, peer: Peer, step: int) -> "_Taken":
        states.mutate(self.state, step)
        busy: list[float] = []
        cpu_s = tree_cpu_s()
        dist.barrier()
        start = time.perf_counter()
        finish = peer.save(self.state, step)
        block_s = time.perf_counter() - start
        with _ended(finish) as durable:
            all_done = _all(durable.done())
            while not all_done:
                taken_s, all_done = self._iteration(peer, done=durable.done())
                busy.append(taken_s)
            end = time.perf_counter()
            durable_s = durable.result() - start
        cpu_s = tree_cpu_s() - cpu_s
        nbytes = peer.nbytes(step)
        dist.barrier()
        if dist.get_rank() == 0:
            peer.discard(step)
        dist.barrier()
        return _Taken(block_s, durable_s, end - start, cpu_s, busy, nbytes)


@dataclass(frozen=True, slots=True)
class _Quiet:
    """Undisturbed iterations: seconds of each, CPU seconds of one."""

    seconds: list[float]
    cpu_s: float

    @classmethod
    def around(cls, before: "_Quiet", after: "_Quiet") -> "_Quiet":
        """The undisturbed iterations before and after a save."""
        return cls(before.seconds + after.seconds, (before.cpu_s + after.cpu_s) / 2)


@dataclass(frozen=True, slots=True)
class _Taken:
    block_s: float
    durable_s: float
    whole_s: float
    cpu_s: float
    busy: list[float]
    nbytes: int

    def beside(self, quiet: _Quiet) -> Save:
        """The cost of the save, compared with undisturbed iterations."""
        count, quiet_s = len(self.busy), statistics.median(quiet.seconds)
        step_ratio = statistics.fmean(self.busy) / quiet_s if count > 1 else None
        lost_s, cpu_s = self.whole_s - quiet_s * count, self.cpu_s - quiet.cpu_s * count
        return Save(self.block_s, self.durable_s, lost_s, cpu_s, step_ratio, self.nbytes)


@contextlib.contextmanager
def _ended(finish: Finish) -> Iterator[Future[float]]:
    """The time when finish returned, in a thread during the training."""

    def wait() -> float:
        finish()
        return time.perf_counter()

    with ThreadPoolExecutor(1) as waiter:
        yield waiter.submit(wait)


def _all(mine: bool) -> bool:
    """Whether the flag is set on all ranks."""
    said = torch.tensor([int(mine)])
    dist.all_reduce(said, dist.ReduceOp.MIN)
    return bool(said.item())
