"""One flipped bit anywhere: no restore uses it, ``ckptd verify`` names it, and the next best copy is restored."""

import glob
import os
import sys

import pytest
import torch

import ckptd_client
from ckptd.checkpoint.verify import verify_path
from ckptd.shared.format.digest import BLOCK_NBYTES
from ckptd.shared.format.manifest import COMMITTED
from ckptd.shared.format.slot import SEALS_NBYTES, decode_seals
from ckptd_client import RestoreError
from tests import pythons
from tests.checkpoints import write_checkpoint
from tests.cluster import Node, wait_for
from tests.flips import flip

pytestmark = pytest.mark.faults

LONG = os.environ.get("FAULTS") == "long"

NBYTES = 2 * BLOCK_NBYTES + 1000  # of the tensor: three blocks with the header, the last one short
IMAGE = "r00000-p00.safetensors"
BYTES = torch.arange(256, dtype=torch.uint8).repeat(NBYTES // 256 + 1)[:NBYTES]


def state_of(step):
    return {"w": BYTES + step, "step": step}


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    with Node(str(tmp_path_factory.mktemp("store"))) as node:
        node.start()
        yield node


@pytest.fixture
def join(node, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    clients = []

    def connect(job, **settings):
        clients.append(ckptd_client.connect(job, store=node.store, arena=node.arena, start=False, **settings))
        return clients[-1]

    yield connect
    for client in clients:
        client.close()


def check_state(state, step):
    assert state["step"] == step
    assert torch.equal(state["w"], state_of(step)["w"])


def verify(path):
    """(exit code, output) of ckptd verify."""
    done = pythons.run(
        [sys.executable, "-P", "-m", "ckptd", "verify", path],
        env=os.environ | pythons.ENVIRON,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def slot_of(node, job, step):
    """(path, seal) of the slot that holds a step."""
    for path in node.slots():
        if f"/{job}-" in path:
            with open(path, "rb") as file:
                file.seek(-SEALS_NBYTES, os.SEEK_END)
                seal = decode_seals(file.read())[2]
            if seal.save is not None and seal.save.step == step:
                return path, seal
    raise AssertionError(f"no slot holds step {step}")


def in_force(path):
    """Offset of the seal page in force."""
    with open(path, "rb") as file:
        file.seek(-SEALS_NBYTES, os.SEEK_END)
        index = decode_seals(file.read())[0]
    return os.path.getsize(path) - SEALS_NBYTES + index * SEALS_NBYTES // 2


SLOT_PLACES = {
    "header length": (lambda path, seal: 0, "block 0 "),
    "header": (lambda path, seal: 100, "block 0 "),
    "first payload byte": (lambda path, seal: seal.header_nbytes, "block 0 "),
    "block 1": (lambda path, seal: BLOCK_NBYTES, "block 1 "),
    "last byte of block 1": (lambda path, seal: 2 * BLOCK_NBYTES - 1, "block 1 "),
    "last byte": (lambda path, seal: seal.image_nbytes - 1, "block 2 "),
    "digest table": (lambda path, seal: seal.table_offset + 20, "digest table"),
    "layout": (lambda path, seal: seal.layout_offset + 5, "layout"),
    "leaves": (lambda path, seal: seal.leaves_offset + seal.leaves_nbytes - 1, "leaves"),
    "seal": (lambda path, seal: in_force(path) + 60, "seal"),
}
SHORT_SLOT_PLACES = ("header", "block 1", "digest table", "layout", "leaves", "seal")


@pytest.mark.parametrize("place", SLOT_PLACES if LONG else SHORT_SLOT_PLACES)
def test_a_bit_in_a_slot_falls_back_to_the_same_step_on_the_store(place, node, join):
    where, word = SLOT_PLACES[place]
    job = f"slot-{place.replace(' ', '-')}"
    client = join(job)
    for step in range(2):
        client.save(state_of(step), step).wait("durable", 60)
    path, seal = slot_of(node, job, 1)
    flip(path, where(path, seal))
    code, text = verify(node.arena)
    line = next(line for line in text.splitlines() if path in line)
    assert word in line, text
    assert code == (0 if place == "seal" else 1), "a torn seal page is what a crash leaves: noted, no damage"
    state = state_of(9)
    restored = client.load(state)
    check_state(state, 1)
    assert (restored.step, restored.tier) == (1, "pfs")
    assert any(path in note and word in note for note in restored.notes), restored.notes
    client.save(state_of(2), 2).wait("durable", 60)
    assert client.load(state).notes == [], "and life goes on"
    check_state(state, 2)


def test_a_bit_in_a_slot_that_is_not_committed_falls_back_to_an_older_step(node, join):
    client = join("kept", drain_every=100)
    client.save(state_of(0), 0).wait("durable", 60)
    client.save(state_of(1), 1).wait("staged", 60)
    path, seal = slot_of(node, "kept", 1)
    wait_for(lambda: slot_of(node, "kept", 1)[1].state == "digested")
    flip(path, seal.image_nbytes - 1)
    state = state_of(9)
    restored = client.load(state)
    check_state(state, 0)
    assert (restored.step, restored.tier) == (0, "pfs")
    assert any(path in note and "block 2 " in note for note in restored.notes), restored.notes


VOTE = "sets/*/*.vote"
MANIFEST = "ckptd.*.manifest"
INDEX = "ckptd.*.index"
STEPS = 200 if LONG else 80  # bits of a file that are flipped, one at a time


def damage(path, name, where):
    """Flips a bit in a part of a checkpoint; returns the file's path."""
    (target,) = glob.glob(os.path.join(path, name))
    flip(target, where)
    return target


FILE_PLACES = {
    "header length": (IMAGE, 0, "block 0 "),
    "header": (IMAGE, 100, "block 0 "),
    "block 1": (IMAGE, BLOCK_NBYTES + 17, "block 1 "),
    "last byte": (IMAGE, -1, "block 2 "),
    "manifest": (MANIFEST, 200, "digest"),
    "manifest's digest": (MANIFEST, -1, "digest"),
    "manifest's magic": (MANIFEST, 0, "record"),
    "vote": (VOTE, 200, "is not the vote that"),
    "committed": (COMMITTED, 0, ""),
    "committed's digest": (COMMITTED, -10, ""),
}
SHORT_FILE_PLACES = ("header", "block 1", "manifest", "vote", "committed")


def two_committed(node, join, job):
    """Steps 0 and 1 committed, memory freed; the directories of both."""
    with join(job) as client:
        handles = [client.save(state_of(step), step).wait("durable", 60) for step in range(2)]
    wait_for(lambda: not any(f"/{job}-" in path for path in node.slots()))
    return [os.path.join(node.store, job, handle.save_id.dirname) for handle in handles]


@pytest.mark.parametrize("place", FILE_PLACES if LONG else SHORT_FILE_PLACES)
def test_a_bit_in_a_committed_file_falls_back_to_an_older_step(place, node, join):
    name, offset, word = FILE_PLACES[place]
    job = f"file-{place.replace(' ', '-').replace(chr(39), '')}"
    older, newest = two_committed(node, join, job)
    path = damage(newest, name, offset)
    code, text = verify(newest)
    assert code == 1
    assert any(path in line and word in line for line in text.splitlines()), text
    state = state_of(9)
    client = join(job)
    restored = client.load(state)
    check_state(state, 0)
    assert (restored.step, restored.tier) == (0, "pfs")
    assert any(path in note and word in note for note in restored.notes), restored.notes
    damage(older, IMAGE, -1)
    for _ in range(2):
        with pytest.raises(RestoreError) as caught:
            client.load(state)
        assert path in str(caught.value), "names both"
        assert os.path.join(older, IMAGE) in str(caught.value)
        assert "block 2 " in str(caught.value)
        assert "ckptd verify" in str(caught.value)
    assert os.path.exists(newest), "nothing is removed: somebody may want to look"


def test_arena_and_store_both_damaged_name_both(node, join):
    client = join("both")
    handle = client.save(state_of(0), 0).wait("durable", 60)
    path, _ = slot_of(node, "both", 0)
    flip(path, BLOCK_NBYTES)
    image = os.path.join(node.store, "both", handle.save_id.dirname, IMAGE)
    flip(image, 10)
    with pytest.raises(RestoreError) as caught:
        client.load(state_of(9))
    text = str(caught.value)
    assert path in text
    assert image in text
    assert "block 1 " in text
    assert "block 0 " in text


def test_no_bit_of_a_checkpoint_is_missed_by_verify(tmp_path):
    """Of two ranks with a vote each: the file of one has an index."""
    folder = write_checkpoint(tmp_path, [{"w": torch.ones(3)}, {"w": torch.zeros(3)}])
    assert verify_path(str(folder)).ok
    for name in (COMMITTED, MANIFEST, INDEX, VOTE, IMAGE):
        path = str(min(folder.glob(name)))
        size = os.path.getsize(path)
        for at in range(0, size * 8, 8 * max(1, size // STEPS) + 3):
            flip(path, at // 8, at % 8)
            report = verify_path(str(folder))
            assert any(problem.path == path for problem in report.problems), (name, at, report.problems)
            flip(path, at // 8, at % 8)
    assert verify_path(str(folder)).ok
