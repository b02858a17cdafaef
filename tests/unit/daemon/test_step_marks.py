"""The steps of ranks, from their boards to the journal: real boards, looked at by a clock of the test."""

import os

import pytest

from ckptd.core import actions as act
from ckptd.core import events as ev
from ckptd.daemon import step_marks
from ckptd.daemon.step_marks import PERIOD_S, StepMarks
from ckptd.shared.base.ids import SaveId
from ckptd.shared.format import arena_paths, step_board
from ckptd.shared.protocol import journal as log
from ckptd_client._preempt.step_board import StepBoard
from tests.runs import RUN
from tests.unit.core.a_job import KEY, AJob


class Clock:
    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now


class Node:
    """A job of two ranks that have joined here, and what was delivered of their steps."""

    def __init__(self, arena, clock):
        self.job = AJob().start()
        self.clock = clock
        self.folder = os.path.join(arena, arena_paths.job_dir(KEY))
        os.makedirs(self.folder)
        self.delivered = []
        self.marks = StepMarks(arena, self.job.catalogue, self.deliver)

    def deliver(self, event):
        self.delivered.append(event)
        self.job.say(event)

    def path(self, rank):
        return os.path.join(self.folder, arena_paths.steps_name(rank, "a"))

    def after(self, seconds):
        self.clock.now += seconds
        self.marks.tick()

    @property
    def steps(self):
        return [(event.step, event.ago_s) for event in self.delivered]

    @property
    def records(self):
        kept = [one for one in self.job.of(act.KeepEntry) if isinstance(one.entry, log.Steps)]
        return [(one.entry.step, one.ago_s) for one in kept]


@pytest.fixture
def node(tmp_path, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(step_marks, "time", clock)
    return Node(str(tmp_path), clock)


def write(board, step, at):
    """As the rank does, at a time of the test's clock."""
    board._numbers[step_board.MARK_OFFSET // 8 + 1] = int(at * 1e9)
    board._numbers[step_board.MARK_OFFSET // 8] = step + 1


def test_the_newest_step_of_the_ranks_is_on_record_once(node):
    boards = [StepBoard(node.path(rank)) for rank in range(2)]
    node.after(0.0)
    assert node.steps == [], "no rank has reported one"
    write(boards[0], 7, node.clock.now + 10)
    write(boards[1], 6, node.clock.now + 12)
    node.after(PERIOD_S - 1)
    assert node.steps == [], "it is not time yet"
    node.after(1.0)
    assert node.steps == node.records == [(7, 20.0)]
    node.after(PERIOD_S)
    assert len(node.steps) == 1, "nothing is new"
    write(boards[1], 9, node.clock.now)
    node.marks.look()
    assert node.records[1:] == [(9, 0.0)]
    for board in boards:
        board.close()


def test_what_a_rank_itself_writes_is_what_is_read(node, monkeypatch):
    board = StepBoard(node.path(0))
    board.reached(41)
    with open(node.path(0), "rb") as file:
        step, at = step_board.decode_mark(file.read()[step_board.MARK_OFFSET :])
    assert step == 41
    monkeypatch.undo()
    assert 0 <= step_marks.time.monotonic() - at < 60
    assert board.word() == step_board.NONE, "it is no part of a preemption"
    board.close()


@pytest.mark.parametrize("what", ["nothing", "short", "pipe", "link", "directory"])
def test_what_is_no_board_is_passed_over(node, what, tmp_path):
    path = node.path(0)
    match what:
        case "short":
            with open(path, "wb") as file:
                file.write(b"x" * 20)
        case "pipe":
            os.mkfifo(path)
        case "link":
            board = StepBoard(str(tmp_path / "elsewhere"))
            board.reached(5)
            board.close()
            os.symlink(tmp_path / "elsewhere", path)
        case "directory":
            os.mkdir(path)
    board = StepBoard(node.path(1))
    write(board, 3, node.clock.now)
    node.after(PERIOD_S)
    assert node.steps == [(3, PERIOD_S)]
    board.close()


def test_without_ranks_nothing_is_due_and_nothing_is_read(node):
    assert node.marks.next_deadline() is not None
    board = StepBoard(node.path(0))
    write(board, 3, node.clock.now)
    for rank in range(2):
        node.job.detach(rank)
    node.after(PERIOD_S)
    assert node.steps == []
    assert node.marks.next_deadline() is None
    board.close()


def test_steps_of_another_session_are_not_on_record(node):
    node.job.say(ev.StepReached(job=KEY, session="b", step=3))
    assert node.records == []


def test_a_load_knows_the_steps_that_no_save_has(node):
    """They are lost, and counted as that."""
    save = SaveId(1, 1, 10, RUN)
    node.job.stage_all(save)
    node.job.drain(save)
    node.job.say(ev.StepReached(job=KEY, session="a", step=14, ago_s=1.0))
    node.job.take()
    for rank in range(2):
        node.job.ask_load(rank)
    node.job.number(2)
    node.job.scan(save)
    node.job.report_both(save)
    kept = [one.entry for one in node.job.of(act.KeepEntry)]
    (restored,) = (entry for entry in kept if isinstance(entry, log.Restored))
    assert (restored.step, restored.newest) == (10, 14)
