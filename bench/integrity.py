"""The cost of a key: save, digests, drain, restore and bulk bytes with xxh3 and with integrity = keyed, in turns.

``python -m bench.integrity``: a daemon of each kind on one node, a client of each in this process; then two nodes of
each kind that copy a segment over loopback. Everything is measured of one kind and then of the other, again and again,
so that what else the machine does meets both. Medians, and their ratios.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from bench import states
from bench.measure import Series, text
from bench.node import Client, Node, scratch
from ckptd.parity.rebuild import Place, copy_segment
from ckptd.shared.files.integrity_key import write_key
from ckptd.shared.format.digest import blocks
from ckptd.shared.format.integrity import XXH3, Integrity
from tests.nodes import KEY, start_set

_MIB = 1 << 20
_TIMEOUT_S = 600.0
_WARM = 2  # rounds that are not counted, in which memory is touched and slots are created


class Kind:
    """A daemon, a client and a set of two nodes with one kind of digests."""

    def __init__(self, name: str, integrity: Integrity, key: str, shm: Path, disk: Path, nbytes: int) -> None:  # noqa: PLR0913, PLR0917
        self.name, self.integrity = name, integrity
        self.found: dict[str, list[float]] = {}
        self._options = {"integrity_key_file": key} if key else {"integrity": "xxh3"}
        self._environ = {"CKPTD_INTEGRITY_KEY_FILE": key} if key else {"CKPTD_INTEGRITY": "xxh3"}
        (shm / name).mkdir()
        (disk / name).mkdir()
        self.node = Node(shm / name, disk / name / "store")
        self.state = states.realistic(nbytes)
        self.image = os.urandom(nbytes)
        (shm / f"{name}-set").mkdir()
        self.set = start_set(str(shm / f"{name}-set"), 2, integrity)
        self.set.stage([[self.image], [b"x" * 4096]])
        self._step = 0

    def start(self) -> None:
        """The daemon."""
        os.environ.update(self._environ)
        self.node.start()
        for name in self._environ:
            del os.environ[name]

    def round(self) -> None:
        """Runs each measurement once."""
        self._time("digest of a buffer, one thread", self._digest)
        with self.node.client(f"bench-{self.name}", **self._options) as client:
            self._saves(client)
            self._time("load from the arena", lambda: client.load(self.state))
            final = max((self.node.store / f"bench-{self.name}").glob("step-*"))
            self._time("load_from the store", lambda: client.load_from(final, self.state))  # type: ignore[attr-defined]
        self._time("copy of a segment from another node", self._copy)

    def _saves(self, client: Client) -> None:
        self._step += 1
        client.prepare(self.state)
        states.mutate(self.state, self._step)
        began = time.perf_counter()
        handle = client.save(self.state, self._step, drain=True)  # type: ignore[call-arg]
        self._note("stall of a save", time.perf_counter() - began)
        handle.wait("durable", _TIMEOUT_S)
        self._note("save call to durable", time.perf_counter() - began)

    def _digest(self) -> None:
        view = memoryview(self.image)
        for start, stop in blocks(len(view)):
            self.integrity.digest(view[start:stop])

    def _copy(self) -> None:
        at = self.set.nodes[1]
        place = Place(at.arena, KEY, self.set.columns[0].seals[0])
        fetched = copy_segment(place, "n0", self.set.sources(at), lambda _: None)
        at.arena.unlink(KEY, fetched.slot)

    def _time(self, what: str, act: Callable[[], object]) -> None:
        began = time.perf_counter()
        act()
        self._note(what, time.perf_counter() - began)

    def _note(self, what: str, seconds: float) -> None:
        self.found.setdefault(what, []).append(seconds)

    def close(self) -> None:
        """Ends the processes and removes all files."""
        self.set.stop()
        self.node.close()


def main() -> None:
    """Prints a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=512, help="state of the rank")
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with scratch(Path(tempfile.gettempdir())) as (shm, disk):
        key = str(disk / "key")
        keyed = write_key(key)
        kinds = [
            Kind(name, integrity, file, shm, disk, options.mib * _MIB)
            for name, integrity, file in (("xxh3", XXH3, ""), ("keyed", keyed, key))
        ]
        try:
            for kind in kinds:
                kind.start()
            for _ in range(_WARM + options.repeat):
                for kind in kinds:
                    kind.round()
        finally:
            for kind in kinds:
                kind.close()
    print(f"{options.mib} MiB, {options.repeat} rounds, {os.cpu_count()} cores; load now: {os.getloadavg()[0]:.1f}\n")
    print("| | xxh3, s | keyed, s | ratio |\n|---|---|---|---|")
    for what in kinds[0].found:
        one, other = (Series("s", tuple(kind.found[what][_WARM:])) for kind in kinds)
        print(f"| {what} | {text(one)} | {text(other)} | {other.median / one.median:.2f} |")


if __name__ == "__main__":
    main()
