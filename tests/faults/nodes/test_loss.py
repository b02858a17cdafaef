"""One node of a set of four is lost, memory and all, wherever its daemon stands in the life of a save."""

import glob
import itertools
import json
import os

import pytest

from ckptd.shared.base.ids import parse_dirname
from ckptd.system import failpoints
from tests.cluster import wait_for
from tests.faults.nodes.clusters import Cluster, Ranks, within

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240), pytest.mark.xdist_group("nodes-loss")]

LONG = os.environ.get("FAULTS") == "long"
NAMES = "abcd"
FIRST, SECOND = 10, 20  # steps; the point is armed between the two
_REACHED_S = 15.0

# Points that a save of a job with an older checkpoint reaches. Those of a rebuild are elsewhere.
NEVER = {"drain.between-parts"}  # these ranks' images are of one file: test_crash_points.py kills there
POINTS = tuple(
    p for p in failpoints.POINTS if p.partition(".")[0] in {"stage", "encode", "drain", "commit"} and p not in NEVER
)
SHORT = {
    "stage.segment-received": "a",
    "encode.half-pulled": "c",
    "encode.after-seal": "d",
    "drain.half-written": "b",
    "commit.before-rename": "a",
}
ONLY_COORDINATOR = {p for p in POINTS if p.startswith("commit.") and "vote" not in p and "durable-told" not in p}
CASES = [
    (point, victim)
    for point, victim in itertools.product(POINTS, NAMES)
    if (victim == "a" or point not in ONLY_COORDINATOR) and (LONG or SHORT.get(point) == victim)
]


def test_every_point_is_in_the_long_list():
    assert set(SHORT) <= set(POINTS)
    assert len({point for point, _ in CASES}) == len(POINTS if LONG else SHORT)


@pytest.mark.parametrize(("point", "victim"), CASES)
def test_a_node_lost_at_this_point_costs_nothing_that_was_promised(four: Cluster, point: str, victim: str):
    job = f"{point}-{victim}"
    marker = os.path.join(four.directory, f"marker-{job}")
    with open(marker, "x", encoding="ascii"):  # disarmed as long as it is there
        pass
    four.restart(victim, CKPTD_FAILPOINT=f"{point}@{marker}")
    ranks = four.ranks(NAMES, job)
    ranks.connect()
    for rank in ranks.all:
        rank.call("keep_diary", f"{diary(four, job)}-{rank.rank}")
    assert ranks.call("load") == [None] * 4
    ranks.save(FIRST, "protected", "durable")
    os.unlink(marker)
    save_until_it_is_reached(ranks, marker)
    four.nodes[victim].kill()
    ranks.kill()
    promised = heard(four, job) | {(FIRST, "protected"), (FIRST, "durable")}
    durable = max((step for step, said in promised if said == "durable"), default=-1)
    committed = [f[0] for n in os.listdir(os.path.join(four.store, job)) if (f := parse_dirname(n))]
    assert max(committed, default=-1) >= durable, (committed, promised)
    four.replace(victim)
    come_back(four, job, NAMES.index(victim), promised)
    wait_for(lambda: all(node.slots() == [] and node.job(job) is None for node in four.nodes.values()))


def save_until_it_is_reached(ranks: Ranks, marker: str) -> None:
    """Saves in which the daemon, or its worker, dies."""
    step = FIRST
    for _ in within(_REACHED_S):
        if os.path.exists(marker):
            return
        if step == FIRST or all(rank.done for rank in ranks.all):
            if step > FIRST:
                ranks.results()
            step += SECOND - FIRST
            ranks.start("save_and_watch", step, _REACHED_S)


def diary(four: Cluster, job: str) -> str:
    """Where ranks note what they are told."""
    return os.path.join(four.directory, f"diary-{job}")


def heard(four: Cluster, job: str) -> set[tuple[int, str]]:
    """(step, milestone) that any rank was ever told."""
    found = set()
    for path in glob.glob(f"{glob.escape(diary(four, job))}-*"):
        with open(path, encoding="ascii") as file:
            found |= {(step, said) for step, said, _ in map(json.loads, file) if said}
    return found


def come_back(four: Cluster, job: str, lost: int, promised: set[tuple[int, str]]) -> None:
    """Another start of the job gets what was promised, and goes on as protected as before."""
    ranks = four.ranks(NAMES, job)
    ranks.connect()
    found = ranks.load()
    safe = max(step for step, said in promised if said in {"protected", "durable"})
    protected = max(step for step, said in promised if said == "protected")
    step = found[0]["step"]
    assert step >= safe, (found, promised)
    tiers = [f["tier"] for f in found]
    assert set(tiers[:lost] + tiers[lost + 1 :]) == {"arena"}, (found, promised)
    assert tiers[lost] == "rebuilt" if step <= protected else tiers[lost] in {"rebuilt", "pfs"}, (found, promised)
    ranks.save(step + 10, "protected", "durable")
    four.end(ranks)


def test_a_checkpoint_that_the_next_start_passes_over_is_durable_when_that_closes(four: Cluster):
    ranks = four.ranks(NAMES, "passed-over")
    ranks.connect(drain_every=1000)
    ranks.call("load")
    ranks.save(FIRST, "protected", "durable")
    ranks.save(SECOND, "protected")
    four.replace("b")  # before the ranks end: then what is in memory would be drained
    ranks.kill()
    ranks = four.ranks(NAMES, "passed-over")
    ranks.connect(drain_every=1000)
    assert {found["step"] for found in ranks.call("load", FIRST)} == {FIRST}
    four.end(ranks)
    wait_for(lambda: all(node.slots() == [] and node.job("passed-over") is None for node in four.nodes.values()))
    names = os.listdir(os.path.join(four.store, "passed-over"))
    assert {found[0] for name in names if (found := parse_dirname(name))} == {FIRST, SECOND}
