"""A training job for the test machines: every step a real gradient, summed over all ranks, every few steps a save.

Prints one line per fact, which the tests read: `connected`, `restored STEP TIER DIGEST`, `saved STEP DIGEST SECONDS`,
`lost STEP END REASON`, `step STEP`, `durable` or `not-durable REASON`, `finished STEP`. DIGEST is of the whole state of
this rank: a restore must print what a save printed.
"""

import argparse
import hashlib
import os
import sys
import time

import torch
import torch.distributed

import ckptd_client

WIDTH = 512


class Torch:
    """Sums over the ranks that torchrun started."""

    def __init__(self) -> None:
        torch.distributed.init_process_group("gloo")
        self.rank, self.world = torch.distributed.get_rank(), torch.distributed.get_world_size()

    def sum(self, values: torch.Tensor) -> None:
        torch.distributed.all_reduce(values)


class Mpi:
    """Sums over the ranks that mpiexec started."""

    def __init__(self) -> None:
        from mpi4py import MPI  # noqa: PLC0415 - torchrun's ranks shall not start MPI

        self._world, self._in_place = MPI.COMM_WORLD, MPI.IN_PLACE
        self.rank, self.world = self._world.rank, self._world.size

    def sum(self, values: torch.Tensor) -> None:
        self._world.Allreduce(self._in_place, values.numpy())


def say(*words: object) -> None:
    print(f"rank{os.environ.get('RANK', '')}", *words, flush=True)


def digest(state: dict) -> str:
    hasher = hashlib.sha256()
    for name in sorted(state):
        value = state[name]
        hasher.update(value.numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value).encode())
    return hasher.hexdigest()[:16]


def train_step(state: dict, ranks: Torch | Mpi, step: int, stop: bool) -> bool:
    """One step of gradient descent with momentum on data of this rank and step. Whether any rank says stop."""
    generator = torch.Generator().manual_seed(1000 * step + ranks.rank)
    inputs = torch.randn(4, WIDTH, generator=generator)
    gradient = inputs.T @ (inputs @ state["weight"] - inputs) / inputs.numel()
    summed = torch.cat([gradient.flatten(), torch.tensor([float(stop)])])
    ranks.sum(summed)
    state["momentum"].mul_(0.9).add_(summed[:-1].view_as(gradient))
    state["weight"].sub_(0.01 * state["momentum"])
    state["seen"].add_(inputs.sum())  # of this rank alone
    return bool(summed[-1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("job")
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--save-every", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=0.2, help="of a step")
    parser.add_argument("--mib", type=int, default=4, help="of state that this rank alone has")
    parser.add_argument("--drain-every", type=int, default=1)
    parser.add_argument("--stop-file", default="")
    parser.add_argument("--mpi", action="store_true")
    arguments = parser.parse_args()

    ranks = Mpi() if arguments.mpi else Torch()
    os.environ["RANK"] = str(ranks.rank)
    state = {
        "weight": torch.zeros(WIDTH, WIDTH),
        "momentum": torch.zeros(WIDTH, WIDTH),
        "seen": torch.zeros(arguments.mib << 18),
    }
    client = ckptd_client.connect(job=arguments.job, drain_every=arguments.drain_every)
    say("connected")
    restored = client.load(state)
    if restored:
        say("restored", restored.step, restored.tier, digest(state))
    first = restored.step + 1 if restored else 0
    handles = []
    step = first - 1
    for step in range(first, first + arguments.steps):
        began = time.monotonic()
        stop = bool(arguments.stop_file) and os.path.exists(arguments.stop_file)
        if train_step(state, ranks, step, stop):
            break
        if step % arguments.save_every == 0:
            known = digest(state)
            handle = client.save(state, step)
            say("saved", step, known, f"{handle.stall_s:.3f}")
            handles.append(handle)
        for handle in [handle for handle in handles if handle.end not in {None, "kept"}]:
            handles.remove(handle)
            if handle.end in {"skipped", "abandoned", "failed"}:
                say("lost", handle.step, handle.end, handle.reason)
        say("step", step)
        time.sleep(max(0.0, began + arguments.seconds - time.monotonic()))
    try:
        client.wait("durable", timeout_s=60)
        say("durable")
    except ckptd_client.CkptdError as error:
        say("not-durable", error)
    client.close()
    say("finished", step)


if __name__ == "__main__":
    sys.exit(main())
