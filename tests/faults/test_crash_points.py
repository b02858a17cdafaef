"""Every crash point of the list: the daemon or its worker dies there by SIGKILL, and every promise still holds."""

import contextlib
import glob
import itertools
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from ckptd.checkpoint.verify import verify_path
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.format import arena_paths
from ckptd.shared.format.committed import TRASH_PREFIX
from ckptd.shared.protocol.messages import End, Milestone, Progress
from ckptd.store.posix.scan import scan
from ckptd.system import failpoints
from ckptd.system.files import FileLayer
from ckptd_client._local.save_record import SaveRecord
from tests.cluster import Node, wait_for
from tests.faults.ranks import JOB, SAVE_TIMEOUT_S, Ranks, told
from tests.runs import RUN

pytestmark = [pytest.mark.faults, pytest.mark.timeout(180)]

KEEP = 2
NBYTES = 256 << 10  # of a rank's state, apart from the boxes
BOXES = 2  # of one tensor on each rank, so that each image is that many files
FLAGS = ("--keep-last", str(KEEP), "--log-level", "debug")
FIRST_STEPS = (10, 20, 30)  # saved before the daemon is armed in the long form's second ordering
STEP, EACH = 40, 50  # the first step that is saved with a daemon armed, and how many steps later the next one is
# What a node by itself comes to. Of others: tests/unit/parity, tests/unit/checkpoint/test_repair.py, test_reduce.py. Of
# the index, which one vote has not: tests/faults/nodes/test_two_lost.py, tests/faults/nodes/test_loss.py.
_ELSEWHERE = ("encode.", "rebuild.", "repair.", "publish.", "drop.", "commit.index-")
POINTS = tuple(p for p in failpoints.POINTS if not p.startswith(_ELSEWHERE))
WORKER = tuple(p for p in POINTS if not p.startswith("stage.") and "durable-told" not in p)
LONG = os.environ.get("FAULTS") == "long"
AT_MOST = 6  # points in the life of one job


class Death(NamedTuple):
    """At which points, of whom, with how many ranks, and whether the store holds checkpoints before the first one."""

    points: tuple[str, ...]
    dies: str
    world: int
    warm: bool

    def __str__(self) -> str:
        return "-".join([*dict.fromkeys((self.points[0], self.points[-1])), self.dies, str(self.world), str(self.warm)])


def _victim(point: str) -> str:
    """In the short form: the worker alone at half of its points, else the daemon with it."""
    number = POINTS.index(point)
    return "worker" if point in WORKER and number % 4 in (1, 2) else "both"


def _short() -> Iterator[Death]:
    """Each point once: a few of them in the life of one job, one death after the other."""
    for dies, worlds in (("worker", (1, 1)), ("both", (2, 1))):
        points = [point for point in POINTS if _victim(point) == dies]
        for number, first in enumerate(range(0, len(points), AT_MOST)):
            yield Death(tuple(points[first : first + AT_MOST]), dies, worlds[number % 2], warm=number % 2 == 0)


def _long() -> Iterator[Death]:
    """Each point with all else that can differ, in a job of its own."""
    for point, dies, world, warm in itertools.product(POINTS, ("worker", "both"), (1, 2), (False, True)):
        if point in WORKER or dies == "both":
            yield Death((point,), dies, world, warm)


CASES = list(_long() if LONG else _short())


class Store:
    """What a stranger sees in the job's directory."""

    def __init__(self, root: str) -> None:
        self.key = JobKey(root, JOB)
        self.path = os.path.join(root, JOB)

    def committed(self) -> list[int]:
        """Steps, oldest first."""
        return sorted(entry.committed.save.step for entry in scan(FileLayer(), self.key).committed)

    def check(self) -> None:
        """Nothing unfinished is offered, and each digest of what is offered matches. For when nobody writes."""
        if not os.path.isdir(self.path):
            return
        found = scan(FileLayer(), self.key)
        assert found.problems == []
        finals = {entry.dirname for entry in found.committed}
        offered = set(glob.glob("**/*.safetensors", root_dir=self.path, recursive=True))
        homes = {path.partition(os.sep)[0] for path in offered}
        if os.path.islink(os.path.join(self.path, "latest")):
            assert os.readlink(os.path.join(self.path, "latest")) in finals
        assert homes - {"latest"} == finals
        visible = {name for name in os.listdir(self.path) if not name.startswith(".")}
        assert visible - {"latest"} == finals
        assert verify_path(self.path).problems == []

    def leftovers(self) -> list[str]:
        """Hidden directories that should go."""
        return [name for name in os.listdir(self.path) if ".partial-" in name or name.startswith(TRASH_PREFIX)]


class Case:
    """A part of a job's life, with one death at one point."""

    def __init__(self, node: Node, point: str, dies: str, marker: str, step: int) -> None:
        self.node, self.point, self.dies, self.marker = node, point, dies, marker
        self.steps = tuple(range(step, step + EACH - 10, 10))
        self.store = Store(node.store)
        self.deaths = 0
        self.pid = 0

    def arm(self) -> None:
        """A daemon that will die, or whose worker will."""
        self.pid = self.node.start(*FLAGS, CKPTD_FAILPOINT=f"{self.point}@{self.marker}").pid

    def watch(self, ranks: Ranks, timeout_s: float = 120.0) -> list:
        """The results of what the ranks were started on; a daemon that dies meanwhile is followed by another."""
        deadline = time.monotonic() + timeout_s
        while not ranks.done:
            assert time.monotonic() < deadline, "the ranks are stuck"
            self._follow()
            time.sleep(0.005)
        return ranks.results()

    def _follow(self) -> None:
        if self.deaths or not os.path.exists(self.marker):
            return
        if self.dies == "both" and self.node.daemon.poll() is None:
            self.node.daemon.send_signal(signal.SIGKILL)
        if self.dies == "both":
            assert self.node.daemon.wait(60) == -signal.SIGKILL
            self.store.check()
            self.node.start(*FLAGS)
        self.deaths += 1

    def saves(self, ranks: Ranks, steps: Sequence[int]) -> None:
        """Saves of the steps, the middle two without a pause; each ends somewhere, the last one well."""
        for step in steps:
            ranks.start("save", step)
            self.watch(ranks)
            if step != steps[1]:
                for each in [step] if step != steps[2] else steps[1:3]:
                    self._settle(ranks, each)
        assert {rank.call("handle", steps[-1])[:2] for rank in ranks.all} == {("durable", "durable")}

    def _settle(self, ranks: Ranks, step: int) -> None:
        ranks.start("settle", step)
        for milestone, end, reason in self.watch(ranks):
            if end not in ("durable", "superseded"):  # a restart that takes long may cost a save, but no staged one
                assert (milestone, end in ("failed", "skipped", "abandoned")) == (None, True), (milestone, end, reason)
                assert self.deaths, reason
        ranks.start("steps")  # brings a rank back that gave its daemon up
        self.watch(ranks)


def newest(history: list, milestone: str) -> int:
    """The newest step whose handle said that the milestone was reached; -1 for none."""
    reached = {"staged": ("staged", "durable"), "durable": ("durable",)}[milestone]
    return max((step for step, said, _ in history if said in reached), default=-1)


def restore(ranks: Ranks, *, at_least: int, tier: str) -> int:
    """A fresh start of the job gets back, bit for bit, a step that is new enough."""
    ranks.call("divide", BOXES)
    ranks.call("connect")
    found = ranks.call("load")
    assert all(f is not None and f["intact"] and f["step"] >= at_least for f in found), (found, at_least)
    assert {f["tier"] for f in found} == {tier}, found
    assert len({f["step"] for f in found}) == 1, found
    return found[0]["step"]


@pytest.mark.parametrize("death", CASES, ids=str)
def test_a_death_at_this_point_breaks_no_promise(tmp_path: Path, death: Death):
    store, world = tmp_path / "store", death.world
    store.mkdir()
    with told(str(store)) as node, contextlib.ExitStack() as started:
        ranks = started.enter_context(Ranks(node, world, nbytes=NBYTES))
        ranks.call("divide", BOXES)
        for number, point in enumerate(death.points):
            case = Case(node, point, death.dies, str(tmp_path / f"marker-{number}"), STEP + EACH * number)
            run_through_the_death(case, ranks, warm=death.warm, first=number == 0)
            history = [news for rank in ranks.call("history") for news in rank]
            if world > 1:
                ranks.call("close")  # the job goes on to its end; with one rank it crashes
            ranks.kill()
            assert os.path.exists(case.marker), f"{point} was not reached"
            staged, durable = newest(history, "staged"), newest(history, "durable")
            assert durable == case.steps[-1]
            assert case.store.committed()[-1] >= durable
            ranks = started.enter_context(Ranks(node, world, nbytes=NBYTES))
            restore(ranks, at_least=staged, tier="arena" if world == 1 else "pfs")
            leaves_nothing(case, ranks)
        node.lose_arena() if node.stop() == 0 else pytest.fail(node.log_text())
        node.start(*FLAGS)
        ranks = started.enter_context(Ranks(node, world, nbytes=NBYTES))
        assert restore(ranks, at_least=durable, tier="pfs") == case.steps[-1] + 10


def run_through_the_death(case: Case, ranks: Ranks, *, warm: bool, first: bool) -> None:
    """Saves until all is durable again. The daemon is armed from the beginning, or once it has some checkpoints."""
    if first and warm:
        case.node.start(*FLAGS)
    elif first:
        case.arm()
    ranks.start("connect")
    case.watch(ranks)
    ranks.start("load")
    case.watch(ranks)
    if first and warm:
        case.saves(ranks, FIRST_STEPS)
    if warm or not first:
        assert case.node.stop() == 0
        case.arm()
    case.saves(ranks, case.steps)
    if case.dies == "worker":
        assert case.node.daemon.pid == case.pid, "the daemon goes on by itself"
        assert case.node.daemon.poll() is None


def leaves_nothing(case: Case, ranks: Ranks) -> None:
    """One more checkpoint, then close: no slot, no partial, no old checkpoint beyond the last two."""
    stalls = ranks.call("save", case.steps[-1] + 10)
    assert max(stalls) <= SAVE_TIMEOUT_S
    ranks.call("wait", case.steps[-1] + 10)
    ranks.call("close")
    wait_for(lambda: case.node.slots() == [])
    wait_for(lambda: case.store.leftovers() == [] and len(case.store.committed()) == KEEP, every_s=0.05)
    wait_for(lambda: not os.listdir(os.path.join(case.node.arena, arena_paths.JOBS)))
    case.store.check()


def test_a_save_that_was_staged_is_never_called_abandoned():
    """A daemon that dies between freeing two slots of a superseded save leaves the next one half of it."""
    handle = SaveRecord(SaveId(1, 1, 1, RUN), lambda _: None)
    handle.hear(Progress(save=handle.save_id, milestone=Milestone.STAGED))
    handle.hear(Progress(save=handle.save_id, end=End.ABANDONED, reason="step 2 was staged by all ranks first"))
    assert (handle.milestone, handle.end) == ("staged", "superseded")


def test_the_list_that_was_walked_is_the_whole_list():
    assert {point for death in CASES for point in death.points} == set(POINTS)
    alone = {point for death in CASES if death.dies == "worker" for point in death.points}
    assert alone == set(WORKER) if LONG else set() < alone < set(WORKER)
