"""What is not safe, and its words: each rule finds its case, and nothing where the case is not given."""

import json

import msgspec
import pytest

from ckptd.cli.view.unsafe import RULES, judged, unsafe
from ckptd.shared.protocol.status import DamageStatus, PaceStatus, RestoreStatus, ScrubStatus, WorkerStatus
from tests.unit import a_status

FOUR = {"scheme": "xor", "set_size": 4, "coordinator": "node00", "drain": None, "errors": [], "pace": None}
ALIVE = [a_status.rank(number) for number in range(4)]
DURABLE = a_status.checkpoint(1100, "durable", "durable", end="durable", tiers=["pfs"])
STAGED = a_status.checkpoint(1300, "kept", "staged", end="kept")
PROTECTED = a_status.checkpoint(1200, "kept", "protected", end="kept", protected=True)
CALLS = "waits for ranks 4-7: every rank must call save; ranks 4-7 are pids 1-4 on node01"
WAITING = a_status.checkpoint(
    1350, "staging", ranks=12, age_s=42.0, reason=CALLS, missing=[(4, 7)], tiers=[], milestone=None
)
PACE = PaceStatus(save_every_s=20.0, save_every_steps=50, drain_s=34.0, drain_bytes_per_s=1e9, outrun=12)


def a_job(**changes):
    values = {"ranks": ALIVE, "checkpoints": [STAGED, DURABLE], "nodes": [a_status.node(n) for n in range(4)]}
    return a_status.job(**values | FOUR | changes)


def found(*workers, **changes):
    job = a_job(**changes)
    return unsafe(a_status.status(jobs=[job], workers=list(workers), errors=[]))


def lost(*numbers):
    return [a_status.node(n, reachable=n not in numbers) for n in range(4)]


def failing(error, **changes):
    return a_status.drain(last_error=error, attempt=4, retry_in_s=8.0, **changes)


HUNG = WorkerStatus(store=a_status.STORE, pid=7, busy=1, idle_s=45.0)
ENDED = [a_status.rank(0), a_status.rank(1, alive=False)]
NONE_RUN = [a_status.rank(n, alive=False) for n in range(2)]
LOADING = RestoreStatus(phase="collecting", seconds=42.0, step=None, ranks=15, missing=[(5, 5)])
NO_SLOT = a_status.checkpoint(1350, "skipped", end="skipped", reason="rank 3: no slot for 10 s", tiers=[])
LONE = "redundancy xor protects nothing: all ranks run on one node; run the job on 2 nodes or more"


def scrubbed(*tiers):
    """Damage that a scrub could not make good."""
    bad = [DamageStatus(node="node02", tier=tier, step=1200, rank=3, what="block 7 is bad") for tier in tiers]
    return ScrubStatus(
        memory_nbytes=1, memory_age_s=None, store_nbytes=0, store_age_s=None, found=2, mended=0, damaged=bad
    )


CASES = {
    "no_coordinator": (
        found(silent=["node00"]),
        "node node00, which coordinates the job, does not answer: what follows may be old",
        "ckptd status on node00",
    ),
    "load_waits": (
        found(restore=LOADING),
        "the load waits for rank 5 of node node01, for 42s now",
        "every rank must call load",
    ),
    "ranks_missing": (
        found(checkpoints=[WAITING, STAGED]),
        "ranks 4-7 of node node01 have not delivered step 1350 for 42s",
        "every rank must call save; ranks 4-7 are pids 1-4 on node01",
    ),
    "nodes_lost": (
        found(nodes=lost(2), checkpoints=[STAGED, PROTECTED, DURABLE]),
        "node node02 does not answer: load restores step 1200 without it",
        "ckptd status on node02",
    ),
    "ranks_ended": (
        found(ranks=ENDED),
        "rank 1 (pid 4001 on node03) ended without close",
        "start the job again: load continues from step 1300",
    ),
    "store_hangs": (
        found(HUNG),
        "the store has not answered for 45s; nothing is durable since step 1100",
        f"is the mount alive? timeout 10 stat -f {a_status.STORE}",
    ),
    "store_full": (
        found(drain=failing("[Errno 28] No space left on device: '/s/x'")),
        "the store is full: step 1300 is not durable, tried 3 times, again in 8s; nothing is durable since step 1100",
        f"make room: df -h {a_status.STORE}; ckptd prune --dry-run --keep-last 1 {a_status.STORE}/llama-7b; then",
    ),
    "store_read_only": (
        found(drain=failing("[Errno 30] Read-only file system")),
        "the store is read-only: step 1300 is not durable",
        "mount -o remount,rw",
    ),
    "store_denied": (
        found(drain=failing("[Errno 13] Permission denied")),
        "the store may not be written: step 1300 is not durable",
        "whose is it? ls -ld ",
    ),
    "drain_fails": (
        found(drain=failing("[Errno 5] Input/output error")),
        "the drain fails: [Errno 5] Input/output error: step 1300 is not durable",
        "ckptd doctor --store",
    ),
    "store_slow": (
        found(pace=PACE),
        "the store takes 34s per save, you save each 20s: 12 saves never became durable",
        "connect(drain_every=100) drains one save in 2",
    ),
    "saves_lost": (
        found(checkpoints=[NO_SLOT, STAGED]),
        "step 1350 skipped: rank 3: no slot for 10 s; step 1300 is the newest",
        "save less often, or give more slots",
    ),
    "damaged": (
        found(scrub=scrubbed("pfs", "arena")),
        "rank 3 of step 1200 is damaged on the store: block 7 is bad (and 1 more)",
        f"load an older step: ckptd list {a_status.STORE}/llama-7b",
    ),
    "unprotected": (
        found(degraded=[LONE]),
        "redundancy xor protects nothing: all ranks run on one node",
        "run the job on 2 nodes or more",
    ),
}


@pytest.mark.parametrize("code", CASES)
def test_a_rule_finds_its_case_and_no_other_rule_does(code):
    said, text, hint = CASES[code]
    assert [one.code for one in said] == [code]
    assert said[0].text.startswith(text)
    assert said[0].hint.startswith(hint)
    assert said[0].job == "llama-7b"


def test_every_rule_has_a_case():
    assert {rule.code for rule in RULES} == set(CASES)
    assert len(RULES) == len(CASES)


def test_a_healthy_job_has_nothing():
    assert found() == []
    running = a_status.drain()
    assert found(drain=running, checkpoints=[a_status.checkpoint(1350, "staging", ranks=9), STAGED, DURABLE]) == []
    assert found(pace=msgspec.structs.replace(PACE, drain_s=12.0)) == []
    assert found(restore=msgspec.structs.replace(LOADING, phase="reading")) == []
    assert found(restore=msgspec.structs.replace(LOADING, seconds=1.0)) == []


def test_ranks_that_have_closed_and_whose_last_save_is_durable_are_no_loss():
    closed = [a_status.rank(n, alive=False, pid=0, host="") for n in range(2)]
    assert found(ranks=closed, checkpoints=[DURABLE]) == []
    assert found(ranks=closed, drain=a_status.drain()) == []
    assert found(ranks=[ALIVE[0], closed[1]]) == []
    (one,) = found(ranks=NONE_RUN)
    assert one.text == "no rank of this node runs, and step 1300 is in memory only"
    assert "ckptd drain --job llama-7b --wait" in one.hint


def test_more_nodes_than_the_scheme_bears_leave_what_is_durable():
    (one,) = found(nodes=lost(1, 2), checkpoints=[STAGED, PROTECTED, DURABLE])
    assert one.text == "nodes node[01-02] do not answer: load restores step 1100 without them"
    (one,) = found(nodes=lost(1, 2), checkpoints=[STAGED, PROTECTED])
    assert one.text == "nodes node[01-02] do not answer: no checkpoint can be restored without them"


def test_ranks_that_wait_for_nothing_but_a_lost_node_are_no_finding_of_their_own():
    checkpoints = [WAITING, STAGED, PROTECTED]  # ranks 4 to 7, which node 1 runs
    assert [one.code for one in found(nodes=lost(1), checkpoints=checkpoints)] == ["nodes_lost"]
    assert [one.code for one in found(nodes=lost(2), checkpoints=checkpoints)] == ["nodes_lost", "ranks_missing"]


def test_what_a_lost_node_does_to_its_set_is_said_once():
    hears = "set 0 makes no parity while it hears nothing of node02"
    assert [one.code for one in found(nodes=lost(2), degraded=[hears])] == ["nodes_lost"]
    assert [one.code for one in found(nodes=lost(2), degraded=[hears, LONE])] == ["nodes_lost", "unprotected"]


def test_of_several_saves_that_wait_the_oldest_is_named():
    older = msgspec.structs.replace(WAITING, step=1340, age_s=50.0)
    (one,) = found(checkpoints=[WAITING, older, STAGED])
    assert "have not delivered step 1340 for 50s, nor 1 later save" in one.text


def test_a_store_that_was_never_seen_says_that_nothing_is_known():
    (one,) = found(store_seen=False, store_problem="/s did not answer in time")
    assert one.text == "the store does not answer: /s did not answer in time; what is durable is not known"


def test_the_worst_comes_first_whatever_the_order_of_the_jobs():
    jobs = [a_job(job="b", pace=PACE), a_job(job="a", checkpoints=[WAITING, STAGED])]
    said = unsafe(a_status.status(jobs=jobs, workers=[]))
    assert [(one.job, one.code) for one in said] == [("a", "ranks_missing"), ("b", "store_slow")]


def test_json_has_them():
    raw = json.loads(msgspec.json.encode(judged(a_status.status(jobs=[a_job(pace=PACE)], workers=[]))))
    assert raw["unsafe"] == [
        {
            "code": "store_slow",
            "text": "the store takes 34s per save, you save each 20s: 12 saves never became durable",
            "hint": "connect(drain_every=100) drains one save in 2; the others stay in memory until newer ones come",
            "job": "llama-7b",
            "store": a_status.STORE,
        }
    ]


def test_damage_in_memory_names_the_node():
    (one,) = found(scrub=scrubbed("arena"))
    assert one.text == "rank 3 of step 1200 is damaged in memory of node node02: block 7 is bad"
    (one,) = found(scrub=scrubbed("rebuilt"))
    assert one.text.startswith("parity of rank 3 of step 1200 is damaged in memory of node node02")
    assert found(scrub=scrubbed()) == [], "what was made good is in the log"
