"""``python -m bench.gpu``: saves and loads of a state on one GPU, with its copy engine as the yardstick.

Table and JSON (bench/out) carry the device's name. Without a CUDA device it prints that and ends with exit code 3.
"""

import argparse
import contextlib
import logging
import re
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import async_save

from bench import report, states
from bench.__main__ import machine, parse_size
from bench.measure import Sample, Series, interleave, seconds, timed
from bench.node import OUT, Client, Node, scratch
from bench.report import Report, Row, ratio
from bench.training import Touching
from ckptd.shared.files.mapping import POPULATE_WRITE, Mapping
from ckptd_client._local.copy_engines import engine_of

NO_DEVICE = 3
_NO_DRAINS = 10**6  # steps: only the copies between device and memory are measured
_SETTLED_SAVES = 4  # every slot written once
_STAGED_TIMEOUT_S = 60.0
_WIDTH = 4096
_STEP_OF_COPY = 2.0  # a step of training takes so many times what a copy takes
_MANY_COUNT, _MANY_NBYTES = 10_000, 16 << 10


@dataclass(frozen=True, slots=True)
class Gpu:
    """The device under test. rehearsed: the host in its place, to try the program; its figures mean nothing."""

    device: torch.device
    rehearsed: bool

    @property
    def name(self) -> str:
        """The name of the hardware."""
        return "rehearsal on the host" if self.rehearsed else torch.cuda.get_device_name(self.device)

    def settle(self) -> None:
        """Waits until the device is idle."""
        if not self.rehearsed:
            torch.cuda.synchronize(self.device)

    def timed(self, call: Callable[[], object]) -> Sample:
        """Seconds of a call and its queued work, on an idle device."""
        self.settle()
        return timed(lambda: (call(), self.settle()))

    def moved(self, state: Any) -> Any:
        """A state with its tensors on the device, but for states of random generators."""
        if isinstance(state, torch.Tensor):
            return state if state.dtype == torch.uint8 else state.to(self.device)
        if isinstance(state, dict):
            return {key: self.moved(value) for key, value in state.items()}
        return [self.moved(value) for value in state] if isinstance(state, list) else state


class Copies:
    """The limit: copies of one large block between the device and pinned memory."""

    def __init__(self, gpu: Gpu, nbytes: int) -> None:
        self._gpu = gpu
        self._there = torch.full((nbytes,), 7, dtype=torch.uint8, device=gpu.device)
        self._here = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=not gpu.rehearsed)

    def fetch(self) -> Sample:
        """Device to host."""
        return self._gpu.timed(lambda: self._here.copy_(self._there, non_blocking=True))

    def send(self) -> Sample:
        """Host to device."""
        return self._gpu.timed(lambda: self._there.copy_(self._here, non_blocking=True))


class Training:
    """Steps of matrix products that are queued at once and take the device about step_s."""

    def __init__(self, gpu: Gpu, optimizer: Touching, step_s: float) -> None:
        width = 256 if gpu.rehearsed else _WIDTH
        self._gpu, self._optimizer, self._rounds = gpu, optimizer, 1
        self._left = torch.randn(width, width, device=gpu.device)
        self._right = torch.randn(width, width, device=gpu.device) / width
        self.step()
        while (taken := self.step()) < step_s / 2 and self._rounds < 1 << 20:
            self._rounds *= 2
        self._rounds = max(1, round(self._rounds * step_s / taken))

    def step(self) -> float:
        """Runs forward, backward and the optimizer; seconds until the device has ended."""
        start = time.perf_counter()
        out = self._left
        for _ in range(self._rounds):
            out = torch.tanh(out @ self._right)
        self._optimizer.step()
        self._gpu.settle()
        return time.perf_counter() - start


@dataclass(slots=True)
class Bench:
    """The common part of the rows."""

    gpu: Gpu
    node: Node
    scratch: Path
    state: states.State
    repeat: int
    last_step: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the state."""
        return states.nbytes_of(self.state)

    def next_step(self) -> int:
        """A step number not used before, after some tensors have changed."""
        self.last_step += 1
        states.mutate(self.state, self.last_step)
        self.gpu.settle()
        return self.last_step

    @contextlib.contextmanager
    def client(self, job: str) -> Iterator[Client]:
        """A client whose saves are not drained."""
        with self.node.client(job, drain_every=_NO_DRAINS) as client:
            yield client


def saves(bench: Bench, copies: Copies) -> list[Row]:
    """Synchronous saves, steady, and the restore from memory of the last one."""
    with bench.client("steady") as client:
        prepared = timed(lambda: client.prepare(bench.state))
        for _ in range(_SETTLED_SAVES):
            _stall(bench, client)
        marks, stalls = interleave(bench.repeat, copies.fetch, lambda: _stall(bench, client))
        back, restores = interleave(bench.repeat, copies.send, lambda: _restore(bench, client))
    return [
        ratio("stall of a synchronous save, steady", seconds(stalls), seconds(marks), "one pinned copy, D2H", bar=1.10),
        _rates("device to slot", stalls, marks, bench.nbytes, "one pinned copy, D2H"),
        ratio(
            "restore from the arena, digests checked",
            seconds(restores).rate(bench.nbytes),
            seconds(back).rate(bench.nbytes),
            "one pinned copy, H2D",
            bar=0.8,
            sense=">=",
        ),
        Row("prepare: slots made, mapped and pinned", seconds([prepared]), prepared.seconds, "s"),
    ]


def _rates(name: str, samples: list[Sample], marks: list[Sample], nbytes: int, yardstick: str) -> Row:
    return ratio(name, seconds(samples).rate(nbytes), seconds(marks).rate(nbytes), yardstick)


def _stall(bench: Bench, client: Client) -> Sample:
    step = bench.next_step()
    handle: list[Any] = []
    sample = timed(lambda: handle.append(client.save(bench.state, step)))
    handle[0].wait("staged", _STAGED_TIMEOUT_S)
    return sample


def _restore(bench: Bench, client: Client) -> Sample:
    """Loads the newest checkpoint over a cleared state and compares the bytes."""
    step = bench.next_step()
    client.save(bench.state, step).wait("staged", _STAGED_TIMEOUT_S)
    kept = [tensor.clone() for tensor in states.tensors(bench.state)]
    states.clear(bench.state)
    sample = bench.gpu.timed(lambda: client.load(bench.state))
    if not all(map(torch.equal, kept, states.tensors(bench.state))):
        raise RuntimeError("the bytes restored differ from those that were saved")
    return sample


def pinning(bench: Bench) -> list[Row]:
    """Registers memory that has its pages: the single cost of each slot."""
    engine, samples = engine_of(bench.gpu.device), []
    if engine is None:
        return []
    for _ in range(bench.repeat):
        mapping = Mapping(None, -(-bench.nbytes // 4096) * 4096)
        mapping.advise(POPULATE_WRITE)

        def register(mapping: Mapping = mapping) -> None:
            mapping.before_unmap(engine.register(mapping.address, mapping.nbytes))

        samples.append(timed(register))
        del mapping, register
    found = seconds(samples).rate(bench.nbytes)
    return [Row("registering pages of 4 KiB (cudaHostRegister)", found, found.median, "GB/s")]


def overlapped(bench: Bench, copies: Copies) -> list[Row]:
    """Saves with an attached optimizer: the delay of the host by save and hook, and of a step."""
    rows = []
    for name, state in (
        ("the state", bench.state),
        (f"{_MANY_COUNT:,} tensors", bench.gpu.moved(states.many(_MANY_COUNT, _MANY_NBYTES))),
    ):
        step_s = _STEP_OF_COPY * copies.fetch().seconds
        optimizer = Touching(states.tensors(state))
        stalls, busy, quiet = _overlapped(bench, state, optimizer, Training(bench.gpu, optimizer, step_s))
        bar = 10 + 2e-3 * sum(1 for _ in states.tensors(state))
        stall = Series("ms", tuple(1e3 * one for one in stalls))
        rows += [
            Row(f"stall of an overlapped save, {name}", stall, stall.median, "ms", bar=bar),
            ratio(f"step with an overlapped save, {name}", Series("s", busy), Series("s", quiet), "the same without"),
        ]
    return rows


def _overlapped(
    bench: Bench, state: states.State, optimizer: Touching, training: Training
) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]:
    stalls, busy, quiet = [], [], []
    with bench.client("overlap") as client:
        client.prepare(state)
        client.attach(optimizer, verify="proof")
        for number in range(_SETTLED_SAVES + bench.repeat):
            quiet.append(training.step())
            start = time.perf_counter()
            handle = client.save(state, bench.next_step())
            training.step()
            busy.append(time.perf_counter() - start)
            handle.wait("staged", _STAGED_TIMEOUT_S)
            if number >= _SETTLED_SAVES:
                stalls.append(handle.stall_s)
    return tuple(stalls), tuple(busy[_SETTLED_SAVES:]), tuple(quiet[_SETTLED_SAVES:])


def peers(bench: Bench, copies: Copies) -> list[Row]:
    """DCP's async_save with a reused stager in pinned memory: the call, and until the state is staged."""
    rows = []
    for name, in_thread in (("DCP, pinned staging", False), ("DCP, pinned staging in a thread", True)):
        options = StagingOptions(
            use_pinned_memory=not bench.gpu.rehearsed,
            use_shared_memory=False,
            use_async_staging=in_thread and not bench.gpu.rehearsed,
            use_non_blocking_copy=not bench.gpu.rehearsed,
        )
        stager = DefaultStager(options)
        try:
            _dcp_save(bench, stager)
            marks, found = interleave(bench.repeat, copies.fetch, lambda stager=stager: _dcp_save(bench, stager))
        finally:
            stager.close()
        yard = seconds(marks)
        rows += [
            ratio(f"{name}: the call", seconds([call for call, _ in found]), yard, "one pinned copy, D2H"),
            ratio(f"{name}: until staged", seconds([staged for _, staged in found]), yard, "one pinned copy, D2H"),
        ]
    return rows


def _dcp_save(bench: Bench, stager: DefaultStager) -> tuple[Sample, Sample]:
    directory = bench.scratch / f"dcp-{bench.next_step()}"
    start = time.perf_counter()
    given: Any = async_save(bench.state, checkpoint_id=directory, async_stager=stager, no_dist=True)
    called = time.perf_counter()
    upload = getattr(given, "upload_completion", given)
    staging = getattr(given, "staging_completion", None)
    if staging is not None:
        staging.result()
    staged = time.perf_counter()
    upload.result()
    shutil.rmtree(directory, ignore_errors=True)
    return Sample(called - start, 0.0), Sample(staged - start, 0.0)


def run(gpu: Gpu, options: argparse.Namespace, console: Console) -> Path:
    """All sections; table and files. Returns the JSON's path."""
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    logging.getLogger("torch.distributed.checkpoint").setLevel(logging.ERROR)
    found = Report(
        machine() | {"gpu": gpu.name, "cuda": torch.version.cuda}, {k: str(v) for k, v in vars(options).items()}
    )
    state = gpu.moved(states.realistic(options.nbytes))
    with scratch(options.store) as (shm_dir, disk_dir), contextlib.closing(Node(shm_dir, disk_dir / "store")) as node:
        node.start()
        bench = Bench(gpu, node, disk_dir, state, options.repeat)
        copies = Copies(gpu, bench.nbytes)
        for section in (lambda: saves(bench, copies), lambda: pinning(bench), lambda: overlapped(bench, copies),
                        lambda: peers(bench, copies)):  # fmt: skip
            found.rows += section()
        found.yardsticks = {"one pinned copy, D2H": seconds([copies.fetch()]), "H2D": seconds([copies.send()])}
    console.print(f"{gpu.name}, torch {torch.__version__}")
    report.show(found, states.nbytes_of(state), console)
    OUT.mkdir(parents=True, exist_ok=True)
    path = OUT / f"gpu-{re.sub(r'[^a-z0-9]+', '-', gpu.name.lower())}.json"
    report.write_json(found, path)
    console.print(f"written: {path}")
    return path


def main() -> int:
    """Measures and prints; exit code 3 when there is no CUDA device."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("--nbytes", type=parse_size, default=4 << 30, help="size of the state (4G)")
    parser.add_argument("--repeat", type=int, default=7, help="measurements of each thing (7)")
    parser.add_argument("--threads", type=int, default=4, help="torch threads of restores (4)")
    parser.add_argument("--store", type=Path, default=OUT, help=f"directory on a disk, for DCP's files ({OUT})")
    parser.add_argument("--rehearse", action="store_true", help="on the host, to try this program")
    options = parser.parse_args()
    if not options.rehearse and not torch.cuda.is_available():
        sys.stderr.write("bench.gpu: there is no CUDA device here, so nothing was measured\n")
        return NO_DEVICE
    run(Gpu(torch.device("cpu" if options.rehearse else "cuda:0"), options.rehearse), options, Console())
    return 0


if __name__ == "__main__":
    sys.exit(main())
