"""Whatever the order in which ranks, daemons and messages run: all ranks save at one step, the first not below it."""

from collections import deque
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.core import events as ev
from ckptd.core.actions import AnnounceStep, HoldRanks, Note, ToNode
from ckptd.core.coordinator.members import Members
from ckptd.core.coordinator.sessions import Sessions
from ckptd.core.policy import Policy
from ckptd.core.preemption import Notice, Preemption
from ckptd.shared.format import step_board
from tests.unit.core.nodes.a_cluster import KEY

SESSION = "s"
STEPS = 12


class Board:
    """The shared page."""

    def __init__(self) -> None:
        self.step, self.word = -1, step_board.NONE


class Job:
    """Ranks in lock-step, or on their own; each yields between any two touches of its board."""

    def __init__(self, homes: list[int], strides: int, *, lock_step: bool) -> None:
        self.homes = homes
        self.boards = [Board() for _ in homes]
        self.saved: dict[int, int] = {}
        self.passed: list[int] = []
        self._stride, self._lock_step = strides, lock_step
        self._arrived = [-1] * len(homes)  # at the collective of this step

    def rank(self, rank: int) -> Iterator[None]:
        board = self.boards[rank]
        for number in range(STEPS):
            self._arrived[rank] = number
            while self._lock_step and min(self._arrived) < number:
                if any(one in self.saved for one in range(len(self.homes))):
                    return  # it would wait for a rank that has left: no two saved at one step then
                yield
            step = number * self._stride
            board.step = step
            yield
            word = board.word
            while (answer := step_board.verdict(step, word)) is None:
                yield
                word = board.word
            if answer:
                self.saved[rank] = step
                return
            yield


class Daemons:
    """Nodes and the coordinator on node 0; messages between them arrive in order, when they are let."""

    def __init__(self, job: Job) -> None:
        self.job = job
        names = [f"n{home}" for home in sorted(set(job.homes))]
        self.sessions = Sessions(KEY, names[0], Policy())
        self.sessions.session = SESSION
        self.sessions.members = Members({rank: f"n{home}" for rank, home in enumerate(job.homes)})
        self.preemption = Preemption(KEY, names[0])
        self.notices = {name: Notice(KEY) for name in names}
        self.queues: dict[str, deque[object]] = {name: deque() for name in [*names, "coordinator"]}

    def ask(self) -> None:
        event = ev.PreemptAsked(job=KEY, why="SIGTERM")
        self._perform(self.preemption.asked(event, self.sessions, 0.0))

    def _perform(self, actions: list[object]) -> None:
        for action in actions:
            if isinstance(action, ToNode):
                self.queues[action.node].append(action.message)
            else:
                assert isinstance(action, Note), action

    def run(self, name: str) -> Iterator[None]:
        """One node, or the coordinator: takes what has arrived, for ever."""
        while True:
            while not self.queues[name]:
                yield
            message = self.queues[name].popleft()
            if name == "coordinator":
                node, fact = message
                passed = isinstance(fact, ev.PreemptAsked)
                told = self.preemption.asked(fact, self.sessions, 0.0) if passed else self.preemption.read(node, fact)
                self._perform(told)
                continue
            mine = tuple(rank for rank, home in enumerate(self.job.homes) if f"n{home}" == name)
            for action in self.notices[name].ordered(message, mine):
                yield from self._touch(name, action)

    def _touch(self, name: str, action: HoldRanks | AnnounceStep) -> Iterator[None]:
        boards = [self.job.boards[rank] for rank in action.ranks]
        if isinstance(action, AnnounceStep):
            for board in boards:
                board.word = step_board.at(action.step)
                yield
            return
        fixed = next((step_board.announced(b.word) for b in boards if step_board.announced(b.word) is not None), None)
        for board in boards:
            if step_board.announced(board.word) is None:
                board.word = step_board.HOLD
            yield
        highest = -1
        for board in boards:
            highest = max(highest, board.step)
            yield
        read = ev.StepsRead(job=KEY, session=SESSION, highest=highest, fixed=fixed)
        self.queues["coordinator"].append((name, self.notices[name].heard(read)))


@settings(max_examples=120, deadline=None)
@given(
    homes=st.lists(st.integers(0, 2), min_size=1, max_size=5),
    stride=st.sampled_from([1, 1, 7]),
    lock_step=st.booleans(),
    data=st.data(),
)
def test_all_ranks_save_at_one_step(homes, stride, lock_step, data):
    homes = [0, *homes[1:]]
    job = Job(homes, stride, lock_step=lock_step)
    daemons = Daemons(job)
    runs = {f"rank {rank}": job.rank(rank) for rank in range(len(homes))}
    helpers = {name: daemons.run(name) for name in daemons.queues}
    when = data.draw(st.integers(0, 40), label="asked after")
    turns = data.draw(st.lists(st.integers(0, 1 << 16), max_size=200), label="turns")
    for turn in range(20_000):
        if turn == when:
            daemons.ask()
        if not runs:
            break
        everyone = [*runs, *helpers]
        number = turns[turn] if turn < len(turns) else turn
        name = everyone[number % len(everyone)]
        if name in helpers:
            next(helpers[name])
        elif next(runs[name], "over") == "over":
            del runs[name]
    assert not runs, f"stuck: {sorted(runs)}"
    assert len(set(job.saved.values())) <= 1, job.saved
    fixed = daemons.preemption.step
    if job.saved:
        assert len(job.saved) == len(homes), f"only {job.saved} of {len(homes)} at {fixed}"
        assert min(job.saved.values()) >= fixed
        assert min(job.saved.values()) - fixed < stride


@pytest.mark.parametrize("word", [step_board.NONE, step_board.HOLD, step_board.at(0), step_board.at(1 << 40)])
def test_a_word_that_is_half_written_is_none_that_counts(word):
    whole = step_board.encode_word(word)
    assert step_board.decode_word(whole) == word
    for old in (bytes(16), step_board.encode_word(step_board.HOLD), step_board.encode_word(step_board.at(77))):
        for cut in range(1, 16):
            torn = step_board.decode_word(whole[:cut] + old[cut:])
            assert torn in {word, step_board.decode_word(old), step_board.HOLD}
