"""Crafted slots in an arena: a daemon starts all the same, says what is wrong, and touches nothing outside."""

import os
import pathlib
import tempfile

import msgspec
import pytest

import ckptd_client
from ckptd.arena.arena import Arena
from ckptd.arena.saved_topology import kept_topologies
from ckptd.checkpoint.verify import verify_path
from ckptd.peers.identity import identify
from ckptd.shared.base.errors import DamagedError
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.format import arena_paths
from ckptd.shared.format import layout as lay
from ckptd.shared.format.digest import digest
from ckptd.shared.format.slot import SEALS_NBYTES, Seal, SlotState
from ckptd.system.config import load_config
from ckptd_client._load.reader import open_slot
from tests.cluster import Node, wait_for
from tests.hostile.apart import apart
from tests.runs import RUN
from tests.slots import reseal, write_slot

pytestmark = pytest.mark.timeout(120)
SAVE = SaveId(1, 1, 10, RUN)


def key_of(folder):
    return JobKey(str(folder / "store"), "demo")


@pytest.fixture
def arena():
    """Where one would lie: in memory."""
    with tempfile.TemporaryDirectory(prefix="ckptd-test-", dir="/dev/shm") as directory:
        yield pathlib.Path(directory)


@pytest.fixture
def slot(tmp_path, arena):
    """A sound slot of the only rank of a job."""
    (tmp_path / "store").mkdir()
    directory = arena / arena_paths.job_dir(key_of(tmp_path))
    directory.mkdir(parents=True)
    leaves = {"step": lay.Leaf("safe/1", b"\x0a")}
    return write_slot(directory / arena_paths.slot_name(0, 1), key_of(tmp_path), SAVE, leaves=leaves)


def put_part(slot, what, body):
    """Another layout or leaves in the slot, as long as before or shorter, with a seal that vouches for it."""
    offset, nbytes, _ = slot.seal.tail[what]
    assert len(body) <= nbytes, (len(body), nbytes)
    with open(slot.path, "r+b") as file:
        file.seek(offset)
        file.write(body)
    return {f"{what}_nbytes": len(body), f"{what}_digest": digest(body)}


def edited(slot, **changes):
    """The layout with other values, of one byte each."""
    plan, form, own = msgspec.msgpack.decode(slot.layout_raw)
    return msgspec.msgpack.encode([plan, form, msgspec.msgpack.encode(msgspec.msgpack.decode(own) | changes)])


CRAFTED = {
    "image beyond the file": lambda slot: {"image_nbytes": 1 << 60},
    "header beyond the file": lambda slot: {"header_nbytes": 1 << 60},
    "layout beyond the file": lambda slot: {"layout_nbytes": 1 << 30},
    "leaves beyond the file": lambda slot: {"leaves_nbytes": 1 << 30},
    "objects beyond the file": lambda slot: {"objects_nbytes": 1 << 30},
    "layout of another digest": lambda slot: {"layout_digest": bytes(16)},
    "table of another digest": lambda slot: {"table_digest": bytes(16)},
    "layout no msgpack": lambda slot: put_part(slot, "layout", b"\xc1" * len(slot.layout_raw)),
    "layout of another rank": lambda slot: put_part(slot, "layout", edited(slot, rank=1)),
    "layout of another world": lambda slot: put_part(slot, "layout", edited(slot, world_size=2)),
    "leaves no msgpack": lambda slot: put_part(slot, "leaves", b"\xc1" * len(slot.leaves_raw)),
    "parts that do not add up": lambda slot: {"parts": (4096, slot.seal.image_nbytes)},
    "parts of no whole pages": lambda slot: {"parts": (1, slot.seal.image_nbytes - 1)},
    "parts that the layout has not": lambda slot: {"parts": (4096, slot.seal.image_nbytes - 4096)},
    "parts beyond the file": lambda slot: {"parts": (1 << 60, 1 << 60)},
}


@pytest.mark.parametrize("name", CRAFTED)
def test_load_and_verify_refuse_a_slot_by_name(tmp_path, arena, slot, name):
    reseal(slot, msgspec.structs.replace(slot.seal, **CRAFTED[name](slot)))
    if name != "header beyond the file":  # a number that no reader uses: the layout says where the header ends
        with pytest.raises(DamagedError, match=os.path.basename(slot.path)):
            open_slot(slot.path, key_of(tmp_path), SAVE, 0)
        assert slot.path in "\n".join(map(str, verify_path(str(arena)).problems))


@pytest.mark.parametrize("name", [*CRAFTED, "sound"])
def test_a_daemon_starts_over_it(tmp_path, arena, slot, name):
    if name != "sound":
        reseal(slot, msgspec.structs.replace(slot.seal, **CRAFTED[name](slot)))
    with Node(str(tmp_path / "store"), arena=str(arena)) as node:
        node.start()
        with ckptd_client.connect("demo", store=node.store, arena=node.arena, start=False) as client:
            torch = pytest.importorskip("torch")
            state = {"model": {"weight": torch.zeros(1250), "mask": torch.zeros(3, 5, dtype=torch.uint8)}, "step": 0}
            if name in ("sound", "header beyond the file"):
                assert client.load(state).step == 10
            else:
                with pytest.raises(ckptd_client.RestoreError, match=r"slot|r00000"):
                    client.load(state)
            assert node.status().jobs[0].job == "demo"
            assert client.save(state, 11).wait("durable", 60) is not None
        assert node.daemon.poll() is None


def seals_of(**fields):
    """A seal page's body with fields that no Seal can hold."""
    return msgspec.msgpack.encode(fields)


BODIES = {
    "deep": b"\x81\xa1x" + b"\x91" * 4000 + b"\x01",
    "counts huge": b"\xdf\xff\xff\xff\xff",
    "job outside": seals_of(state="digested", job=["/x", "../../etc"], save=[1, 1, 1]),
    "job with NUL": seals_of(state="digested", job=["/x\0", "demo"], save=[1, 1, 1]),
    "save negative": seals_of(state="digested", job=["/x", "demo"], save=[-1, 1, 1]),
    "rank huge": seals_of(state="digested", job=["/x", "demo"], save=[1, 1, 1], rank=1 << 40),
    "no save": seals_of(state="digested", job=["/x", "demo"]),
    "no job": seals_of(state="digested", save=[1, 1, 1]),
    "of another job": seals_of(state="digested", job=["/elsewhere", "demo"], save=[1, 1, 1]),
    "state unknown": seals_of(state="burning"),
    "nothing": b"",
}


def test_a_daemon_starts_over_any_seal(tmp_path, arena, slot):
    """And over links, pipes and directories with the names of slots and ranks; nothing that they lead to changes."""
    directory = os.path.dirname(slot.path)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / arena_paths.slot_name(3, 1)).write_bytes(b"short: an allocation that was cut off, were it ours")
    os.symlink(outside, arena / "jobs" / "linked-00000000")
    os.symlink("/dev/zero", os.path.join(directory, arena_paths.slot_name(0, 70)))
    os.symlink(outside / "nothing", os.path.join(directory, arena_paths.slot_name(0, 71)))
    os.mkfifo(os.path.join(directory, arena_paths.slot_name(0, 72)))
    os.mkdir(os.path.join(directory, arena_paths.slot_name(0, 73)))
    os.mkfifo(os.path.join(directory, arena_paths.rank_file_name(0, "fifo")))
    os.mkdir(os.path.join(directory, arena_paths.rank_file_name(1, "directory")))
    os.symlink(outside / "secret", os.path.join(directory, arena_paths.rank_file_name(2, "link")))
    (outside / "secret").write_bytes(b"{}")
    with open(os.path.join(directory, arena_paths.rank_file_name(3, "deep")), "wb") as file:
        file.write(b'{"x":' + b"[" * 8000)
    for number, (name, body) in enumerate(BODIES.items(), start=2):
        head = (b"CKPTDSL4" + (9).to_bytes(8, "little") + len(body).to_bytes(4, "little") + body).ljust(4080, b"\0")
        with open(os.path.join(directory, arena_paths.slot_name(number, 1)), "wb") as file:
            file.write(bytes(8192) + 2 * (head + digest(head)))
            assert name
    with open(os.path.join(directory, arena_paths.slot_name(50, 1)), "wb") as file:
        file.truncate(1 << 40)  # a hole: nobody may read or fill it
    verify_path(str(arena))
    with Node(str(tmp_path / "store"), arena=str(arena)) as node:
        node.start()
        with ckptd_client.connect("demo", store=node.store, arena=node.arena, start=False) as client:
            assert client.latest() in (None, 10)
        wait_for(lambda: node.status() is not None)
        assert node.daemon.poll() is None, node.log_text()
    assert sorted(os.listdir(outside)) == [arena_paths.slot_name(3, 1), "secret"]


def test_the_scan_of_an_arena_leaves_strangers_alone(arena, slot):
    """Without a daemon, so that a fault shows as what it is."""
    directory = os.path.dirname(slot.path)
    for number in range(30):
        with open(os.path.join(directory, arena_paths.slot_name(number + 1, 1)), "wb") as file:
            file.write(os.urandom(SEALS_NBYTES + 4096 * (number % 3)))
    opened = Arena(str(arena))
    opened.open()
    found = {slot.name: slot.seal for slot in opened.scan()}
    opened.close(remove=False)
    assert found[os.path.basename(slot.path)].state == SlotState.DIGESTED
    assert [seal for name, seal in found.items() if name != os.path.basename(slot.path)] == [Seal()] * 30


@pytest.mark.timeout(240)
def test_a_pipe_in_the_place_of_a_small_file_never_holds_a_start(arena, slot):
    for name in (
        arena_paths.BALLAST,
        arena_paths.IDENTITY,
        f"{os.path.dirname(os.path.relpath(slot.path, arena))}/{arena_paths.TOPOLOGY}",
    ):
        os.mkfifo(arena / name)
    came = apart(lambda: start(arena))
    assert came.kind == "", came


def test_a_topology_that_is_one_hole_takes_no_memory(arena, slot):
    with open(os.path.join(os.path.dirname(slot.path), arena_paths.TOPOLOGY), "wb") as file:
        file.truncate(60 << 20)
    came = apart(lambda: start(arena))
    assert (came.kind, came.grown < 16 << 20) == ("", True), came


def start(arena):
    """What a daemon does first."""
    opened = Arena(str(arena))
    opened.open()
    opened.scan()
    assert kept_topologies(str(arena)) == []
    identify(load_config({"arena": str(arena), "peer_address": "127.0.0.1"}, {"CKPTD_CONFIG": "/dev/null"})[0])
    opened.close(remove=False)
