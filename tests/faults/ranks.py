"""Training processes that a test steers call by call. Forked from a server that has torch, so they start fast."""

import contextlib
import logging
import multiprocessing
import os
import signal
import time
import uuid
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, Self

from ckptd.shared.format.slot import SEALS_NBYTES, decode_seals
from tests import forks
from tests.cluster import Node, wait_for

JOB = "job"
SAVE_TIMEOUT_S = 10.0
MB = 1 << 20
_IDLE_S = 0.02
_LOG_CHARS = 30_000


class RankError(Exception):
    """What the rank's call raised; ``kind`` is the name of the class."""

    def __init__(self, kind: str, text: str, seconds: float) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind
        self.seconds = seconds


class Rank:
    """One rank of JOB. ``call(name, ...)`` runs a method of Trainer over there; ``start`` and ``result`` split it."""

    def __init__(
        self, node: Node, rank: int = 0, world: int = 1, *, run: str = "", nbytes: int = 2 * MB, **environ: str
    ) -> None:
        self.rank = rank
        self._conn, theirs = forks.context.Pipe()
        variables = {k: v for k, v in node.environ(**environ).items() if k.startswith(("CKPTD_", "PYTHONPATH"))}
        if world > 1:
            variables |= {"WORLD_SIZE": str(world), "RANK": str(rank), "TORCHELASTIC_RUN_ID": run, "MASTER_PORT": "1"}
        self.process = forks.start(_main, theirs, variables, rank, nbytes)
        theirs.close()
        self.seconds = 0.0  # of the last call, as measured over there

    @property
    def pid(self) -> int:
        """Of the process."""
        return self.process.pid or 0

    def start(self, name: str, *args: Any, **named: Any) -> Self:
        """Has the rank begin a call."""
        self._conn.send((name, args, named))
        return self

    @property
    def done(self) -> bool:
        """Whether the call that was started has ended."""
        return self._conn.poll(0)

    def result(self, timeout_s: float = 60.0) -> Any:
        """What the call that was started returned. Raises RankError."""
        assert self._conn.poll(timeout_s), f"rank {self.rank} (pid {self.pid}) did not end its call in {timeout_s} s"
        good, value, self.seconds = self._conn.recv()
        if not good:
            raise RankError(*value, self.seconds)
        return value

    def call(self, name: str, *args: Any, timeout_s: float = 60.0, **named: Any) -> Any:
        """Both."""
        return self.start(name, *args, **named).result(timeout_s)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """A signal; a deadly one is waited for."""
        os.kill(self.pid, number)
        if number == signal.SIGKILL:
            _wait_for_end(self.process)

    def end(self) -> None:
        """Whatever state it is in, it is gone after this."""
        if self.process.is_alive():
            self.process.kill()
        _wait_for_end(self.process)
        self._conn.close()


def _wait_for_end(process: BaseProcess) -> None:
    """``join`` waits for what it has forked too: that keeps a pipe of it open."""
    wait_for(lambda: not process.is_alive())


class Ranks:
    """All ranks of one start of the job, as a context that ends them."""

    def __init__(self, node: Node, world: int = 1, **named: Any) -> None:
        run = uuid.uuid4().hex
        self.all = [Rank(node, rank, world, run=run, **named) for rank in range(world)]

    def __getitem__(self, rank: int) -> Rank:
        return self.all[rank]

    def start(self, name: str, *args: Any, **named: Any) -> None:
        """The same call on all ranks, at once."""
        for rank in self.all:
            rank.start(name, *args, **named)

    @property
    def done(self) -> bool:
        """Whether it has ended on all ranks."""
        return all(rank.done for rank in self.all)

    def results(self, timeout_s: float = 60.0) -> list[Any]:
        """What it returned, by rank."""
        return [rank.result(timeout_s) for rank in self.all]

    def call(self, name: str, *args: Any, timeout_s: float = 60.0, **named: Any) -> list[Any]:
        """Both."""
        self.start(name, *args, **named)
        return self.results(timeout_s)

    def kill(self) -> None:
        """SIGKILL to all."""
        for rank in self.all:
            os.kill(rank.pid, signal.SIGKILL)
        for rank in self.all:
            _wait_for_end(rank.process)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for rank in self.all:
            rank.end()


@contextlib.contextmanager
def told(store: str, arena: str | None = None, logs: str = "") -> Iterator[Node]:
    """A node whose daemons' log, in the store or the directory logs, is printed when the test fails."""
    with Node(store, arena=arena) as node:
        node.log = os.path.join(logs or store, os.path.basename(node.log))
        try:
            yield node
        except BaseException:
            if os.path.exists(node.log):
                print(node.log_text()[-_LOG_CHARS:])
            raise


def sealed(node: Node) -> list[tuple[int, int]]:
    """(rank, step) of every slot in the arena that holds a whole segment."""
    seals = []
    for path in node.slots():
        with open(path, "rb") as file:
            file.seek(-SEALS_NBYTES, os.SEEK_END)
            seals.append(decode_seals(file.read())[2])
    return sorted((seal.rank, seal.save.step) for seal in seals if seal.save is not None and seal.state != "free")


def daemons(arena: str) -> list[int]:
    """Pids of the daemons, and of their children, that were started for this arena."""
    found = []
    for entry in os.listdir("/proc"):
        try:
            with open(f"/proc/{entry}/cmdline", "rb") as file:
                words = file.read().split(b"\0")
        except (OSError, ValueError):
            continue
        if entry.isdigit() and b"run" in words and arena.encode() in words:
            found.append(int(entry))
    return found


# --- over there


class Trainer:
    """The rank's side. Every public method is a call."""

    def __init__(self, rank: int, nbytes: int) -> None:
        self._rank = rank
        self._nbytes = nbytes
        self._boxes = 0
        self._client: Any = None
        self._handles: dict[int, Any] = {}  # by step
        self._told: dict[int, tuple[str | None, str | None]] = {}
        self._history: list[tuple[int, str | None, str | None]] = []
        self._logs: list[str] = []
        self._keep: list[Any] = []
        handler = logging.Handler()
        handler.emit = lambda record: self._logs.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("ckptd_client").addHandler(handler)

    def _state(self, step: int | None) -> dict[str, Any]:
        """What this rank trains at a step, all of it other bytes at each step; None: a fresh state."""
        import torch  # noqa: PLC0415

        count = self._nbytes // 8
        numbers = torch.zeros(count, dtype=torch.int64)
        if step is not None:
            torch.arange(count, out=numbers)
            numbers.add_((step * 1000 + self._rank) << 32)
        incomplete = count // 2
        model = {
            "weight": numbers[:incomplete].view(torch.float32),
            "moments": [numbers[incomplete:].view(torch.bfloat16)],
        }
        if self._boxes:
            model["boxes"] = self._in_boxes(numbers[: 3 * self._boxes].view(torch.int32))
        return {"model": model, "step": step, "name": f"rank {self._rank}"}

    def _in_boxes(self, numbers: Any) -> Any:
        """A tensor of which every other row block is this rank's: each needs a file of the image."""
        from ckptd_client._state.tensors import Chunk  # noqa: PLC0415
        from ckptd_client.dcp._boxes import Boxes  # noqa: PLC0415

        rows = numbers.view(self._boxes, 6)
        chunks = [Chunk((2 * i + self._rank, 0), (1, 6), rows[i : i + 1]) for i in range(self._boxes)]
        return Boxes((2 * self._boxes, 6), rows.dtype, chunks)

    def connect(self, **settings: Any) -> int:
        """connect; the incarnation."""
        import ckptd_client  # noqa: PLC0415

        self._client = ckptd_client.connect(JOB, **{"save_timeout_s": SAVE_TIMEOUT_S, **settings})
        return int(self._client.incarnation)

    def divide(self, boxes: int) -> None:
        """Part of the state of the next saves and loads is in so many boxes."""
        self._boxes = boxes

    def resize(self, nbytes: int) -> None:
        """The state of the next saves has this size."""
        self._nbytes = nbytes

    def prepare(self) -> None:
        """prepare."""
        self._client.prepare(self._state(0))

    def save(self, step: int, **named: Any) -> float:
        """save; the seconds that the handle says."""
        handle = self._handles[step] = self._client.save(self._state(step), step, **named)
        self.watch()
        return float(handle.stall_s)

    def save_slowly(self, step: int) -> float:
        """A save whose copy stops half way until the process gets SIGUSR1 (or is killed)."""
        import torch  # noqa: PLC0415

        plain = torch._foreach_copy_

        def incomplete(targets: list[Any], sources: list[Any]) -> None:
            first = targets[0].reshape(-1)
            first[: first.numel() // 2].copy_(sources[0].reshape(-1)[: first.numel() // 2])
            signal.sigwait({signal.SIGUSR1})
            plain(targets, sources)

        torch._foreach_copy_ = incomplete
        try:
            return self.save(step)
        finally:
            torch._foreach_copy_ = plain

    def wait(self, step: int, milestone: str = "durable", timeout_s: float | None = 30.0) -> tuple[str, str]:
        """The handle's wait."""
        try:
            self._handles[step].wait(milestone, timeout_s)
        finally:
            self.watch()
        return self.handle(step)[:2]

    def settle(self, step: int, timeout_s: float = 30.0) -> tuple[str | None, str | None, str]:
        """Until the save of the step has ended, well or not."""
        handle = self._handles[step]
        deadline = time.monotonic() + timeout_s
        while handle.end is None:
            assert time.monotonic() < deadline, f"step {step} has no end after {timeout_s} s: {handle}"
            self._client._staging.pump(0.05)
            self.watch()
        self.watch()
        return self.handle(step)

    def wait_newest(self, milestone: str = "durable", timeout_s: float | None = 30.0) -> int | None:
        """The client's wait; the step."""
        handle = self._client.wait(milestone, timeout_s)
        self.watch()
        return None if handle is None else int(handle.step)

    def train(self, first: int, last: int, *, pause_s: float = 0.02) -> float:
        """Steps from the first to the last, each told by the client's step; the seconds that these calls took."""
        took_s = 0.0
        for step in range(first, last + 1):
            time.sleep(pause_s) if pause_s else None
            began = time.perf_counter()
            self._client.step(step)
            took_s += time.perf_counter() - began
        return took_s

    def hears_preemption(self, step: int) -> bool:
        """Whether preempted has a board to look at."""
        self._client.preempted(step)
        return self._client._board.get(0.0) is not None

    def train_until_preempted(self, steps: int, *, drain: bool = True) -> dict[str, Any]:
        """Steps in which all ranks wait for each other, the loop of the README: at which step it was left."""
        return self._until_preempted(steps, self._meet, drain=drain)

    def train_alone_until_preempted(self, steps: int, seconds: float) -> dict[str, Any]:
        """The same, of a rank that waits for nobody, and whose save may fail."""
        return self._until_preempted(steps, lambda _step: time.sleep(seconds), sure=False)

    def _until_preempted(self, steps: int, train: Any, *, drain: bool = True, sure: bool = True) -> dict[str, Any]:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
        for step in range(2, steps):
            train(step)
            if self._client.preempted(step):
                handle = self._handles[step] = self._client.save(self._state(step), step, drain=drain)
                if sure:
                    handle.wait("durable", 60)
                return {"step": step, "logs": self._logs}
        return {"step": None, "logs": self._logs}

    def _meet(self, step: int) -> None:
        """What a collective is to lock-step ranks: nobody gets past it before all have come to it."""
        if os.environ.get("WORLD_SIZE", "1") == "1":
            return
        directory = os.path.join(os.environ["CKPTD_STORE"], "meeting")
        os.makedirs(directory, exist_ok=True)
        mine = os.path.join(directory, f"{self._rank}")
        with open(mine, "wb") as file:
            file.write(b"%d " % step)
        others = [os.path.join(directory, str(rank)) for rank in range(int(os.environ["WORLD_SIZE"]))]
        while not all(_reached(path, step) for path in others):
            time.sleep(0.002)

    def handle(self, step: int) -> tuple[str | None, str | None, str]:
        """(milestone, end, reason) of the step's handle."""
        handle = self._handles[step]
        milestone, end = handle.milestone, handle.end
        return (milestone and str(milestone), end and str(end), handle.reason)

    def load(self, step: int | None = None) -> dict[str, Any] | None:
        """load into a fresh state, and whether each bit of it is as it was saved."""
        state = self._state(None)
        found = self._client.load(state, step)
        if found is None:
            return None
        self._handles, self._told = {}, {}
        good = _same(state, self._state(found.step))
        return {"step": found.step, "tier": found.tier, "notes": found.notes, "intact": good}

    def load_what_both_have(self) -> dict[str, Any]:
        """load(strict=False) into a state with a tensor more and a key fewer than was saved; whether the rest is it."""
        import torch  # noqa: PLC0415

        new = torch.full((3,), 7.0)
        state = self._state(None) | {"new": new}
        del state["name"]
        found = self._client.load(state, strict=False)
        expected = self._state(found.step) | {"new": torch.full((3,), 7.0)}
        del expected["name"]
        return {"step": found.step, "tier": found.tier, "notes": found.notes, "intact": _same(state, expected)}

    def load_and_hang(self) -> dict[str, Any] | None:
        """A load whose read hangs until the process gets SIGUSR1 (or is killed)."""
        from ckptd_client._load import rounds  # noqa: PLC0415

        plain = rounds.copy_out

        def hang(*args: Any) -> None:
            signal.sigwait({signal.SIGUSR1})
            plain(*args)

        rounds.copy_out = hang
        try:
            return self.load()
        finally:
            rounds.copy_out = plain

    def _files(self, step: int) -> dict[str, Any]:
        """What this rank's trainer would write at a step: other bytes on each rank and at each step."""
        from ckptd_client.files import TorchFile  # noqa: PLC0415

        own = TorchFile({**self._state(step), "step": step})
        return {f"state_{self._rank}.pt": own, f"deep/small_{self._rank}": b"%d" % step, f"empty_{self._rank}": b""}

    def save_files(self, step: int, **named: Any) -> None:
        """save_files."""
        self._handles[step] = self._client.save_files(self._files(step), step, **named)
        self.watch()

    def save_by_dcp(self, step: int) -> None:
        """dcp.save, without a process group."""
        import torch.distributed.checkpoint as dcp  # noqa: PLC0415

        from ckptd_client.dcp import CkptdWriter  # noqa: PLC0415

        try:
            dcp.save({"model": self._state(step)["model"]}, storage_writer=CkptdWriter(self._client, step=step))
        except BaseException as error:  # a CheckpointException is no Exception
            raise RuntimeError(str(error)) from None

    def save_what_cannot_be(self, step: int) -> str:
        """save_files of what rank 0 cannot pickle; what it raised."""
        files = self._files(step)
        if self._rank == 0:
            from ckptd_client.files import TorchFile  # noqa: PLC0415

            files["bad.pt"] = TorchFile(lambda: None)
        try:
            self._handles[step] = self._client.save_files(files, step)
        except Exception as error:
            return type(error).__name__
        return ""

    def free_step(self, wanted: int) -> int:
        """free_step."""
        return int(self._client.free_step(wanted))

    def load_files(self, world: int) -> dict[str, Any] | None:
        """load_files, and whether each bit of all ranks' files is as it was saved."""
        files = self._client.load_files()
        if files is None:
            return None
        self._handles, self._told = {}, {}
        good, own = len(files.names) == 3 * world, (self._rank, self._nbytes)
        with files:
            for rank in range(world):
                found = files.torch_load(f"state_{rank}.pt")
                self._rank, self._nbytes = rank, 2 * found["model"]["weight"].nbytes
                good = good and _same(found, self._state(files.step))
                good = good and files.read(f"deep/small_{rank}") == b"%d" % files.step
                good = good and files.read(f"empty_{rank}") == b""
        self._rank, self._nbytes = own
        return {"step": files.step, "tier": files.tier, "notes": files.notes, "intact": good}

    def steps(self) -> list[int]:
        """steps."""
        return list(self._client.steps())

    def latest(self) -> int | None:
        """latest."""
        return self._client.latest()

    def history(self) -> list[tuple[int, str | None, str | None]]:
        """(step, milestone, end) of every news of a handle, as it came."""
        return self._history

    def sleep(self, seconds: float) -> None:
        """Trains for so long: nothing of the client's is called."""
        time.sleep(seconds)

    def logs(self) -> list[str]:
        """What the client library said."""
        return self._logs

    def close(self) -> None:
        """close."""
        self._client.close()

    def fail(self) -> None:
        """An exception of the training leaves ``with connect(...)``."""
        with contextlib.suppress(ZeroDivisionError), self._client:
            _ = 1 / 0

    def fork_workers(self, count: int = 2) -> list[int]:
        """A DataLoader with forked workers in the middle of a batch that never ends; their pids.

        A worker between two batches looks every 5 s whether its rank lives, and leaves when it does not.
        """
        from torch.utils.data import DataLoader  # noqa: PLC0415

        data = _Endless(count)
        loader = DataLoader(data, num_workers=count, persistent_workers=True, multiprocessing_context="fork")
        batches = iter(loader)
        next(batches)
        for _ in range(count):
            assert data.stuck.acquire(timeout=120), "a worker does not work"
        self._keep += [loader, batches]
        return [worker.pid for worker in batches._workers]

    def watch(self) -> None:
        """Notes what handles say now, if it is new."""
        for step, handle in self._handles.items():
            milestone, end = handle.milestone, handle.end
            news = (milestone and str(milestone), end and str(end))
            if self._told.get(step, (None, None)) != news:
                self._told[step] = news
                self._history.append((step, *news))


class _Endless:
    """A data set of which each worker gets one item, and no second one."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self.stuck = multiprocessing.get_context("fork").Semaphore(0)

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> int:
        if index >= self._workers:
            self.stuck.release()
            while True:
                time.sleep(60)
        return index


def _reached(path: str, step: int) -> bool:
    try:
        with open(path, "rb") as file:
            said = file.read()
    except FileNotFoundError:
        return False
    return said.endswith(b" ") and int(said) >= step


def _same(left: Any, right: Any) -> bool:
    import torch  # noqa: PLC0415

    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_same(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(_same, left, right))
    if hasattr(left, "_chunks"):
        mine, theirs = ([chunk.local for chunk in value._chunks] for value in (left, right))
        return len(mine) == len(theirs) and all(map(_same, mine, theirs))
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left.view(torch.int16), right.view(torch.int16))
    return bool(left == right)


def _main(conn: Connection, variables: dict[str, str], rank: int, nbytes: int) -> None:
    import torch  # noqa: PLC0415

    forks.begin(variables)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    torch.set_num_threads(1)
    trainer = Trainer(rank, nbytes)
    while True:
        while not conn.poll(_IDLE_S):
            trainer.watch()
        try:
            name, args, named = conn.recv()
        except EOFError:
            os._exit(0)
        began = time.monotonic()
        try:
            answer = (True, getattr(trainer, name)(*args, **named))
        except Exception as error:
            answer = (False, (type(error).__name__, str(error)))
        conn.send((*answer, time.monotonic() - began))
