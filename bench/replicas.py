"""The cost of comparing all bytes of replicas: one read of them. `python -m bench.replicas`.

One thread, as bench/mesh.py. The yardsticks are taken in the same run, in turn with the rest: one read of the same
bytes where they lie, by the same hash, and one copy of them all into warm memory, for which balance="off" stalls.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import xxhash

from ckptd_client._image.plan import Plan, gather, make_plan
from ckptd_client._state.replica_slices import attestation_of_digests, digests_of

ROUNDS = 9
READ_BAR = 1.15  # digests by one read
_GIB = 1 << 30


def state_of(nbytes: int, tensors: int) -> dict[str, torch.Tensor]:
    """Tensors of one size, written once."""
    count = nbytes // tensors // 4
    return {f"layers.{i}.weight": torch.full((max(1, count // 64), 64), float(i)) for i in range(tensors)}


def _seconds(do: Callable[[], object]) -> tuple[float, float]:
    """Seconds by the clock, and of CPUs, which are valid also on busy cores."""
    began = time.perf_counter(), time.process_time()
    do()
    return time.perf_counter() - began[0], time.process_time() - began[1]


def _read(buffers: list[memoryview]) -> None:
    for buffer in buffers:
        xxhash.xxh3_64(buffer).digest()


def medians(nbytes: int, tensors: int, replicas: int) -> dict[str, tuple[float, float]]:
    """Seconds by the clock and of CPUs: of digests, of one read, of one copy, of the copy of a slice."""
    state = state_of(nbytes, tensors)
    plan = make_plan(state, rank=0, world_size=replicas, replicated=("*",))
    values = [state[name] for name in plan.names]
    shared = gather(plan, state)
    assert shared is not None  # noqa: S101 - the plan was made for it
    buffers = [tensor.numpy().data for tensor in values]
    whole, part = [torch.ones_like(t) for t in values], [torch.ones_like(t) for t in shared.tensors]
    ways: dict[str, Callable[[], object]] = {
        "digests": lambda: _digests(plan, values),
        "one read": lambda: _read(buffers),
        "copy of all": lambda: torch._foreach_copy_(whole, values),
        "copy of the slice": lambda: torch._foreach_copy_(part, shared.tensors),
    }
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, do in ways.items():
            taken[name].append(_seconds(do))
    return {
        name: (statistics.median(wall for wall, _ in found), statistics.median(cpu for _, cpu in found))
        for name, found in taken.items()
    }


def _digests(plan: Plan, values: list[torch.Tensor]) -> None:
    attestation_of_digests(plan.streams, digests_of(plan.streams, values))()


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0)
    torch.set_num_threads(1)
    nbytes = int(parser.parse_args().gib * _GIB)
    names = ("tensors", "replicas", "digests s", "read s", "ratio", "digests CPU s", "read CPU s", "ratio")
    print("|", " | ".join([*names, "copy of all s", "of the slice s"]), "|")
    print("|", " | ".join(["---:"] * 10), "|")
    for tensors in (373, 10_000):
        for replicas in (2, 8):
            found = medians(nbytes, tensors, replicas)
            cells: list[object] = [tensors, replicas]
            for kind in (0, 1):
                digests, read = found["digests"][kind], found["one read"][kind]
                missed = " (missed)" if digests > READ_BAR * read else ""
                cells += [f"{digests:.3f}", f"{read:.3f}", f"{digests / read:.2f}{missed}"]
            cells += [f"{found['copy of all'][0]:.3f}", f"{found['copy of the slice'][0]:.3f}"]
            print("|", " | ".join(map(str, cells)), "|", flush=True)


if __name__ == "__main__":
    main()
