"""What must be pulled from whom to solve which bytes of a set: tasks, and the frames they need. Pure."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ckptd.parity.code import Code, Step, code_of, schedule
from ckptd.parity.streams import TAIL, Span, block_range, spans, start_of
from ckptd.shared.base.errors import PeerError
from ckptd.shared.format.schemes.layout import Symbol
from ckptd.shared.protocol.parity_types import ParityChunk

PARITY = -1  # in place of a rank


class Frame(NamedTuple):
    """Bytes of a symbol that one node sends, and where in the slice they belong.

    span: of segments, not of parity. whole: its whole block is pulled, in order, within the task.
    """

    node: str
    rank: int
    offset: int
    nbytes: int
    at: int
    span: Span | None
    whole: bool


@dataclass(frozen=True, slots=True)
class Task:
    """Bytes first to last of every symbol of a group: inputs are pulled, steps solved, and outputs kept.

    outputs: where each wanted symbol's bytes belong, as an offset in whatever is being filled.
    """

    group: int
    first: int
    last: int
    steps: tuple[Step, ...]
    outputs: tuple[tuple[Symbol, int], ...]

    @property
    def inputs(self) -> tuple[Symbol, ...]:
        """Symbols to pull, column by column."""
        targets = {step.target for step in self.steps}
        return tuple(sorted({s for step in self.steps for s in step.sources} - targets))


@dataclass(frozen=True, slots=True)
class Map:
    """A set and where its bytes are: homes by rank, parity chunks by member."""

    parity_chunk: ParityChunk
    homes: Mapping[int, str]
    parity_chunks: Mapping[int, str]
    code: Code

    # --- tasks

    def encode(self) -> list[Task]:
        """The parities that the parity chunk's own member stores."""
        tasks = []
        for place, (group, column) in enumerate(self.code.stored(self.parity_chunk.index)):
            parity = range(self.code.width, self.code.columns)
            wanted = [Symbol(column, row) for row in range(self.code.rows)]
            steps = schedule(self.code.equations, parity, wanted)
            if steps is None:
                raise AssertionError("parity always follows from the data")
            start, symbol = place * self.code.strip_nbytes, self.code.symbol_nbytes
            outputs = tuple((s, start + s.row * symbol) for s in wanted)
            tasks.append(Task(group, 0, symbol, steps, outputs))
        return [task for task in tasks if task.last]

    def rebuild(self, rank: int) -> list[Task]:
        """A lost segment's bytes. Raises PeerError when more is lost than the scheme can bear."""
        member = next(
            i for i, column in enumerate(self.parity_chunk.columns) if any(s.rank == rank for s in column.seals)
        )
        column = self.parity_chunk.columns[member]
        start = start_of(column, rank)
        stop = start + next(seal for seal in column.seals if seal.rank == rank).content_nbytes
        tasks: list[Task] = []
        strip_nbytes = self.code.strip_nbytes
        for strip in range(self.code.width):
            base = strip * strip_nbytes
            first, last = max(start, base), min(stop, base + strip_nbytes)
            if first < last:
                tasks += self._rebuild(member, strip, first - base, last - base, base - start)
        return tasks

    def _rebuild(self, member: int, strip: int, first: int, last: int, shift: int) -> Iterator[Task]:
        """Bytes first to last of the member's strip; shift from an offset in it to one in what is being filled."""
        group, symbol = self.code.group(member, strip), self.code.symbol_nbytes
        lost = {column for column in range(self.code.columns) if self._lost(group, column)}
        mine = self.code.data(group).index(member)
        # At each offset of the symbols the same rows are wanted between two of these.
        edges = sorted({0, first % symbol, last % symbol, symbol})
        for lo, hi in itertools.pairwise(edges):
            rows = [r for r in range(self.code.rows) if first <= r * symbol + lo and r * symbol + hi <= last]
            if not rows:
                continue
            wanted = [Symbol(mine, row) for row in rows]
            steps = schedule(self.code.equations, lost | {mine}, wanted)
            if steps is None:
                raise PeerError(
                    f"{self.parity_chunk.save}: {len(lost | {mine})} of {self.code.members} parts of a group are lost, "
                    f"{self.parity_chunk.scheme} bears {self.parity_chunk.scheme.losses}"
                )
            outputs = tuple((s, s.row * symbol + lo + shift) for s in wanted)
            yield Task(group, lo, hi, steps, outputs)

    def _lost(self, group: int, column: int) -> bool:
        if column >= self.code.width:
            return self.code.holders(group)[column - self.code.width] not in self.parity_chunks
        member = self.code.data(group)[column]
        base = self.code.strip(member, group) * self.code.strip_nbytes
        inside = spans(self.parity_chunk.columns[member], base, base + self.code.strip_nbytes)
        return any(span.seal.rank not in self.homes for span in inside)

    # --- frames

    def frames(self, task: Task, symbol: Symbol, lo: int, hi: int) -> Iterator[Frame]:
        """What to pull for bytes lo to hi of the symbol. Bytes that no frame covers are zeros."""
        base = symbol.row * self.code.symbol_nbytes
        if symbol.column >= self.code.width:
            place = symbol.column - self.code.width
            node = self.parity_chunks[self.code.holders(task.group)[place]]
            yield Frame(node, PARITY, place * self.code.strip_nbytes + base + lo, hi - lo, 0, None, False)
            return
        member = self.code.data(task.group)[symbol.column]
        base += self.code.strip(member, task.group) * self.code.strip_nbytes
        for span in spans(self.parity_chunk.columns[member], base + lo, base + hi):
            segment = base + lo + span.at - span.offset  # where in the column the segment begins
            start, stop = block_range(span.seal, span.block)
            whole = span.block != TAIL and base + task.first <= segment + start and segment + stop <= base + task.last
            node = self.homes[span.seal.rank]
            yield Frame(node, span.seal.rank, span.offset, span.nbytes, span.at, span, whole)


def map_of(parity_chunk: ParityChunk, homes: Mapping[int, str], parity_chunks: Mapping[int, str]) -> Map:
    """The set of a parity chunk, with where everything is now."""
    return Map(parity_chunk, homes, parity_chunks, code_of(parity_chunk))


def at_home(parity_chunk: ParityChunk) -> Map:
    """The set with every column at its own node and no parity yet, as it is encoded."""
    return map_of(
        parity_chunk, {seal.rank: column.node for column in parity_chunk.columns for seal in column.seals}, {}
    )
