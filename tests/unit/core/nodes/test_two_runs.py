"""Two runs that had one incarnation number, on nodes that meet again: never mixed, never ordered, never given up."""

import pytest
from msgspec.structs import replace

from ckptd.core import actions as act
from ckptd.core import events as ev
from ckptd.core.coordinator.coordinator import Coordinator
from ckptd.core.coordinator.lineage import Lineage
from ckptd.core.policy import Policy
from ckptd.shared.base.ids import SaveId
from ckptd.shared.protocol.messages import LoadFrom, Refused, Tier
from tests.runs import OTHER_RUN, OTHER_STORE_ID, RUN, STORE_ID
from tests.unit.core.nodes.a_cluster import KEY, ONE, ACluster, Store, close, saves_at

THEIRS = SaveId(ONE.incarnation, ONE.counter, ONE.step, OTHER_RUN)


def started_over(*, durable: bool = True) -> ACluster:
    """Run RUN on a and b, its store emptied, run OTHER_RUN on c and d: one incarnation, one step, both in memory."""
    cluster = ACluster("abcd")
    cluster.connect("ab")
    cluster.stage(ONE)
    cluster.end_ranks()
    cluster.store = Store(run=OTHER_RUN)
    cluster.connect("cd")
    cluster.stage(THEIRS)
    cluster.end_ranks()
    if not durable:
        cluster.store.committed.clear()
        cluster.store.votes.clear()
    assert [held(cluster, name) for name in "abcd"] == [{ONE}, {ONE}, {THEIRS}, {THEIRS}]
    return cluster


def held(cluster: ACluster, name: str) -> set[SaveId | None]:
    return {slot.save for slot in cluster.nodes[name].slots.values()} - {None}


def test_a_node_of_the_other_run_adds_nothing_to_the_one_that_is_on_the_store():
    cluster = started_over()
    cluster.lose("c")
    cluster.connect("ad")
    answers = cluster.load()
    assert {answer.save for answer in answers} == {THEIRS}
    assert cluster.tiers == {0: Tier.PFS, 1: Tier.ARENA}
    (note,) = {note for answer in answers for note in answer.notes if "another run" in note}
    assert note.startswith("node a")
    assert RUN.hex() in note


def test_segments_of_another_run_are_neither_reused_nor_freed():
    cluster = started_over()
    cluster.lose("c")
    cluster.connect("ad")
    cluster.load()
    incarnation = cluster.nodes["a"].job.node.incarnation
    for counter in range(1, 9):
        cluster.stage(SaveId(incarnation, counter, 20 + counter, OTHER_RUN))
    assert ONE in held(cluster, "a")
    assert THEIRS not in held(cluster, "d"), "its own older saves go"
    slots = cluster.nodes["a"].job.node.slots
    assert len(slots.of_rank(0)) == 3, "they count beside the share of the rank"
    cluster.end_ranks()
    cluster.tick(1.0)
    cluster.tick(90000.0)
    cluster.tick(1.0)
    assert ONE not in held(cluster, "a"), "after orphan_ttl_s they are given up"
    told = [note for node in "a" for note in cluster.nodes[node].notes]
    assert any("other runs" in text for text in told), told


def test_where_nothing_distinguishes_them_the_load_is_refused_and_names_both():
    cluster = started_over(durable=False)
    cluster.connect("ac")
    for answer in cluster.load():
        assert isinstance(answer, Refused)
        assert RUN.hex() in answer.message
        assert OTHER_RUN.hex() in answer.message
        assert "load(state, run=" in answer.hint
    assert [held(cluster, name) for name in "ac"] == [{ONE}, {THEIRS}]


@pytest.mark.parametrize(("run", "save"), [(RUN, ONE), (OTHER_RUN, THEIRS)])
def test_the_user_decides_which_run_goes_on(run, save):
    cluster = started_over(durable=False)
    cluster.connect("abcd")
    assert all(isinstance(answer, Refused) for answer in cluster.load())
    answers = cluster.load(run=run)
    assert all(isinstance(answer, LoadFrom) and answer.save == save for answer in answers), answers


def started_over_after_a_restart() -> ACluster:
    """Run RUN had incarnations 1 and 2 on a and b; its store was emptied, and run OTHER_RUN began at 1 on c and d."""
    cluster = ACluster("abcd")
    cluster.connect("ab")
    cluster.end_ranks()
    cluster.connect("ab")
    cluster.stage(OLDER)
    cluster.end_ranks()
    cluster.store = Store(run=OTHER_RUN)
    cluster.connect("cd")
    cluster.stage(THEIRS)
    assert cluster.milestones(0, THEIRS)[-1] == "durable"
    cluster.end_ranks()
    cluster.lose("c")
    return cluster


OLDER = SaveId(2, 1, 30, RUN)


def test_a_higher_number_of_a_run_whose_store_was_emptied_hides_nothing_that_is_durable():
    """A number between those that the store gave, and that it never gave, is of another count."""
    cluster = started_over_after_a_restart()
    cluster.store.records = (ev.Recorded(1, OTHER_RUN, "s3"), ev.Recorded(3, OTHER_RUN, "s4"))
    cluster.connect("abd")
    assert cluster.store.numbers == 3
    for answer in cluster.load():
        assert isinstance(answer, Refused), answer
        assert RUN.hex() in answer.message
        assert f"load(state, run={RUN.hex()!r})" in answer.hint
    assert held(cluster, "a") == {OLDER}
    assert {answer.save for answer in cluster.load(run=OTHER_RUN)} == {THEIRS}


def test_a_number_beyond_those_that_the_last_look_saw_is_the_jobs():
    lineage = Lineage()
    lineage.held("a", [SaveId(number, 1, 10, RUN) for number in (2, 4, 9, 7_000_000)])
    lineage.on_store([], [(3, RUN), (5, RUN), (8_000_000, RUN)])
    assert [lineage.run_of(number) for number in (2, 4, 9, 7_000_000)] == [RUN, None, RUN, RUN]


def test_retention_counts_nothing_that_another_run_left_before_the_store_was_emptied():
    cluster = ACluster("abcd", keep_last=2)
    cluster.connect("ab")
    cluster.end_ranks()
    cluster.connect("ab")
    for counter in (1, 2):
        cluster.stage(SaveId(2, counter, 30 + counter, RUN))
    cluster.end_ranks()
    cluster.store = Store(run=OTHER_RUN)
    cluster.connect("cd")
    cluster.stage(THEIRS)
    cluster.end_ranks()
    cluster.lose("c")
    cluster.held = {act.RemoveCheckpoint}
    cluster.connect("ad")
    cluster.load()
    cluster.stage(SaveId(cluster.store.numbers, 1, 50, OTHER_RUN))
    assert [action.save for _, action in cluster.waiting] == []
    on_store = cluster.nodes["a"].job.coordinator.facts.on_store
    assert sorted(save.step for save in on_store) == [10, 50]


def test_a_run_that_none_has_is_refused():
    cluster = started_over()
    cluster.connect("abcd")
    for answer in cluster.load(run=bytes(range(16))):
        assert isinstance(answer, Refused)
        assert "nothing of run" in answer.message


def test_the_record_on_the_store_decides_where_nothing_is_committed():
    cluster = started_over(durable=False)
    cluster.store.records = (ev.Recorded(ONE.incarnation, RUN, "s1"),)
    cluster.connect("abcd")
    assert {answer.save for answer in cluster.load()} == {ONE}


def test_a_commit_after_a_takeover_ends_failed_and_nothing_more_is_drained():
    cluster = ACluster("ab")
    cluster.connect("ab")
    cluster.held = {act.Commit}
    cluster.stage(ONE)
    node, commit = cluster.waiting.pop()
    assert (commit.incarnation, commit.session) == (1, cluster.sid)
    cluster.held = set()
    cluster.say(node, ev.CommitEnded(job=KEY, save=ONE, nbytes=20, taken_over=7))
    cluster.settle()
    for rank in range(2):
        assert cluster.milestones(rank, ONE)[-1] == "failed"
    later = SaveId(1, 2, 20, RUN)
    cluster.stage(later)
    assert later not in cluster.store.committed


def test_a_late_commit_of_the_session_before_fences_nothing_of_the_present_one():
    cluster = ACluster("ab")
    cluster.connect("ab")
    cluster.held = {act.Commit}
    cluster.stage(ONE)
    node, _ = cluster.waiting.pop()
    cluster.held = set()
    cluster.end_ranks()
    cluster.connect("ab")
    cluster.store.committed[ONE] = 2
    cluster.say(node, ev.CommitEnded(job=KEY, save=ONE, nbytes=20, taken_over=2))
    cluster.settle()
    assert not cluster.nodes["a"].job.coordinator.saves.fence.taken_over
    cluster.load()
    later = SaveId(cluster.nodes["a"].job.node.incarnation, 1, 100, RUN)
    cluster.stage(later)
    assert later in cluster.store.committed


def test_what_was_taken_over_stays_in_memory_when_its_ranks_close():
    cluster = ACluster("ab")
    cluster.connect("ab")
    cluster.held = {act.Commit}
    cluster.stage(ONE)
    node, _ = cluster.waiting.pop()
    cluster.say(node, ev.CommitEnded(job=KEY, save=ONE, nbytes=20, taken_over=7))
    close(cluster)
    assert ONE in saves_at(cluster, "a")


class StoreAt(ACluster):
    """A cluster at whose store's path lies what ``there`` says: a store's id, or none yet."""

    def __init__(self, names: str, there: str) -> None:
        super().__init__(names)
        self.there, self.scans, self.read_only = there, list[act.ScanStore](), False

    def perform(self, node, action):
        match action:
            case act.ScanStore() if type(action) not in self.held:
                self.scans.append(action)
                if self.there and action.wanted not in ("", self.there):
                    self.say(node, ev.StoreScanned(job=KEY, after=action.after, problem="another store lies there"))
                    return
                if self.read_only and action.claim is not None:
                    self.say(node, ev.StoreScanned(job=KEY, after=action.after, problem="EROFS"))
                    return
                claimed = action.claim.incarnation if action.claim is not None else 0
                self.say(node, ev.StoreScanned(job=KEY, after=action.after, store_id=self.there, claimed=claimed))
            case act.TakeIncarnation(session=session) if not self.store.clock:
                self.there = self.there or STORE_ID
                self.store.numbers = max(self.store.numbers + 1, action.at_least)
                found = ev.IncarnationTaken(
                    job=KEY, session=session, number=self.store.numbers, run=RUN, store_id=self.there
                )
                self.say(node, found)
            case _:
                super().perform(node, action)


def test_a_scan_that_finds_no_store_is_asked_again_once_a_number_has_made_one():
    cluster = StoreAt("a", "")
    cluster.held = {act.ScanStore}
    cluster.connect("a")
    cluster.held = set()
    node, scan = cluster.waiting.pop()
    assert not scan.make
    cluster.say(node, ev.StoreScanned(job=KEY))
    cluster.settle()
    assert node.job.coordinator.saves.fence.store_id == STORE_ID
    cluster.stage(ONE)
    assert cluster.milestones(0, ONE)[-1] == "durable"


def test_a_store_that_is_not_mounted_gets_no_drain_until_it_is():
    cluster = StoreAt("a", STORE_ID)
    cluster.store.clock = 7
    cluster.there = ""
    cluster.connect("a")
    save = SaveId(7, 1, 10, RUN)
    cluster.stage(save)
    assert not cluster.nodes["a"].drained
    assert any("mounted" in note for note in cluster.nodes["a"].notes)
    cluster.there, cluster.store.clock = STORE_ID, 0
    cluster.tick(70)
    assert cluster.milestones(0, save)[-1] == "durable"


def test_a_number_of_its_own_is_on_record_before_anything_is_drained():
    """The store was silent when it was taken; a takeover could not see this session, nor what it commits."""
    cluster = StoreAt("a", STORE_ID)
    cluster.store.clock, cluster.read_only = 7, True
    cluster.connect("a")
    save = SaveId(7, 1, 10, RUN)
    cluster.stage(save)
    cluster.tick(70)
    assert cluster.scans[-1].claim == act.Claim(7, RUN, cluster.sid)
    assert not cluster.nodes["a"].drained
    cluster.read_only = False
    cluster.tick(70)
    assert cluster.milestones(0, save)[-1] == "durable"


def test_a_number_that_the_store_gives_late_to_a_session_that_is_over_fences_none():
    cluster = ACluster("a")
    cluster.connect("a")
    over = cluster.sid
    cluster.end_ranks()
    cluster.connect("a")
    assert cluster.sid != over
    incarnation = cluster.nodes["a"].job.node.incarnation
    cluster.store.records = (ev.Recorded(incarnation + 1, OTHER_RUN, over),)
    cluster.say(cluster.nodes["a"], ev.StoreScanned(job=KEY, store_id=STORE_ID, records=cluster.store.records))
    cluster.settle()
    save = SaveId(incarnation, 1, 10, RUN)
    cluster.stage(save)
    assert cluster.milestones(0, save)[-1] == "durable"
    cluster.say(cluster.nodes["a"], ev.StoreScanned(job=KEY, store_id=STORE_ID, records=(
        ev.Recorded(incarnation + 1, OTHER_RUN, "another"),
    )))  # fmt: skip
    cluster.settle()
    later = SaveId(incarnation, 2, 20, RUN)
    cluster.stage(later)
    assert "durable" not in cluster.milestones(0, later)


def test_a_daemon_that_restarts_looks_only_at_the_store_that_its_memory_was_for():
    coordinator = Coordinator(KEY, "a", Policy())
    coordinator.handle(ev.StoreRemembered(job=KEY, store_id=STORE_ID), 0.0)
    scans = [action for action in coordinator.adopted(0.0) if isinstance(action, act.ScanStore)]
    assert [(scan.remembered, scan.make) for scan in scans] == [((STORE_ID,), False)]


def test_ranks_that_come_back_tell_the_store_that_their_session_is_saved_to():
    """Other nodes may remember older ones: what lies at the path now is no proof."""
    cluster = ACluster("ab")
    cluster.connect("ab")
    cluster.held = {act.ScanStore}
    cluster.nodes["a"].restart()
    cluster.settle()
    scans = [scan for _, scan in cluster.waiting if isinstance(scan, act.ScanStore)]
    assert scans
    cluster.waiting.clear()
    coordinator = cluster.nodes["a"].job.coordinator
    assert coordinator.sessions.session == cluster.sid, "node b has told which session is the job"
    assert coordinator.sessions.scan(None).wanted == STORE_ID


def test_a_session_keeps_the_store_that_it_saw_first():
    """A scan of another one, which was under way before, is no answer."""
    cluster = ACluster("a")
    cluster.connect("a")
    cluster.say(cluster.nodes["a"], ev.StoreScanned(job=KEY, store_id=OTHER_STORE_ID))
    cluster.settle()
    cluster.stage(ONE)
    coordinator = cluster.nodes["a"].job.coordinator
    assert coordinator.sessions.store.id == STORE_ID
    assert coordinator.saves.fence.store_id == STORE_ID
    assert any("another store" in note for note in cluster.nodes["a"].notes)


@pytest.mark.parametrize("seen", ["before", "after"])
def test_ranks_that_come_back_to_a_daemon_without_memory_are_saved_to_their_own_store(seen):
    """It has looked at what lies at the path, and remembers nothing: the ranks know better."""
    cluster = ACluster("a")
    cluster.connect("a")
    cluster.nodes["a"].slots.clear()
    coordinator = Coordinator(KEY, "a", Policy())
    back = ev.NodeAttached(
        job=KEY, session=cluster.sid, peer=cluster.nodes["a"].peer, waiting=(ev.Arrival(0, 1, 1, RUN),),
        store_id=STORE_ID,
    )  # fmt: skip
    events = [ev.Report(job=KEY, node="a", event=back), ev.StoreScanned(job=KEY, store_id=OTHER_STORE_ID)]
    for event in reversed(events) if seen == "before" else events:
        coordinator.handle(event, 0.0)
    assert not coordinator.facts.ready
    coordinator.handle(ev.StoreScanned(job=KEY, store_id=STORE_ID), 0.0)
    assert coordinator.facts.ready
    assert coordinator.saves.fence.store_id == STORE_ID


def test_a_load_whose_number_is_another_sessions_too_takes_another_and_scans_again():
    cluster = ACluster("ab")
    cluster.connect("ab")
    cluster.stage(ONE)
    cluster.held = {act.ScanStore}
    asked = {rank: cluster.seq() for rank in range(2)}
    for rank, request in asked.items():
        cluster.say(cluster.node(rank), ev.LoadAsked(job=KEY, rank=rank, session=cluster.sid, request=request))
    cluster.settle()
    assert [scan.after for _, scan in cluster.waiting if isinstance(scan, act.ScanStore)][-1:] == [2]
    cluster.store.committed[SaveId(3, 1, 50, RUN)] = 2  # since this load's number was taken
    cluster.release()
    answers = [cluster.answer(rank, request) for rank, request in asked.items()]
    assert [(type(answer), answer.save.incarnation) for answer in answers] == [(LoadFrom, 3)] * 2
    assert cluster.store.numbers > 3


def test_a_run_that_was_named_is_the_jobs_also_where_its_nodes_speak_later():
    lineage = Lineage()
    lineage.begins(9, RUN)
    lineage.held("a", [SaveId(1, 1, 10, RUN)])
    lineage.name(OTHER_RUN)
    lineage.held("c", [SaveId(1, 1, 10, OTHER_RUN)])
    assert lineage.run_of(1) == OTHER_RUN
    lineage.new_session()
    assert lineage.run_of(1) is None


def test_a_rank_that_is_refused_does_not_change_which_run_the_session_has():
    cluster = ACluster("ab")
    cluster.store = Store(run=OTHER_RUN)
    cluster.connect("ab")
    cluster.stage(THEIRS)
    lineage = cluster.nodes["a"].job.coordinator.runs.lineage
    stale = replace(cluster.attached[0], request=cluster.seq(), session="old", incarnation=1, run=RUN)
    cluster.say(cluster.nodes["a"], stale)
    cluster.settle()
    assert isinstance(cluster.answer(0, stale.request), Refused)
    assert lineage.run_of(1) == OTHER_RUN
    assert lineage.is_ours(THEIRS)


def test_a_rank_that_comes_back_to_a_daemon_that_restarted_brings_its_run():
    cluster = ACluster("ab")
    cluster.connect("ab")
    cluster.stage(ONE)
    cluster.nodes["a"].restart()
    cluster.return_ranks("a")
    assert cluster.nodes["a"].job.coordinator.runs.lineage.run_of(1) == RUN
