"""What other runs left is given up by run: each has all of its time, and none goes that is in dispute."""

from msgspec.structs import replace

from ckptd.core import actions as act
from ckptd.core import events as ev
from ckptd.core.node.node import JobNode
from ckptd.core.policy import Policy
from ckptd.shared.base.ids import SaveId
from tests.runs import OTHER_RUN, RUN
from tests.seals import a_seal
from tests.unit.core.nodes.a_cluster import KEY
from tests.unit.core.nodes.test_two_runs import ONE, THEIRS, held, started_over

OLDER, NEWER = SaveId(1, 1, 1, RUN), SaveId(2, 1, 1, OTHER_RUN)
TTL = Policy().orphan_ttl_s


def a_node() -> JobNode:
    node = JobNode(KEY, "a", Policy())
    for rank, save in enumerate((OLDER, NEWER)):
        adopted = ev.SlotAdopted(job=KEY, rank=rank, slot=f"slot-{rank}", capacity=9, world_size=2)
        node.handle(replace(adopted, save=save, nbytes=9, seal=a_seal(KEY, save, rank, 2)))
    return node


def isolate(node: JobNode, *saves: SaveId, disputed: tuple[SaveId, ...] = ()) -> None:
    runs, open_ones = (tuple(save.owner for save in of) for of in (saves, disputed))
    node.handle(ev.ForeignRuns(job=KEY, node="a", runs=runs, disputed=open_ones))


def unlinked(actions: list[act.Action]) -> list[str]:
    return [action.slot for action in actions if isinstance(action, act.UnlinkSlot)]


def test_each_run_has_all_of_its_time():
    node = a_node()
    isolate(node, OLDER)
    assert not unlinked(node.tick(0.0))
    isolate(node, OLDER, NEWER)
    assert not unlinked(node.tick(TTL - 1))
    assert unlinked(node.tick(TTL)) == ["slot-0"]
    assert node.foreign.until == TTL - 1 + TTL
    assert unlinked(node.tick(TTL - 1 + TTL)) == ["slot-1"]
    assert node.foreign.until is None


def test_the_time_of_a_run_begins_when_its_dispute_ends():
    node = a_node()
    isolate(node, OLDER, disputed=(OLDER,))
    for now in (0.0, TTL, 3 * TTL):
        assert not node.foreign.too_old(now)
    assert node.foreign.until is None
    isolate(node, OLDER)
    assert not node.foreign.too_old(4 * TTL)
    assert node.foreign.too_old(5 * TTL) == {OLDER.owner}


def test_runs_in_dispute_are_never_given_up():
    cluster = started_over(durable=False)
    cluster.connect("ac")
    cluster.load()
    cluster.end_ranks()
    for seconds in (1.0, TTL + 1, TTL + 1):
        cluster.tick(seconds)
    assert [held(cluster, name) for name in "ac"] == [{ONE}, {THEIRS}]
