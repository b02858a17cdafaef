"""Two runs of one job that know nothing of each other, in one store or in two: one run's bytes, or a word of both."""

import json
import os
import re
import shutil
import sys
import tempfile

import pytest

from ckptd.store.posix.store import PosixStore
from ckptd.system.files import FileLayer
from tests.faults.history_world import JOB, Run, World, committed
from tests.faults.nodes.clusters import a_cluster

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240), pytest.mark.xdist_group("nodes-two-runs")]

STEPS = 3
OTHER_STORE = r"store id|another store|not the store"
on_two = pytest.mark.parametrize("cluster", ["ab"], indirect=True)


@pytest.fixture(name="cluster")
def fixture_cluster(zygote, request):
    with a_cluster(zygote, getattr(request, "param", "abcd"), CKPTD_REDUNDANCY="none") as cluster:
        yield cluster


@pytest.fixture(name="world")
def fixture_world(cluster):
    world = World(cluster)
    yield world
    world.close()


def durable_run(world: World, homes: str) -> Run:
    """Steps 0 to 2 durable, in an incarnation that began with nothing; then its ranks are killed."""
    run = world.start(homes, steps=STEPS, until="durable")
    assert run.verdict.kind == "none", run.verdict
    assert committed(world.cluster.store)[-1].startswith(f"step-{STEPS - 1:09d}.")
    world.end()
    return run


def warnings_of(run: Run) -> str:
    """What a user sees of a connect: its warnings, or its error."""
    return run.verdict.text if run.verdict.kind == "error" else run.logs()


# --- two runs whose numbers are the same


def test_a_node_of_a_run_that_was_started_over_adds_nothing_to_the_newer_one(world: World):
    durable_run(world, "ab")
    before = committed(world.cluster.store)
    world.start_over()
    durable_run(world, "cd")
    assert committed(world.cluster.store)[-1] == before[-1], "the two runs have one incarnation and end at one step"
    world.lose("c")
    run = world.start("ad")
    assert run.verdict.kind == "good", run.verdict.text
    assert run.verdict.found == (2, STEPS - 1)
    notes = " ".join(run.verdict.notes)
    assert re.search(r"\b(another|other|foreign|older|two) runs?\b", notes), (
        "no note names the segments of the other run"
    )
    assert re.search(r"\bnode a\b|\branks? 0\b", notes), notes


def test_a_run_on_a_store_that_was_not_mounted_adds_nothing_to_the_one_before(world: World):
    durable_run(world, "ab")
    before = committed(world.cluster.store)
    world.unmount()
    durable_run(world, "cd")
    assert committed(world.cluster.store)[-1] == before[-1], "the two runs have one incarnation and end at one step"
    world.remount()
    run = world.start("ad")
    assert not run.verdict.is_finding, run.verdict.text
    if run.verdict.kind == "good":  # its directory, or its memory on a: never a word of run 2 without one of run 1
        assert run.verdict.found == (1, STEPS - 1)
        assert re.search(r"\bruns?\b|\bstores?\b", " ".join(run.verdict.notes)), run.verdict.notes
    else:
        assert run.verdict.kind == "error"
        assert re.search(r"two runs|both runs|another run|another store", run.verdict.text), run.verdict.text


# --- a run that another one took over without knowing


def test_an_older_run_gets_no_durable_once_a_newer_one_has_begun_elsewhere(world: World):
    first = world.start("ab", steps=STEPS, until="durable")
    older, second = first.incarnation(), world.start("cd")
    assert second.verdict.found == (1, STEPS - 1)
    reasons = world.save(first, 1, "durable")
    assert all(f"incarnation {second.incarnation()} took the job over" in reason for reason in reasons), reasons
    handles = first.ranks.call("handle", STEPS)
    assert {end for _, end, _ in handles} == {"failed"}, handles
    assert world.save(second, 1, "durable") == ["", ""], "the newer run goes on"
    world.end()
    assert world.findings == []
    late = [row for row in listed(world) if row["step"] == STEPS and row["incarnation"] == older]
    assert late, "nothing lists the checkpoint that came too late"
    assert all("took the job over" in str(row) or "takeover" in str(row) for row in late), late
    assert world.start("bc").verdict.found == (2, STEPS)


def listed(world: World) -> list[dict]:
    """Checkpoints as ckptd list and ckptd status of the older run's node have them."""
    node = world.cluster.nodes["a"]
    ckptd = (sys.executable, "-m", "ckptd")
    on_store = json.loads(node.complete(*ckptd, "list", "--json", world.cluster.store, timeout_s=30))
    there = json.loads(node.complete(*ckptd, "status", "--json", timeout_s=30))
    return [row for said in (on_store, there) for job in said["jobs"] for row in job["checkpoints"]]


# --- a store has an id


@on_two
def test_no_store_is_made_silently_where_an_arena_remembers_another_one(world: World):
    durable_run(world, "ab")
    world.unmount()
    run = world.start("ab")
    said = warnings_of(run)
    assert re.search(OTHER_STORE, said), said
    assert world.cluster.store in said, said
    if run.verdict.kind == "error":
        assert os.listdir(world.cluster.store) == [], "a store was made where another one is remembered"
    world.end()
    world.remount()
    assert world.start("ab").verdict.found == (1, STEPS - 1)


def test_a_node_without_memory_that_joins_one_with_memory_makes_no_store_either(world: World):
    """Rank 0's daemon is asked first, and it knows nothing: the other one's arena remembers."""
    durable_run(world, "ab")
    world.unmount()
    said = warnings_of(world.start("cb"))
    assert re.search(OTHER_STORE, said), said


@on_two
def test_a_store_id_that_is_asked_for_and_is_not_there_is_an_error(world: World):
    asked = "00112233445566778899aabbccddeeff"
    run = world.start("ab", store_id=asked)
    assert run.verdict.kind == "error", run.verdict
    assert asked in run.verdict.text
    assert world.cluster.store in run.verdict.text
    assert os.listdir(world.cluster.store) == [], "a store was made, under another id than was asked for"


@on_two
def test_a_manifest_remembers_its_store_when_no_memory_does(world: World):
    """The job's directory lies on a store that is not the one where it was written, and all nodes are new."""
    durable_run(world, "ab")
    world.unmount()
    shutil.copytree(f"{world.cluster.store}.0/{JOB}", f"{world.cluster.store}/{JOB}", symlinks=True)
    world.lose("a")
    world.lose("b")
    said = warnings_of(world.start("ab"))
    assert re.search(OTHER_STORE, said), said


@on_two
def test_a_job_goes_on_only_on_the_store_that_it_is_saved_to_whatever_its_daemons_forgot(world: World):
    """Another store is mounted there, and all daemons are killed: nobody who connects is there to be warned."""
    run = world.start("ab", steps=STEPS, until="durable")
    world.unmount()
    other = PosixStore(world.cluster.store, fs=FileLayer()).open("other").store_id
    for node in "ab":
        world.crash(node)
    said = world.save(run, 1, "durable", timeout_s=20)  # a store that is not the right one is looked at again in 15 s
    assert all(said), f"told durable on store {other}"
    assert committed(world.cluster.store) == []
    assert other in json.dumps(status_of(world, "a"))
    world.remount()
    assert world.save(run, 1, "durable", timeout_s=40) == ["", ""]
    assert world.findings == []


def status_of(world: World, node: str) -> dict:
    """As its user sees it."""
    said = world.cluster.nodes[node].complete(sys.executable, "-m", "ckptd", "status", "--json", timeout_s=30)
    return json.loads(said)


@on_two
def test_a_first_store_on_tmpfs_is_made_with_a_warning_that_names_its_device_and_mount(cluster):
    with tempfile.TemporaryDirectory(prefix="ckptd-test-", dir="/dev/shm") as directory:
        run = first_run_on(World(cluster), os.path.join(directory, "store"))
        assert "tmpfs" in run, run
        assert "/dev/shm" in run, run


@on_two
def test_a_first_store_on_the_root_file_system_is_made_with_a_warning_that_names_its_device(cluster):
    if os.stat(cluster.directory).st_dev != os.stat("/").st_dev:
        pytest.skip("temporary files are not on the root file system")
    said = first_run_on(World(cluster), os.path.join(cluster.directory, "rooted"))
    assert "this node's own disk" in said, said
    assert device_of("/") in said, said


def first_run_on(world: World, store: str) -> str:
    """What a user is told of a first run, which works."""
    run = world.start("ab", steps=1, until="durable", store=store)
    assert run.verdict.kind == "none", run.verdict
    assert committed(store), "its checkpoint is on that store"
    said = run.logs()
    world.close()
    return said


def device_of(mount: str) -> str:
    """As the kernel names it."""
    with open("/proc/self/mounts", encoding="utf-8") as file:
        return next(words[0] for words in map(str.split, file) if words[1] == mount)


@on_two
def test_the_first_run_on_a_new_store_works_and_so_does_the_second(world: World):
    assert world.start("ab", steps=1, until="durable").verdict.kind == "none"
    world.end()
    assert world.start("ab").verdict.found == (1, 0)
    assert world.findings == []
