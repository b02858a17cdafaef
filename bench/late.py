"""The cost of late copies for training: ``python -m bench.late``.

One client on one daemon. 2 GiB that an attached optimizer owns, in huge pages; then 10,000 tensors of 16 KiB, which are
late in pages that they share; then the 2 GiB again while 32 threads map, write and unmap memory of their own, as
libraries beside a training do: they take the same locks of the kernel as protection does, and leave a core free. A step
is as long as a copy; it is measured in turn with a save under way and without one, and with those threads also beside a
thread that copies the same bytes under no proof: what that costs is the price of a copy on this machine. Medians.
"""

import argparse
import contextlib
import ctypes
import mmap
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from bench import states
from bench.ckptd_rows import MANY_COUNT, MANY_NBYTES, await_late
from bench.node import Client, Node, scratch
from bench.training import Touching, Training

_TIMEOUT_S = 600.0
_WARM = 3  # one save per slot
_OTHERS, _OTHERS_NBYTES, _EACH_S = 32, 256 << 10, 0.02  # about 100,000 page faults a second
_PAGE = 4096
_NEVER = 1_000_000  # no drains in this benchmark


@contextlib.contextmanager
def _others_writing() -> Iterator[None]:
    """Threads that write to memory of their own, new each time."""
    stop = threading.Event()

    def write() -> None:
        while not stop.wait(_EACH_S):
            with mmap.mmap(-1, _OTHERS_NBYTES) as memory:
                torch.frombuffer(memory, dtype=torch.uint8)[::_PAGE].fill_(1)  # without the GIL

    threads = [threading.Thread(target=write, daemon=True) for _ in range(_OTHERS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


class _Run:
    """Saves of one state, during a training."""

    def __init__(self, client: Client, state: states.State, steps: int) -> None:
        self.client, self.state, self._steps, self._number = client, state, steps, 0
        self.optimizer, self.training = Touching(states.tensors(state)), Training()
        client.prepare(state)
        client.attach(self.optimizer)
        await_late(client, self._settled)

    def _settled(self) -> None:
        self._number += 1
        self.client.save(self.state, self._number).wait("staged", _TIMEOUT_S)

    def once(self, *, saves: bool) -> tuple[float, float, float]:
        """Seconds of save, of forward and backward, and of the optimizer's step."""
        self._number += 1
        began = time.perf_counter()
        handle = self.client.save(self.state, self._number) if saves else None
        saved = time.perf_counter()
        self.training.steps(self._steps)
        trained = time.perf_counter()
        self.optimizer.step()
        stepped = time.perf_counter()
        if handle is not None:
            handle.wait("staged", _TIMEOUT_S)
        return saved - began, trained - saved, stepped - trained

    def medians(self, repeat: int) -> dict[bool, list[float]]:
        """Medians of seconds with and without a save."""
        found: dict[bool, list[tuple[float, float, float]]] = {True: [], False: []}
        for number in range(_WARM + repeat):
            for saves in (True, False):
                taken = self.once(saves=saves)
                if number >= _WARM:
                    found[saves].append(taken)
        return {
            saves: [statistics.median(column) for column in zip(*rows, strict=True)] for saves, rows in found.items()
        }

    def beside_plain_copies(self, repeat: int) -> float:
        """Median seconds of forward, backward and step while a thread copies the state once, without a proof."""
        tensors = list(states.tensors(self.state))
        room = torch.zeros(max(tensor.nbytes for tensor in tensors), dtype=torch.uint8)

        def copy() -> None:
            for tensor in tensors:
                ctypes.memmove(room.data_ptr(), tensor.data_ptr(), tensor.nbytes)  # without the GIL

        taken: list[float] = []
        for _ in range(repeat):
            thread = threading.Thread(target=copy)
            thread.start()
            taken.append(sum(self.once(saves=False)))
            thread.join()
        return statistics.median(taken)


def _told(name: str, value: float, unit: str, bar: float) -> None:
    print(f"| {name} | {value:.2f} {unit} | {bar:g} {unit} | {'met' if value <= bar else 'MISSED'} |", flush=True)


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=2048)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument(
        "--steps", type=int, default=12, help="of forward and backward between a save and the optimizer"
    )
    parser.add_argument("--store", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args()
    print("| what | measured | bar | |\n| --- | ---: | ---: | --- |")
    with scratch(options.store) as (shm, disk):
        node = Node(shm, disk / "store")
        node.start()
        try:
            state = states.realistic(options.mib << 20)
            with node.client("late", drain_every=_NEVER) as client:
                run = _Run(client, state, options.steps)
                quiet = run.medians(options.repeat)
                with _others_writing():
                    busy = run.medians(options.repeat)
                    plain_s = run.beside_plain_copies(options.repeat)
                late = client.stats().last_late_nbytes / states.nbytes_of(state)
            many = states.many(MANY_COUNT, MANY_NBYTES)
            with node.client("many", drain_every=_NEVER) as client:
                small = _Run(client, many, 1).medians(options.repeat)
                share = client.stats().last_late_nbytes / states.nbytes_of(many)
        finally:
            node.close()
    size = f"{options.mib >> 10} GiB ({late:.0%} of it late)"
    _told(f"save, {size}", 1e3 * quiet[True][0], "ms", 10.7)
    _told("the optimizer's step after it, more than without a save", 1e3 * (quiet[True][2] - quiet[False][2]), "ms", 5)
    _told(f"save, {MANY_COUNT:,} tensors of 16 KiB ({share:.0%} of it late)", 1e3 * small[True][0], "ms", 30)
    beside = f"{_OTHERS} threads beside it"
    _told(f"the optimizer's step, {beside}, to that without a save", busy[True][2] / busy[False][2], "x", 1.05)
    alone_s = busy[False][1] + busy[False][2]
    for name, ratio in (
        ("forward, backward and step, a save under way", sum(quiet[True][1:]) / sum(quiet[False][1:])),
        (f"the same, {beside}", sum(busy[True][1:]) / alone_s),
        (f"the same, {beside}, and in place of a save a thread that copies as many bytes", plain_s / alone_s),
    ):
        print(f"| {name}, to those without | {ratio:.2f} x | | |")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
