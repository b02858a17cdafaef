"""The pure parts of the campaigns: what they do, what they call a finding, what they hold the daemons to."""

import time

import pytest
from msgspec.structs import replace

from ckptd.shared.protocol import journal as log
from ckptd.shared.protocol.messages import End
from tests.faults.campaigns import Answer, OverdueError, no_longer_than
from tests.faults.event_logs import Told, diary_of, lines_of, told_in
from tests.faults.history_plan import NODES, RANKS, history
from tests.faults.journal_claims import Known, Loaded, lies, nbytes_of_saves
from tests.faults.kill_plan import HOMES, KINDS, rounds
from tests.faults.promises import Promises
from tests.faults.verdicts import Facts, judge

SAVED = frozenset({(1, 0), (1, 1), (2, 0), (2, 1)})


# --- histories


def test_a_seed_has_one_history():
    assert history(7) == history(7)
    assert len({str(history(seed)) for seed in range(50)}) == 50


def test_histories_start_on_nodes_that_are_up():
    for seed in range(300):
        up = set(NODES)
        for event in history(seed).events:
            if event.name == "start":
                assert set(event.nodes) <= up, f"seed {seed}"
                assert len(set(event.nodes)) == RANKS
            up -= set(event.nodes) if event.name == "off" else set()
            up |= set(event.nodes) if event.name in {"on", "lose"} else set()


def test_a_store_is_unmounted_before_it_is_back():
    for seed in range(300):
        names = [event.name for event in history(seed).events if event.name in {"unmount", "remount"}]
        assert names == ["unmount", "remount"] * (len(names) // 2) + ["unmount"] * (len(names) % 2), f"seed {seed}"


def test_a_user_starts_over_when_no_rank_lives_and_only_an_older_run_lingers():
    for seed in range(300):
        living = []
        for event in history(seed).events:
            assert event.name != "start-over" or not living, f"seed {seed}"
            assert event.name != "linger" or event.nodes in living[:-1], f"seed {seed}"
            if event.name == "start":
                living.append(event.nodes)
            elif event.name == "end":
                living = []
            elif event.name in {"off", "lose"}:  # ranks there end, and with them their run
                living = [homes for homes in living if event.nodes not in homes]


def test_every_event_is_in_some_history():
    found = {event.name for seed in range(100) for event in history(seed).events}
    assert found == {"start", "linger", "end", "crash", "off", "on", "lose", "start-over", "unmount", "remount"}
    assert any(event.takeover for seed in range(100) for event in history(seed).events)


# --- verdicts


def got(*marks: tuple[int, int, int], step: int = 1, tier: str = "arena", intact: bool = True) -> Answer:
    """What a rank says that loaded bytes with these (run, rank, step)."""
    return Answer({"step": step, "tier": tier, "notes": [], "marks": [list(mark) for mark in marks], "intact": intact})


FAILED = Answer(kind="RestoreError", text="RestoreError: step 1: no node that answers has what rank 1 saved")
VERDICTS = {
    "good": [got((1, 0, 1)), got((1, 1, 1), tier="pfs")],
    "none": [Answer(), Answer()],
    "error": [FAILED, FAILED],
    "unnamed": [Answer(kind="RestoreError", text="it failed"), FAILED],
    "stuck": [Answer(kind="stuck"), FAILED],
    "split": [FAILED, got((1, 1, 1))],
    "mixed": [got((1, 0, 1)), got((2, 1, 1))],
}
SEEN = [
    *VERDICTS.items(),
    ("unnamed", [Answer(kind="TypeError", text="TypeError: step 1 of rank 1")] * 2),
    ("split", [Answer(), got((1, 1, 1))]),
    ("mixed", [got((1, 0, 1)), got((1, 1, 0))]),
    ("mixed", [got((1, 0, 1), (2, 0, 1)), got((1, 1, 1))]),
    ("torn", [got((1, 0, 1)), got((1, 0, 1))]),
    ("torn", [got((1, 0, 1), step=0), got((1, 1, 1))]),
    ("torn", [got((1, 0, 1), intact=False), got((1, 1, 1))]),
    ("torn", [got((3, 0, 1)), got((3, 1, 1))]),
]


@pytest.mark.parametrize(("kind", "said"), SEEN)
def test_what_ranks_say_has_a_verdict(kind: str, said: list[Answer]):
    verdict = judge(said, Facts(SAVED))
    assert verdict.kind == kind, verdict
    assert verdict.is_finding == (kind not in {"good", "none", "error"})


def test_an_older_checkpoint_than_was_promised_is_stale_and_none_is_a_loss():
    said = VERDICTS["good"]
    assert judge(said, Facts(SAVED, frozenset({(1, 1)}))).kind == "good"
    assert judge(said, Facts(SAVED, frozenset({(2, 0)}))).kind == "stale"
    assert judge(VERDICTS["none"], Facts(SAVED, frozenset({(1, 0)}))).kind == "lost"


# --- disturbances and promises


def test_a_seed_has_so_many_disturbances_of_every_kind():
    assert rounds(3, 25) == rounds(3, 25)
    for seed in range(100):
        planned = [one for each in rounds(seed, 25) for one in each.disturbances]
        assert len(planned) == 25
        assert {one.kind for one in planned} <= set(KINDS)
        assert all(one.victim in (*NODES[:3], *map(str, range(len(HOMES))), "") for one in planned)
    assert {one.kind for each in rounds(0, 500) for one in each.disturbances} == set(KINDS)


def test_a_lost_node_takes_what_is_staged_and_another_what_is_protected():
    promises = Promises()
    promises.told([Told(1, 3, "durable"), Told(1, 5, "staged"), Told(1, 4, "protected")])
    assert promises.floor == (1, 5)
    promises.node_lost()
    assert promises.floor == (1, 4)
    promises.node_lost()
    assert promises.floor == promises.durable == (1, 3)


def test_what_a_load_gives_from_memory_is_staged_again_and_a_newer_run_outranks_a_higher_step():
    promises = Promises()
    promises.told([Told(1, 9, "protected")])
    promises.node_lost()
    promises.loaded((1, 9), ["arena", "rebuilt"])
    promises.told([Told(2, 4, "staged")])
    assert promises.floor == (2, 4)
    promises.node_lost()
    assert promises.floor is None
    promises.loaded((1, 9), ["arena", "pfs"])
    assert promises.floor is None


def test_a_diary_that_was_cut_short_is_read_up_to_there(tmp_path):
    with open(diary_of(str(tmp_path), 3, 1), "w", encoding="utf-8") as file:
        file.write('[5, "staged", null]\n[6, null, "failed"]\n{"step": 6, "stall_s": 0.1}\n[7, "dur')
    assert told_in(str(tmp_path)) == {Told(3, 5, "staged")}
    assert [(run, rank) for run, rank, _ in lines_of(str(tmp_path), 3)] == [(3, 1)] * 3
    assert told_in(str(tmp_path), 2) == set()


def test_what_takes_too_long_is_ended():
    with pytest.raises(OverdueError), no_longer_than(0.05):
        time.sleep(10)


# --- journals

RUN = log.RunBegan(at=10.0, incarnation=4, run=b"r" * 16, world_size=4, nodes=3, coordinator="a")
STAGED = log.Staged(at=11.0, counter=2, step=8, nbytes=100, seconds=0.5)
DURABLE = log.Durable(at=13.0, counter=2, seconds=2.0, drain_s=1.0, nbytes=100)
OLDER = replace(DURABLE, counter=9, incarnation=3)
SKIPPED = log.Ended(at=14.0, counter=3, step=9, end=End.SKIPPED, reason="no slot")
RESTORED = log.Restored(at=10.5, incarnation=3, counter=9, step=7, seconds=0.1, tiers={"arena": 3, "pfs": 1})
LOST = log.Lost(at=15.0, node="a", what="ranks", ranks=2)
ENDED = log.RunEnded(at=16.0, how="lost")
TRUE = [RUN, RESTORED, OLDER, STAGED, log.Protected(at=12.0, counter=2, seconds=1.0), DURABLE, SKIPPED, LOST, ENDED]


def told_of(entries, stored=((3, 9), (4, 2))):
    known = Known(HOMES, "abc", since=9.0, steps={3: {7}, 4: {8, 9}}, loads={4: Loaded(3, 7, {"arena": 3, "pfs": 1})})
    return lies(entries, known, frozenset(stored), 2, now=20.0)


def test_a_journal_that_is_true_has_no_lies():
    assert told_of(TRUE) == []
    assert told_of([*TRUE, replace(DURABLE, counter=1)], stored=[(4, 2), (4, 3)]) == [], "retention has removed that"
    nbytes, saves = nbytes_of_saves(TRUE)
    assert saves == 3
    assert 0 < nbytes < 200 * saves


UNTRUE = {
    "a save that nobody saved": replace(STAGED, counter=5, step=10),
    "a save of a run that saved nothing": replace(OLDER, incarnation=2),
    "two steps of one save": replace(STAGED, step=9),
    "durable, and not on the store": replace(DURABLE, counter=4),
    "ended as durable": replace(SKIPPED, end=End.DURABLE),
    "another checkpoint than the ranks got": replace(RESTORED, incarnation=4, step=8),
    "ranks read elsewhere": replace(RESTORED, tiers={"arena": 4}),
    "a run that was killed has closed": replace(ENDED, how="closed"),
    "more ranks than the node has": replace(LOST, ranks=3),
    "a node that is none of the job's": replace(LOST, node="d"),
    "an arena that nobody lost": replace(LOST, what="arena", ranks=0),
    "before it began": replace(STAGED, at=1.0),
    "later than now": replace(STAGED, at=21.0),
    "of another job": replace(RUN, world_size=2),
}


@pytest.mark.parametrize("untrue", UNTRUE.values(), ids=UNTRUE)
def test_a_record_that_is_not_true_is_noticed(untrue: log.Entry):
    assert len(told_of([*TRUE, untrue])) == 1


def test_a_record_before_any_run_is_noticed():
    assert told_of([STAGED]) != []
