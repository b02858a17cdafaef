"""``python -m bench.profile_save``: where the microseconds of one cached save of many small tensors go."""

import argparse
import contextlib
import cProfile
import pstats
import statistics
import time

import torch

from bench import states
from bench.node import OUT, Node, scratch

_SETTLED_SAVES = 4
_LINES = 25


def main() -> None:
    """Times cached saves, then profiles as many, and prints the slowest functions."""
    parser = argparse.ArgumentParser(prog="python -m bench.profile_save", description=__doc__)
    parser.add_argument("--tensors", type=int, default=10_000)
    parser.add_argument("--each-nbytes", type=int, default=16 << 10)
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--sort", choices=("tottime", "cumulative"), default="tottime")
    options = parser.parse_args()
    torch.set_num_threads(1)
    state = states.many(options.tensors, options.each_nbytes)
    profiler = cProfile.Profile()
    with scratch(OUT) as (shm_dir, disk_dir), contextlib.closing(Node(shm_dir, disk_dir / "store")) as node:
        node.start()
        with node.client("profile") as client:
            client.prepare(state)
            plain: list[float] = []
            for step in range(_SETTLED_SAVES + 2 * options.repeat):
                states.mutate(state, step)
                profiled = step >= _SETTLED_SAVES + options.repeat
                if profiled:
                    profiler.enable()
                start = time.perf_counter()
                handle = client.save(state, step)
                plain += [] if profiled else [time.perf_counter() - start]
                profiler.disable()
                handle.wait("durable", 60)
    copies = [_copy_loop(state) for _ in range(options.repeat)]
    _show(plain[_SETTLED_SAVES:], copies)
    pstats.Stats(profiler).strip_dirs().sort_stats(options.sort).print_stats(_LINES)


def _copy_loop(state: states.State) -> float:
    """Seconds of plain copies, tensor by tensor, into memory that has been touched."""
    pairs = [(tensor.clone(), tensor) for tensor in states.tensors(state)]
    start = time.perf_counter()
    for target, source in pairs:
        target.copy_(source)
    return time.perf_counter() - start


def _show(saves: list[float], copies: list[float]) -> None:
    for name, values in (("save, not profiled", saves), ("loop of plain copies", copies)):
        low, median, high = (1e3 * value for value in (min(values), statistics.median(values), max(values)))
        print(f"{name:22} {median:8.2f} ms ({low:.2f}-{high:.2f})")


if __name__ == "__main__":
    main()
