"""The node group: ranks of one node that read a checkpoint on the store together, each block once.

The ranks share the file in which they meet (meeting.py). Each announces which blocks it wants. From that every rank
computes which blocks several ranks want and which rank reads each; each says a digest of what it computes from, and
ranks that differ share nothing. A rank reads a block and checks it into one of a few shared buffers, beside which the
block's number stands; all ranks that want the block copy it out.

A rank that does not take part, gives up or fails says that it is gone: no other waits for it, and what it was to read
the others read themselves. For a rank that says nothing, since it was killed or hangs, the others wait until the group
has made no progress for a bounded time.

Other nodes that read the same checkpoint take part through the peer exchange of the first rank (peer_exchange.py): it
knows which blocks come from which nodes and go to which. All of them together are one more member of the group: its
position is that of the node that is furthest behind, which the first rank keeps.
"""

import logging
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from ckptd.shared.format.digest import digest
from ckptd_client._load.reader import Buffer
from ckptd_client._load.shared_read.found import DifferentError, Found, merged, refuse_others
from ckptd_client._load.shared_read.group_memory import (
    ABSENT,
    AGREED,
    DECLINED,
    ENTERED,
    GONE,
    JOINED,
    LEFT,
)
from ckptd_client._load.shared_read.meeting import Meeting
from ckptd_client._load.shared_read.schedule import Blocks, SharedBlock, bits_of, schedule, union

log = logging.getLogger("ckptd_client")
_JOIN_S: Final = 10.0  # wait for the other ranks at the beginning, and for them to agree
_PLAN_S: Final = 60.0  # then for the plan of all nodes: longer than the first rank waits for other nodes
_PATIENCE_S: Final = 20.0  # later, for a block or a buffer, without progress of the group
_NODE_PATIENCE_S: Final = 10.0  # for another node to take a block: shorter than the node's own ranks wait for this rank
_AGAIN_S: Final = 1.0  # for a node whose connection broke to ask again: it does so at once
_PAUSES_S: Final = (0.0002, 0.002)
_GOOD, _FAILED, _LOST, _FILLING = 0, 1, 2, 3  # outcome of a block; lost: a thread may still write to its buffer


@dataclass(frozen=True, slots=True)
class Plan:
    """What this node has from which nodes, and sends to which: numbers of blocks, by the number of the other node."""

    comes: Mapping[int, Sequence[int]] = field(default_factory=dict)
    goes: Mapping[int, Sequence[int]] = field(default_factory=dict)


class NodeGroup:
    """One rank's access to the group's shared memory, for a checkpoint of these blocks. Raises OSError."""

    def __init__(self, meeting: Meeting, blocks: Blocks, found: Found) -> None:
        self._meeting, self._blocks, self.found = meeting, blocks, found
        self._layout = meeting.layout._replace(total=blocks.total)
        self._index = meeting.index
        self.is_leader = meeting.here.is_leader
        self._memory = meeting.memory(self._layout)
        self._counters = self._memory.view[: self._layout.counters_nbytes].cast("Q")
        self._given_up = threading.Event()
        self._schedule: list[SharedBlock] = []
        self._plan = Plan()
        self._going: dict[int, list[SharedBlock]] = {}  # to other nodes, at the first rank
        self._targets: dict[int, int] = {}  # other nodes that get blocks from here, and their positions
        self._returning: dict[int, float] = {}  # those that may ask again, and until when they are waited for
        self._lock = threading.Lock()  # of the targets, and of the state of this rank

    @property
    def shared(self) -> list[SharedBlock]:
        """Blocks that this rank and other members want, in the order in which ranks take them."""
        return [one for one in self._schedule if self._index in one.wanted]

    @property
    def own_reads(self) -> list[SharedBlock]:
        """Blocks that this rank reads from the store."""
        return [one for one in self._schedule if one.filler == self._index and not one.comes]

    @property
    def coming(self) -> dict[int, list[SharedBlock]]:
        """Blocks that other nodes send, by the node; at the first rank."""
        return {node: self._those(blocks) for node, blocks in self._plan.comes.items()}

    def going(self, node: int) -> Sequence[SharedBlock]:
        """Blocks that another node gets from here; at the first rank."""
        return self._going.get(node, ())

    def _those(self, blocks: Collection[int]) -> list[SharedBlock]:
        some = set(blocks)
        return [one for one in self._schedule if one.block in some]

    # --- the beginning

    def join(self, wanted: Collection[int], meet_nodes: Callable[[bytes], Plan] | None = None) -> bool:
        """Announces what this rank wants and collects what the others want. Blocks for a bounded time.

        False: a rank is missing, or reads another checkpoint. Then, and after an error, this rank has left.
        meet_nodes: given by the first rank; takes the bitmap of what this node wants, returns the plan of all nodes.
        Raises DifferentError if ranks found different checkpoints in one read of all.
        """
        agreed = False
        try:
            agreed = self._meet_ranks(wanted) and self._agree(meet_nodes)
        finally:
            if not agreed:
                self.leave()
            self._meeting.end()
        if self.is_leader:
            self._begin_targets()
        return agreed

    def _states(self) -> list[int]:
        return [self._counters[self._layout.state(rank)] for rank in range(self._layout.ranks)]

    def _meet_ranks(self, wanted: Collection[int]) -> bool:
        """Whether all ranks of this node have come, to the same checkpoint."""
        layout = self._layout
        self._bitmap(self._index)[:] = bits_of(wanted, layout.total)
        self._counters[layout.step(self._index)] = self.found.step
        self._counters[layout.mark(self._index)] = self.found.mark
        self._counters[layout.state(self._index)] = JOINED
        self._wait(lambda: not {ABSENT, ENTERED} & {*self._states()} or GONE in self._states(), _JOIN_S, renewed=False)
        if {ABSENT, ENTERED} & {*self._states()}:
            return False
        self._check_same([one for rank in range(layout.ranks) if (one := self._found_by(rank)).mark])
        return {self._counters[layout.mark(rank)] for rank in range(layout.ranks)} <= {0, self.found.mark}

    def _found_by(self, index: int) -> Found:
        layout, counters = self._layout, self._counters
        step, mark, read = (counters[of(index)] for of in (layout.step, layout.mark, layout.read))
        return Found(self._meeting.here.readers[index], step, mark, read)

    def _check_same(self, found: Sequence[Found]) -> None:
        """Raises DifferentError where another found something else in this very read. Notes the read's number."""
        mine = self.found
        refuse_others(mine, found)
        same = [one for one in found if one.mark == mine.mark]
        (self.found,) = merged([mine, *same])
        if any(one.read != self.found.read for one in same):
            numbers = ", ".join(f"rank {one.rank}: {one.read}" for one in same)
            log.info("ckptd: ranks count their reads differently (%s): all go on from %d", numbers, self.found.read)

    def _agree(self, meet_nodes: Callable[[bytes], Plan] | None) -> bool:
        """Computes what this node shares, once the plan of all nodes is known, if all compute it from the same."""
        layout = self._layout
        wants = [bytes(self._bitmap(rank)) for rank in range(layout.ranks)]
        comes = goes = bytes(layout.bitmap_nbytes)
        if layout.others:
            if self.is_leader:
                self._share(self._met(meet_nodes, union(wants)))
            planned = layout.state(layout.ranks)
            self._wait(lambda: bool(self._counters[planned]) or self._has_left(0), _PLAN_S, renewed=False)
            left = self._has_left(0)  # then it makes no plan any more, and the node has none
            if self._counters[planned] == DECLINED:
                other = Found(*(self._counters[of(layout.ranks)] for of in (layout.read, layout.step, layout.mark)))
                raise DifferentError(self.found, other)
            if self._counters[planned]:
                comes, goes = bytes(self._bitmap(layout.ranks)), bytes(self._bitmap(layout.ranks, second=True))
            elif not left:
                return False
        if not self._is_agreed(b"".join([*wants, comes, goes])):
            return False
        self._schedule = schedule(wants, comes, goes, self._blocks.nbytes)
        return True

    def _met(self, meet_nodes: Callable[[bytes], Plan] | None, wants: bytes) -> Plan:
        """The plan of all nodes. If a rank of another node found another checkpoint, the ranks of this one learn it."""
        try:
            return meet_nodes(wants) if meet_nodes is not None else Plan()
        except DifferentError as error:
            others, other = self._layout.ranks, error.other
            for of, value in zip(
                (self._layout.read, self._layout.step, self._layout.mark), (other.rank, other.step, other.mark),
                strict=True,
            ):  # fmt: skip
                self._counters[of(others)] = value
            self._counters[self._layout.state(others)] = DECLINED
            raise

    def _is_agreed(self, said: bytes) -> bool:
        """Whether all ranks that have not left make their schedules from the same. Blocks for _JOIN_S at most."""
        agreed, ranks = self._layout.agreed, range(self._layout.ranks)
        self._counters[agreed(self._index)] = int.from_bytes(digest(said)[:7], "little") + 1
        self._counters[self._layout.state(self._index)] = AGREED
        if not self._wait(lambda: JOINED not in self._states(), _JOIN_S, renewed=False):
            return False
        if len({self._counters[agreed(rank)] for rank in ranks} - {0}) > 1:
            log.warning("ckptd: the ranks of this node announced different blocks: each reads by itself")
            return False
        return True

    def _share(self, plan: Plan) -> None:
        """Announces the plan to the ranks of this node."""
        self._plan, others, total = plan, self._layout.ranks, self._layout.total
        self._bitmap(others)[:] = bits_of((b for blocks in plan.comes.values() for b in blocks), total)
        self._bitmap(others, second=True)[:] = bits_of((b for blocks in plan.goes.values() for b in blocks), total)
        self._counters[self._layout.state(others)] = JOINED

    def _begin_targets(self) -> None:
        self._going = {node: self._those(blocks) for node, blocks in self._plan.goes.items()}
        with self._lock:
            self._targets = {node: blocks[0].number for node, blocks in self._going.items() if blocks}
            self._publish_targets()

    def _bitmap(self, member: int, *, second: bool = False) -> memoryview:
        return self._memory.view[self._layout.bitmap(member, second=second)]

    def _has_left(self, rank: int) -> bool:
        return self._counters[self._layout.state(rank)] in {GONE, DECLINED}

    # --- blocks

    def fill(self, one: SharedBlock, read: Callable[[Buffer], None]) -> None:
        """Calls read with a buffer for a block that this rank fills. Blocks until one is free. For threads.

        If read raises, the other members learn that they must read the block themselves, and the error is raised.
        """
        free = self._is_free(one.number - self._layout.buffers)
        with self._lock:
            if self._has_left(self._index):  # no buffer is written to any more
                return
            self._publish(one, _FILLING if free else _LOST)
        if not free:
            return
        outcome = _FAILED
        try:
            read(self._buffer(one.number))
            outcome = _GOOD
        finally:
            self._publish(one, outcome)

    def _is_free(self, before: int) -> bool:
        """Waits until no member needs block number before, the last user of the buffer, or writes to it."""

        def is_over() -> bool:
            return self._last_outcome(before) is not None and not self._pending(before)

        if not self._wait(is_over, _NODE_PATIENCE_S):
            if self._pending(before) == [self._layout.ranks]:  # the wait for other nodes is bounded
                lost = self._layout.lost(self._layout.ranks)
                self._counters[lost] = max(self._counters[lost], before + 1)
            if not self._wait(is_over, _NODE_PATIENCE_S):
                return False
        return self._last_outcome(before) != _LOST

    def _pending(self, number: int) -> list[int]:
        """Members that may still want the block."""
        position, lost = self._layout.position, self._layout.lost
        return [
            member for member in range(self._layout.members)
            if self._counters[position(member)] <= number >= self._counters[lost(member)]
        ]  # fmt: skip

    def _is_over(self, number: int) -> bool:
        """Whether the rank that fills the block has published the outcome, or never will."""
        last = self._counters[self._layout.ready(number)]
        published = last >> 2 > number + 1 or (last >> 2 == number + 1 and last & 3 != _FILLING)
        return published or self._has_left(self._schedule[number].filler)

    def _last_outcome(self, number: int) -> int | None:
        """Of the last block up to this one that a rank began to fill in its buffer; None: one may still be filled.

        Passes over the blocks of ranks that left before they began.
        """
        last = self._counters[self._layout.ready(number)] if number >= 0 else 0
        while number >= 0:
            if last >> 2 > number + 1:
                return _LOST
            if last >> 2 == number + 1 and last & 3 != _FILLING:
                return last & 3
            if not self._has_left(self._schedule[number].filler):
                return None
            if last >> 2 == number + 1:
                return _LOST
            number -= self._layout.buffers
        return _GOOD

    def _publish(self, one: SharedBlock, outcome: int) -> None:
        counter = self._layout.ready(one.number)
        if self._counters[counter] >> 2 <= one.number + 1:  # else others went on without this one
            self._counters[self._layout.content(one.number)] = one.block + 1
            self._counters[counter] = (one.number + 1) << 2 | outcome

    def take(self, one: SharedBlock) -> Buffer | None:
        """The block, checked by the rank that read it, until released; None: read it yourself. Blocks."""
        self._counters[self._layout.position(self._index)] = one.number  # earlier ones are taken, or not wanted here
        if not self._wait(lambda: self._is_over(one.number), _PATIENCE_S):
            self._given_up.set()  # from here on, alone
            return None
        return self._good(one)

    def _good(self, one: SharedBlock) -> Buffer | None:
        ready, content = self._layout.ready(one.number), self._layout.content(one.number)
        good = self._counters[ready] == (one.number + 1) << 2 | _GOOD and self._counters[content] == one.block + 1
        return self._buffer(one.number) if good else None

    def release(self, one: SharedBlock) -> None:
        """This rank has what it wants of this block and of all before it."""
        if self.is_leader:
            with self._lock:
                self._publish_targets()
        self._counters[self._layout.position(self._index)] = one.number + 1

    def leave(self) -> None:
        """This rank wants nothing more and begins to read nothing more, nor do other nodes through it.

        No member waits for them.
        """
        self._given_up.set()
        with self._lock:
            state = self._layout.state(self._index)
            self._counters[state] = GONE if self._counters[state] in {JOINED, AGREED, GONE} else DECLINED
            if self.is_leader:
                self._targets.clear()
                self._publish_targets()
        self.done()

    def done(self) -> None:
        """This rank has all it wants; it may still fill blocks that others want."""
        self._counters[self._layout.position(self._index)] = LEFT

    # --- other nodes, at the first rank

    def take_for(self, node: int, one: SharedBlock) -> Buffer | None:
        """The same as take, for a block that is sent to another node. None: no such block, or it came too late."""
        if not self._advance(node, one.number) or not self._wait(lambda: self._is_over(one.number), _PATIENCE_S):
            return None
        return self._good(one)

    def sent(self, node: int, one: SharedBlock) -> None:
        """This block is on its way to the node. After the last one the node hangs up: it has all."""
        due = self.going(node)
        at = bisect_right(due, one.number, key=lambda later: later.number)
        self._advance(node, due[at].number if at < len(due) else LEFT - 1)

    def leave_for(self, nodes: Iterable[int]) -> None:
        """The nodes want nothing more; one that asks again, soon enough, gets it."""
        with self._lock:
            self._targets |= dict.fromkeys(self._targets.keys() & set(nodes), LEFT)
            self._publish_targets()

    def broke_for(self, node: int) -> None:
        """The connection to the node is over. It delays no block; if it has not got all, it may come back at once."""
        with self._lock:
            if self._targets.get(node, LEFT) < LEFT - 1:
                self._returning[node] = time.monotonic() + _AGAIN_S
        self.leave_for([node])

    def _advance(self, node: int, number: int) -> bool:
        """Sets the node's position; False if this rank has left, or the members do not wait for the node any more."""
        with self._lock:
            late = number < self._counters[self._layout.lost(self._layout.ranks)] or self._has_left(self._index)
            self._targets[node] = LEFT if late else number
            self._returning.pop(node, None)
            self._publish_targets()
            return not late

    def _publish_targets(self) -> None:
        """Nodes for which the members do not wait any more are behind: they delay no other block."""
        lost, position = (of(self._layout.ranks) for of in (self._layout.lost, self._layout.position))
        behind = [node for node, at in self._targets.items() if at < self._counters[lost]]
        self._targets |= dict.fromkeys(behind, LEFT)
        self._counters[position] = min(self._targets.values(), default=LEFT)

    def wait_for_nodes(self) -> None:
        """Blocks until no other node gets anything from here, or comes back for it, or none advances for too long."""

        def positions() -> list[int]:
            with self._lock:
                return list(self._targets.values())

        def is_over() -> bool:
            with self._lock:
                expected = max(self._returning.values(), default=0.0)
                return min(self._targets.values(), default=LEFT) == LEFT and time.monotonic() >= expected

        while not is_over():
            before = positions()
            if not self._wait(lambda before=before: is_over() or positions() != before, _PATIENCE_S):  # type: ignore[misc]
                return

    def _buffer(self, number: int) -> Buffer:
        place = self._layout.buffer(number)
        return Buffer(self._memory.address + place.start, self._memory.view[place])

    def _wait(self, condition: Callable[[], bool], patience_s: float, *, renewed: bool = True) -> bool:
        """Whether it becomes true. renewed: the patience begins again as long as any member advances."""
        pause, deadline, seen = _PAUSES_S[0], 0.0, b""
        while not condition():
            now = time.monotonic()
            if self._given_up.is_set() or (seen and now >= deadline and not renewed):
                return False
            if now >= deadline:
                counters = self._counters.tobytes()
                if counters == seen:
                    return False
                deadline, seen = now + patience_s, counters
            time.sleep(pause)
            pause = min(2 * pause, _PAUSES_S[1])
        return True
