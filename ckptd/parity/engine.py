"""Pulls a task's inputs and solves it, a slice of each symbol at a time: memory is constant. Blocks; for threads."""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, Final

from ckptd.parity.plan import Frame, Map, Task
from ckptd.parity.sources import Opener, Source, look
from ckptd.parity.streams import Span, block_range
from ckptd.parity.table import Table
from ckptd.shared.base.errors import DamagedError
from ckptd.shared.base.ids import JobKey
from ckptd.shared.bulk import wire
from ckptd.shared.format.digest import DIGEST_NBYTES
from ckptd.shared.format.integrity import Hasher, Integrity, Purpose
from ckptd.shared.format.schemes.layout import Symbol
from ckptd.shared.format.slot import PAGE, Seal
from ckptd.system import failpoints

SLICE_NBYTES: Final = 1 << 20
_MEMORY_NBYTES: Final = 16 << 20  # of all slices that a task holds at once
_WINDOW: Final = 256  # frames that are asked for ahead, about

Progress = Callable[[int], None]


class Pull:
    """One task's way from the sources to its outputs in ``into``.

    verify: compare every byte pulled with the digests of its segment; without, the caller checks what comes out.
    table receives the output.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - the daemon's part, then the work
        self, sources: Opener, job: JobKey, where: Map, task: Task, into: memoryview, table: Table, *, verify: bool
    ) -> None:
        import numpy as np  # noqa: PLC0415 - the daemon starts without it

        self._np: Any = np
        self._sources, self._job, self._map, self._task, self._verify = sources, job, where, task, verify
        self._table = table
        self._opened: dict[str, Source] = {}
        self._blocks = _Blocks(sources.integrity)
        outputs = dict(task.outputs)
        scratch = sum(step.target not in outputs for step in task.steps) + 1
        fit = _MEMORY_NBYTES // scratch // PAGE * PAGE
        self._slice = max(PAGE, min(SLICE_NBYTES, fit))
        self._spare = self._buffer()
        self._targets = {
            step.target: self._array(into[outputs[step.target] :][: task.last - task.first])
            if step.target in outputs
            else self._buffer()
            for step in task.steps
        }
        self._wanted = outputs
        # Words are XORed faster than bytes, where all of them lie at multiples of 8.
        self._words = not any((array.ctypes.data | task.first) & 7 for array in (self._spare, *self._targets.values()))
        self._feeds: dict[Symbol, list[Symbol]] = defaultdict(list)
        for step in task.steps:
            for source in step.sources:
                self._feeds[source].append(step.target)

    def _buffer(self) -> Any:
        return self._np.zeros(self._slice, self._np.uint8)

    def _array(self, view: memoryview) -> Any:
        return self._np.frombuffer(view, self._np.uint8)

    # --- the run

    def run(self, progress: Progress, failpoint: str = "") -> None:
        """Fills the outputs. Raises PeerError, DamagedError, OSError."""
        with contextlib.ExitStack() as stack:
            self._stack = stack
            done, windows = 0, self._windows()
            ahead = next(windows, None)
            if ahead is None:
                return
            self._ask_tables()
            self._ask(ahead)
            self._receive_tables()
            while ahead is not None:
                window, ahead = ahead, next(windows, None)
                if ahead is not None:
                    self._ask(ahead)
                for lo, hi, pulls in window:
                    self._sources.cancel.check()
                    self._slice_of(lo, hi, pulls)
                    progress((hi - lo) * len(pulls))
                    if failpoint and not done and 2 * hi >= self._task.last:
                        failpoints.reach(failpoint)
                        done = 1
            self._blocks.finish()

    def _windows(self) -> Iterator[list[tuple[int, int, list[tuple[Symbol, list[Frame]]]]]]:
        """Slices with what to pull for them, as many at a time as are asked for ahead."""
        window, count, inputs = [], 0, self._task.inputs
        for lo in range(self._task.first, self._task.last, self._slice):
            hi = min(lo + self._slice, self._task.last)
            pulls = [(symbol, list(self._map.frames(self._task, symbol, lo, hi))) for symbol in inputs]
            window.append((lo, hi, pulls))
            count += sum(len(frames) for _, frames in pulls)
            if count >= _WINDOW:
                yield window
                window, count = [], 0
        if window:
            yield window

    def _source(self, node: str) -> Source:
        if node not in self._opened:
            self._opened[node] = self._sources.open(node)
            self._stack.callback(self._opened[node].close)
        return self._opened[node]

    def _ask(self, window: list[tuple[int, int, list[tuple[Symbol, list[Frame]]]]]) -> None:
        ranges: dict[str, list[wire.Range]] = defaultdict(list)
        for _, _, pulls in window:
            for _, frames in pulls:
                for frame in frames:
                    _append(ranges[frame.node], frame, checked=self._verify and not frame.whole)
        for node, asked in ranges.items():
            self._ask_of(node, asked)

    def _ask_of(self, node: str, ranges: list[wire.Range]) -> None:
        parity_chunk = self._map.parity_chunk
        self._source(node).ask(self._job, parity_chunk.save, parity_chunk.epoch, ranges)

    # --- digest tables of the segments that are pulled

    def _segments(self) -> dict[int, Seal]:
        if not self._verify:
            return {}
        found = {}
        for symbol in self._task.inputs:
            for frame in self._map.frames(self._task, symbol, self._task.first, self._task.last):
                if frame.span is not None:
                    found[frame.rank] = frame.span.seal
        return found

    def _ask_tables(self) -> None:
        self._tables = [(self._map.homes[rank], seal) for rank, seal in self._segments().items() if seal.table_nbytes]
        for node, seal in self._tables:
            self._ask_of(node, [wire.Range(seal.rank, seal.table_offset, seal.table_nbytes, True)])

    def _receive_tables(self) -> None:
        for node, seal in self._tables:
            table = memoryview(bytearray(seal.table_nbytes))
            self._source(node).receive(table)
            if self._sources.integrity.digest(table, Purpose.TABLE) != seal.table_digest:
                raise DamagedError(f"node {node}: the digest table of rank {seal.rank} is not the one that was sealed")
            self._blocks.know(seal, table)

    # --- one slice

    def _slice_of(self, lo: int, hi: int, pulls: list[tuple[Symbol, list[Frame]]]) -> None:
        first, nbytes = self._task.first, hi - lo
        parts = {
            target: array[lo - first : hi - first] if target in self._wanted else array[:nbytes]
            for target, array in self._targets.items()
        }
        empty = set(parts)
        for symbol, frames in pulls:
            if not frames:
                continue
            targets = self._feeds[symbol]
            if targets[0] in empty:
                value, rest = parts[targets[0]], targets[1:]
                empty.discard(targets[0])
            else:
                value, rest = self._spare[:nbytes], targets
            self._fill(value, frames)
            for target in rest:
                self._add(parts[target], value, target in empty)
                empty.discard(target)
        for step in self._task.steps:
            part = parts[step.target]
            if step.target in empty:
                part[:] = 0
                continue
            for target in self._feeds[step.target]:
                self._add(parts[target], part, target in empty)
                empty.discard(target)
        for target, offset in self._wanted.items():
            self._table.take(offset + lo - first, memoryview(parts[target]))

    def _add(self, total: Any, value: Any, empty: bool) -> None:
        if empty:
            self._np.copyto(total, value)
        elif self._words and not len(total) & 7:
            words = total.view(self._np.uint64)
            self._np.bitwise_xor(words, value.view(self._np.uint64), out=words)
        else:
            self._np.bitwise_xor(total, value, out=total)

    def _fill(self, value: Any, frames: list[Frame]) -> None:
        """The symbol's bytes: frames, and zeros between them."""
        view, at = memoryview(value), 0
        for frame in frames:
            if frame.at > at:
                value[at : frame.at] = 0
            at = frame.at + frame.nbytes
            part = view[frame.at : at]
            self._opened[frame.node].receive(part)
            if self._verify and frame.whole and frame.span and not self._blocks.take(frame.span, part):
                self._accuse(frame.node, frame.span)
        if at < len(value):
            value[at:] = 0

    def _accuse(self, node: str, span: Span) -> None:
        """Whose fault it is that a block does not match its digest: the node is asked to look at its own copy."""
        rank, parity_chunk = span.seal.rank, self._map.parity_chunk
        look(
            self._sources,
            node,
            self._job,
            parity_chunk.save,
            [wire.Range(rank, span.offset, 0, True)],
            parity_chunk.epoch,
        )
        raise DamagedError(f"node {node}: block {span.block} of rank {rank} was damaged on the wire")


def _append(ranges: list[wire.Range], frame: Frame, *, checked: bool) -> None:
    """Asks for the frame too. What continues where the last one ends is one range with it: fewer steps on both sides.

    Not what is checked: a digest is cheapest of bytes that are few enough to stay in the cache.
    """
    if ranges and not checked:
        last = ranges[-1]
        nbytes = last.nbytes + frame.nbytes
        goes_on = (last.rank, last.offset + last.nbytes, last.checked) == (frame.rank, frame.offset, False)
        if goes_on and nbytes <= wire.MAX_FRAME_NBYTES:
            ranges[-1] = wire.Range(frame.rank, last.offset, nbytes, False)
            return
    ranges.append(wire.Range(frame.rank, frame.offset, frame.nbytes, checked))


class _Blocks:
    """Running digests of the blocks that are pulled whole."""

    def __init__(self, integrity: Integrity) -> None:
        self._integrity = integrity
        self._tables: dict[int, memoryview] = {}
        self._running: dict[tuple[int, int], Hasher] = {}

    def know(self, seal: Seal, table: memoryview) -> None:
        """The checked digest table of a segment."""
        self._tables[seal.rank] = table

    def take(self, span: Span, part: memoryview) -> bool:
        """Takes in the next bytes of a block; False when it ends and is not what was sealed."""
        rank, block = span.seal.rank, span.block
        key = rank, block
        start, stop = block_range(span.seal, block)
        if span.offset == start:
            self._running[key] = self._integrity.hasher()
        running = self._running[key]
        running.update(part)
        if span.offset + span.nbytes < stop:
            return True
        del self._running[key]
        at = block * DIGEST_NBYTES
        return running.value() == self._tables[rank][at : at + DIGEST_NBYTES]

    def finish(self) -> None:
        """Raises AssertionError when a block was begun and not ended: then it was not checked."""
        if self._running:
            raise AssertionError(f"blocks not checked: {sorted(self._running)}")
