"""``python -m bench.parity``: parity of 4 nodes on loopback, beside its bars: encode and rebuild, CPU, memory.

Four processes, each with an arena of its own and a real bulk server. GB/s of an encode is bytes protected by its time;
of a rebuild, bytes lost by its time. CPU is that of all processes. Each round also times a bare copy over loopback of
as many bytes as the work pulls, between the same processes and with no more than a send and a receive per MiB: on a
machine with other work a ratio to it says more than GB/s do. "times bare": CPU and seconds of the best rounds.
"""

import argparse
import contextlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from ckptd.arena.budget import parse_fields
from ckptd.parity.encode import encode
from ckptd.parity.files import open_parity
from ckptd.parity.rebuild import Place, rebuild_segment
from ckptd.shared.bulk.client import Address
from ckptd.shared.format.schemes import Scheme
from ckptd.shared.format.slot import Seal
from ckptd.shared.protocol.parity_types import DataColumn
from tests.nodes import EPOCH, KEY, SAVE, SECRET, Node, Set, stage

NODES = 4
_BARS = {
    "xor encode": (3.4, 1.3),
    "xor rebuild": (1.0, None),
    "double encode": (2.0, None),
    "double rebuild": (0.7, None),
}
_MAX_EXTRA_NBYTES = 64 << 20


# --- one node, a process


class Worker:
    """Executes commands from stdin, one per line, and answers on stdout."""

    def __init__(self, index: int, directory: str, nbytes: int) -> None:
        self.index = index
        self.node = Node.start(f"n{index}", directory)
        image = np.random.default_rng(index).integers(0, 256, nbytes, np.uint8)
        self.seal = stage(self.node.arena, index, memoryview(image))
        self.set = Set([])
        self.addresses: Mapping[str, Address] = {}
        self.peak = _Peak()
        self.bare = _Bare(self.node, index)
        self.bare_ports: list[int] = []

    def meet(self, ports: list[int], bare_ports: list[int], seals: list[Any]) -> None:
        """The other nodes' servers and seals."""
        self.bare_ports = bare_ports
        self.addresses = {
            f"n{i}": Address("127.0.0.1", port, f"link-{self.index}", SECRET) for i, port in enumerate(ports)
        }
        columns = tuple(DataColumn(f"n{i}", (msgspec.convert(seal, Seal),)) for i, seal in enumerate(seals))
        self.set = Set([self.node], columns, relays={})
        self.set.address_of = self.addresses.get  # type: ignore[method-assign]

    def encode(self, scheme: str) -> None:
        """This node's parity, of memory that was used before."""
        parity_chunk = self.set.parity_chunk(self.index, Scheme(scheme))
        encode(self.node.parities, KEY, parity_chunk, self.set.sources(self.node), lambda _: None)

    def copy(self, nbytes: int) -> None:
        """Pulls as many bytes from each of the others, without computing."""
        self.bare.pull([port for i, port in enumerate(self.bare_ports) if i != self.index], nbytes)

    def forget(self) -> None:
        """Releases the parity."""
        self.node.parities.give_back(KEY, SAVE, EPOCH)

    def rebuild(self, scheme: str, lost: list[int], rank: int) -> None:
        """Rebuilds a lost segment here, as on the node that replaces the lost one."""
        parity_chunk = self.set.parity_chunk(self.index, Scheme(scheme))
        place = Place(self.node.arena, KEY, self.set.columns[rank].seals[0])
        homes, parity_chunks = self.set.homes(lost), self.set.parity_chunks(lost)
        got = rebuild_segment(place, parity_chunk, homes, parity_chunks, self.set.sources(self.node), lambda _: None)
        self.made = got.slot

    def unmake(self) -> None:
        """Removes what was rebuilt."""
        self.node.arena.unlink(KEY, self.made)

    def parity_nbytes(self) -> int:
        """Bytes of this node's parity."""
        found = open_parity(self.node.arena, KEY, SAVE, EPOCH)
        return found.nbytes if found else 0


_PART_NBYTES = 1 << 20


class _Bare:
    """The least that a copy over loopback takes: a slot's bytes, sent from and received into warm memory."""

    def __init__(self, node: Node, rank: int) -> None:
        slot = node.arena.slot_of(KEY, rank, SAVE)
        self._view = node.arena.view(KEY, slot or "")
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self._into = memoryview(bytearray(_PART_NBYTES))
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            connection = self._server.accept()[0]
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            left = int.from_bytes(connection.recv(8, socket.MSG_WAITALL), "little")
            at = 0
            while left:
                nbytes = min(left, _PART_NBYTES, len(self._view) - at)
                connection.sendall(self._view[at : at + nbytes])
                left, at = left - nbytes, (at + nbytes) % len(self._view)

    def pull(self, ports: list[int], nbytes: int) -> None:
        """Pulls so many bytes from each, a part of each in turn."""
        with contextlib.ExitStack() as stack:
            sources = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for port in ports]
            for source in sources:
                source.settimeout(None)
                source.sendall(nbytes.to_bytes(8, "little"))
            for start in range(0, nbytes, _PART_NBYTES):
                part = self._into[: min(_PART_NBYTES, nbytes - start)]
                for source in sources:
                    source.recv_into(part, len(part), socket.MSG_WAITALL)


class _Peak:
    """Growth of this process's own memory beyond mapped files, sampled while something runs."""

    def __init__(self) -> None:
        self._stop = threading.Event()

    @contextlib.contextmanager
    def watched(self) -> Iterator[list[int]]:
        """Fills in the growth in bytes at the end."""
        grown, before, most = [0], _anon(), [0]
        self._stop.clear()

        def watch() -> None:
            while not self._stop.wait(0.005):
                most[0] = max(most[0], _anon())

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield grown
        finally:
            self._stop.set()
            thread.join()
            grown[0] = max(0, max(most[0], _anon()) - before)


def _anon() -> int:
    with open("/proc/self/status", encoding="ascii") as file:
        return parse_fields(file.read())["RssAnon"]


def work(index: int, directory: str, nbytes: int) -> None:
    """The loop of a worker process."""
    worker = Worker(index, directory, nbytes)
    hello = {"port": worker.node.server.port, "bare": worker.bare.port}
    print(json.dumps(hello | {"seal": msgspec.json.encode(worker.seal).decode()}), flush=True)
    for line in sys.stdin:
        said = json.loads(line)
        name, args, watch = said["do"], said["args"], said["watch"]
        if name == "meet":
            ports, bare_ports, seals = args
            worker.meet(ports, bare_ports, [msgspec.json.decode(seal, type=Seal) for seal in seals])
            print(json.dumps({}), flush=True)
            continue
        with worker.peak.watched() if watch else contextlib.nullcontext([0]) as grown:
            start = time.monotonic()
            getattr(worker, name)(*args)
            end = time.monotonic()
        times = os.times()
        print(json.dumps({"start": start, "end": end, "cpu": times.user + times.system, "grown": grown[0]}), flush=True)
    worker.node.stop()


# --- the measurement


class Cluster:
    """Worker processes that get commands at the same time."""

    def __init__(self, directory: str, nbytes: int) -> None:
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", "bench.parity", "--worker", str(i), directory, str(nbytes)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )
            for i in range(NODES)
        ]  # fmt: skip
        hello = [self._read(i) for i in range(NODES)]
        self.all("meet", *([h[name] for h in hello] for name in ("port", "bare", "seal")))

    def _read(self, index: int) -> dict[str, Any]:
        stdout = self._processes[index].stdout
        line = stdout.readline() if stdout else ""
        if not line:
            raise RuntimeError(f"worker {index} ended")
        return json.loads(line)  # type: ignore[no-any-return]

    def _say(self, index: int, name: str, args: tuple[Any, ...], watch: bool) -> None:
        stdin = self._processes[index].stdin
        if stdin:
            stdin.write(json.dumps({"do": name, "args": args, "watch": watch}) + "\n")
            stdin.flush()

    def all(self, name: str, *args: Any, watch: bool = False) -> list[dict[str, Any]]:
        """Runs a command on every node at the same time."""
        for i in range(NODES):
            self._say(i, name, args, watch)
        return [self._read(i) for i in range(NODES)]

    def some(self, jobs: dict[int, tuple[Any, ...]], *, watch: bool = False) -> list[dict[str, Any]]:
        """Runs a command on some nodes at the same time."""
        for i, (name, *args) in jobs.items():
            self._say(i, name, tuple(args), watch)
        return [self._read(i) for i in jobs]

    def cpu(self) -> float:
        """CPU seconds of all processes so far."""
        ticks = 0
        for process in self._processes:
            with open(f"/proc/{process.pid}/stat", encoding="ascii") as file:
                fields = file.read().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        """Ends the workers."""
        for process in self._processes:
            with contextlib.suppress(OSError):
                if process.stdin:
                    process.stdin.close()
        for process in self._processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class Result(NamedTuple):
    """Seconds, CPU seconds and extra bytes, and those of the bare copy."""

    seconds: float
    cpu: float
    extra: int
    bare_seconds: float = 0.0
    bare_cpu: float = 0.0


def measure(cluster: Cluster, scheme: Scheme, repeat: int, nbytes: int) -> dict[str, list[Result]]:
    """Encodes, and rebuilds the largest loss of the scheme, repeat times after two rounds that are not counted."""
    parity: list[Result] = []
    rebuilds: list[Result] = []
    lost = list(range(scheme.losses))
    width = NODES - scheme.losses
    # Of each column a node pulls a strip for each parity that it holds; a rebuild as many columns as a group has.
    encode_part = nbytes * scheme.losses * width // (width * (NODES - 1))
    rebuild_part = nbytes * width // (NODES - 1)
    for turn in range(repeat + 2):
        watch = turn == 0  # sampling takes time, so memory has a separate round, which also warms the memory

        def encode_all(watch: bool = watch) -> Any:
            return cluster.all("encode", scheme, watch=watch)

        def rebuild_lost(watch: bool = watch) -> Any:
            return cluster.some({rank: ("rebuild", scheme, lost, rank) for rank in lost}, watch=watch)

        parity.append(_beside(cluster, encode_all, range(NODES), encode_part))
        rebuilds.append(_beside(cluster, rebuild_lost, lost, rebuild_part))
        cluster.some(dict.fromkeys(lost, ("unmake",)))
        cluster.all("forget")
    return {f"{scheme} encode": parity, f"{scheme} rebuild": rebuilds}


def _beside(cluster: Cluster, run: Any, who: Iterable[int], part: int) -> Result:
    result = _timed(cluster, run)
    bare = _timed(cluster, lambda: cluster.some(dict.fromkeys(who, ("copy", part))))
    return result._replace(bare_seconds=bare.seconds, bare_cpu=bare.cpu)


def _timed(cluster: Cluster, run: Any) -> Result:
    before = cluster.cpu()
    answers = run()
    cpu = cluster.cpu() - before
    seconds = max(a["end"] for a in answers) - min(a["start"] for a in answers)
    return Result(seconds, cpu, max(a["grown"] for a in answers))


def main() -> int:
    """Measures and prints; exit code 1 when a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--scheme", choices=[Scheme.XOR, Scheme.DOUBLE], action="append")
    parser.add_argument("--worker", nargs=3)
    given = parser.parse_args()
    if given.worker:
        work(int(given.worker[0]), given.worker[1], int(given.worker[2]))
        return 0
    directory = tempfile.mkdtemp(prefix="ckptd-bench-", dir="/dev/shm")
    try:
        cluster = Cluster(directory, given.mib << 20)
        try:
            results: dict[str, list[Result]] = {}
            for scheme in given.scheme or (Scheme.XOR, Scheme.DOUBLE):
                results |= measure(cluster, Scheme(scheme), given.repeat, given.mib << 20)
        finally:
            cluster.close()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return report(results, given.mib << 20)


def report(results: dict[str, list[Result]], nbytes: int) -> int:
    """One row per measurement."""
    columns = ("what", "GB/s", "bar", "best", "CPU s", "best", "bar", "times bare: CPU, s", "extra MiB")
    table = Table(*columns, "rounds: s, CPU s, bare CPU s")
    missed = 0
    for name, rounds in results.items():
        counted = rounds[2:]
        work_nbytes = nbytes * (NODES if "encode" in name else 1 if name.startswith("xor") else 2)
        seconds = statistics.median(r.seconds for r in counted)
        cpu = statistics.median(r.cpu for r in counted)
        best, best_cpu = min(r.seconds for r in counted), min(r.cpu for r in counted)
        bare, bare_cpu = min(r.bare_seconds for r in counted), min(r.bare_cpu for r in counted)
        extra = rounds[0].extra
        rate, (bar, cpu_bar) = work_nbytes / seconds / 1e9, _BARS[name]
        missed += rate < bar or (cpu_bar is not None and cpu > cpu_bar) or extra > _MAX_EXTRA_NBYTES
        table.add_row(
            name, f"{rate:.2f}", f"{bar}", f"{work_nbytes / best / 1e9:.2f}", f"{cpu:.2f}", f"{best_cpu:.2f}",
            str(cpu_bar or ""), f"{best_cpu / bare_cpu:.2f} {best / bare:.2f}", f"{extra / (1 << 20):.0f}",
            " ".join(f"{r.seconds:.2f},{r.cpu:.2f},{r.bare_cpu:.2f}" for r in rounds),
        )  # fmt: skip
    console = Console(width=200)
    console.print(table)
    load = os.getloadavg()[0]
    console.print(
        f"{NODES} x {nbytes >> 20} MiB, {os.cpu_count()} CPUs, load {load:.1f}; {missed} of {len(results)} missed a bar"
    )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
