"""Mutants of every kind of file through every reader of it: errors of ckptd's alone, none slow, none of much memory.

    make mutants COUNT=50000 SEED=0     all of them; what fails is kept in bench/out/mutants, with the line to replay it
    make mutants ONE=SEED-NUMBER        one again, with its tracebacks

Each mutant follows from the seed and its number alone. They are made and read in children, one for each processor; a
child that dies or hangs is a finding, and another goes on after it.
"""

import contextlib
import json
import logging
import os
import pathlib
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import torch

from ckptd.shared.base.errors import CkptdError  # noqa: F401
from tests.hostile.apart import Came, limit, measured
from tests.hostile.mutant_kinds import KINDS, TREES

MAX_S = 2.0
MAX_NBYTES = 16 << 20  # and ten times what the files have
MAX_CHARS = 20_000  # of an error
TIMEOUT_S = 30  # of the clock: the machine may be at other work
# Documented to raise it: their verbs tell it.
FREE_OSERROR = {"export torch", "export dcp", "export safetensors", "export", "numbers", "prune", "publish", "adopt",
                "open", "one file", "id", "verify", "finish"}  # fmt: skip


class Failure(NamedTuple):
    """reader: "" for the child as a whole."""

    number: int
    kind: str
    reader: str
    what: str


def choose(seed: int, number: int, only: str | None) -> tuple[random.Random, str]:
    """The mutant's own chance, and its kind."""
    chance = random.Random(f"{seed}-{number}")
    return chance, only or chance.choice(sorted(KINDS))


def make_trees(folder: pathlib.Path) -> dict[str, tuple[pathlib.Path, pathlib.Path]]:
    """By name: a folder with the tree, and the path in it that readers take."""
    made = {}
    for name, make in TREES.items():
        home = folder / name
        home.mkdir()
        made[name] = home, make(home)
    return made


def put(seed: int, number: int, only: str | None, trees: dict, scratch: pathlib.Path) -> tuple[str, pathlib.Path]:
    """The mutant in the folder scratch: its kind, and the path for readers."""
    chance, name = choose(seed, number, only)
    home, path = trees[KINDS[name].tree]
    shutil.rmtree(scratch, ignore_errors=True)
    shutil.copytree(home, scratch, symlinks=True)
    target = scratch / path.relative_to(home)
    KINDS[name].change(chance, target)
    return name, target


def nbytes_of(folder: pathlib.Path) -> int:
    """Of what lies on the disk; holes take none."""
    found = (os.lstat(os.path.join(at, name)) for at, _, names in os.walk(folder) for name in names)
    return sum(min(one.st_size, one.st_blocks * 512 + 4096) for one in found)


def judged(came: Came, nbytes: int) -> str:
    """What is wrong with what came of a reader; empty when nothing is."""
    if came.kind not in ("", "ours"):
        return f"{came.kind}: {came.text[:500]}"
    if came.seconds > MAX_S:
        return f"took {came.seconds:.1f} s"
    if came.grown > MAX_NBYTES + 10 * nbytes:
        return f"took {came.grown:,} bytes for {nbytes:,}"
    return f"says {came.length} characters" if came.length > MAX_CHARS else ""


def read(name: str, path: pathlib.Path, scratch: pathlib.Path, number: int) -> Iterator[Failure]:
    """The mutant by all its readers."""
    nbytes = nbytes_of(scratch)
    for reader, call in KINDS[name].readers.items():
        if not os.path.lexists(path):
            return  # committed, or removed
        came = measured(lambda call=call: call(str(path)), TIMEOUT_S, (OSError,) if reader in FREE_OSERROR else ())
        wrong = judged(came, nbytes)
        if wrong and came.kind in ("", "ours"):  # once more: the first may have warmed something up
            came = measured(lambda call=call: call(str(path)), TIMEOUT_S, (OSError,))
            wrong = judged(came, nbytes)
        if wrong:
            yield Failure(number, name, reader, wrong)


def quiet() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    os.environ.pop("CKPTD_STORE", None)
    sys.stdout, sys.stderr = open(os.devnull, "w"), open(os.devnull, "w")  # noqa: SIM115


def child(out: int, numbers: list[int], given: tuple[int, str | None, dict, pathlib.Path]) -> None:
    """Tells each number before it, and each failure, in a line."""
    seed, only, trees, scratch = given
    quiet()
    limit()
    for number in numbers:
        os.write(out, json.dumps([number]).encode() + b"\n")
        try:
            name, path = put(seed, number, only, trees, scratch)
        except Exception as error:
            failure = Failure(number, choose(seed, number, only)[1], "the mutation", f"{type(error).__name__}: {error}")
            os.write(out, json.dumps(failure).encode()[:4000] + b"\n")
            continue
        for failure in read(name, path, scratch, number):
            os.write(out, json.dumps(failure).encode() + b"\n")


class Worker:
    """One child after the other, over its share of the numbers."""

    def __init__(self, numbers: list[int], seed: int, only: str | None, trees: dict, scratch: pathlib.Path) -> None:
        self.left, self.args, self.scratch = numbers, (seed, only, trees, scratch), scratch
        self.done: list[int] = []
        self.failures: list[Failure] = []
        self.start()

    def start(self) -> None:
        self.fd, theirs = os.pipe()
        self.pid, self.said, self.at = os.fork(), b"", time.monotonic()
        if not self.pid:
            status = 1
            try:
                os.close(self.fd)
                child(theirs, self.left, self.args)
                status = 0
            except BaseException:
                os.write(theirs, json.dumps([-1, traceback.format_exc()[-3000:]]).encode() + b"\n")
            finally:
                os._exit(status)
        os.close(theirs)
        self.begun: int | None = None

    def step(self) -> bool:
        """Takes in what it says; False once all is done."""
        os.set_blocking(self.fd, False)
        try:
            part = os.read(self.fd, 1 << 16)
        except BlockingIOError:
            if time.monotonic() - self.at > 20 * TIMEOUT_S:
                os.kill(self.pid, signal.SIGKILL)
            return True
        if part:
            self.at = time.monotonic()
            *lines, self.said = (self.said + part).split(b"\n")
            for line in lines:
                self.take(json.loads(line))
            return True
        os.close(self.fd)
        _, status = os.waitpid(self.pid, 0)
        if status == 0:
            return False
        stuck = self.begun if self.begun is not None else self.left[0]
        self.failures.append(Failure(stuck, choose(self.args[0], stuck, self.args[1])[1], "", f"died, status {status}"))
        self.left = [number for number in self.left if number > stuck]
        if self.left:
            self.start()
        return bool(self.left)

    def take(self, said: list) -> None:
        if len(said) == 1:
            self.begun = said[0]
            self.done.append(said[0])
        elif len(said) == 2:
            self.failures.append(Failure(self.begun or 0, "", "", said[1]))
        else:
            self.failures.append(Failure(*said))


def campaign(
    count: int, seed: int, only: str | None = None, workers: int = 2, keep: str | None = None
) -> list[Failure]:
    """Mutants 0 to count - 1 of the seed. keep: where the trees of those that fail are left."""
    with tempfile.TemporaryDirectory(prefix="ckptd-mutants-", dir="/dev/shm") as place:
        folder = pathlib.Path(place)
        (folder / "trees").mkdir()
        trees = make_trees(folder / "trees")
        torch.set_num_threads(1)
        running = [
            Worker(list(range(number, count, workers)), seed, only, trees, folder / f"scratch-{number}")
            for number in range(min(workers, count))
        ]
        everybody, told, began = list(running), 0, time.monotonic()
        while running:
            running = [one for one in running if one.step()]
            time.sleep(0.02)
            done = sum(len(one.done) for one in everybody)
            if keep and done // 1000 > told:
                told = done // 1000
                failed = sum(len(one.failures) for one in everybody)
                print(f"{done} of {count} in {time.monotonic() - began:.0f} s, {failed} failures", flush=True)
        failures = sorted(failure for one in everybody for failure in one.failures)
        for number in sorted({failure.number for failure in failures})[:50] if keep else []:
            os.makedirs(keep, exist_ok=True)
            with contextlib.suppress(Exception):  # of the mutation itself
                put(seed, number, only, trees, pathlib.Path(keep) / f"{seed}-{number}")
        return failures


def once(seed: int, number: int, only: str | None) -> None:
    """One mutant in this process, with tracebacks."""
    with tempfile.TemporaryDirectory(prefix="ckptd-mutants-", dir="/dev/shm") as place:
        folder = pathlib.Path(place)
        (folder / "trees").mkdir()
        name, path = put(seed, number, only, make_trees(folder / "trees"), folder / "scratch")
        for reader, call in KINDS[name].readers.items():
            try:
                call(str(path))
                print(f"{name}, {reader}: read")
            except Exception:
                print(f"{name}, {reader}:")
                traceback.print_exc(limit=-12)


def main(words: list[str]) -> int:
    if words[0] == "--one":
        seed, _, number = words[1].partition("-")
        once(int(seed), int(number), words[2] if len(words) > 2 else None)
        return 0
    count, seed, only = int(words[0]), int(words[1]), words[2] if len(words) > 2 else None
    failures = campaign(count, seed, only, keep="bench/out/mutants")
    for failure in failures[:200]:
        print(f"{failure.kind}, {failure.reader}: {failure.what}\n  make mutants ONE={seed}-{failure.number}")
    by_kind = Counter((failure.kind, failure.reader, failure.what.partition(":")[0]) for failure in failures)
    for (kind, reader, what), times in by_kind.most_common():
        print(f"{times:6} {kind}, {reader}: {what}")
    print(f"{count} mutants of seed {seed}: {len(failures)} failures")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
