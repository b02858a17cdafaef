"""Bits flip in a real arena and on a real store while nobody looks: a real daemon finds, mends and reports them."""

import glob
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptd.checkpoint.verify import verify_path
from ckptd.shared.format.slot import SEALS_NBYTES, decode_seals
from ckptd.shared.protocol import journal as log
from ckptd.shared.protocol.status import ScrubStatus
from tests import pythons
from tests.cluster import Node, wait_for
from tests.faults.mounts import FuseStore, needs_fuse
from tests.faults.ranks import JOB, Ranks, told
from tests.faults.test_journal import entries, save
from tests.flips import flip

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240)]

MEMORY = ("--scrub-memory", "1G", "--scrub-memory-every-s", "0.3s", "--scrub-store", "0")
STORE = ("--scrub-memory", "0", "--scrub-store", "1G", "--scrub-store-every-s", "0.3s")


@pytest.fixture(name="node")
def fixture_node(tmp_path: Path) -> Iterator[Node]:
    with told(str(tmp_path)) as node:
        yield node


def slot_of(node: Node, step: int) -> tuple[str, int]:
    """The slot that has the step, and the bytes of its image, once its digests are there: later than staged."""

    def found() -> tuple[str, int] | None:
        for path in node.slots():
            with open(path, "rb") as file:
                file.seek(-SEALS_NBYTES, os.SEEK_END)
                seal = decode_seals(file.read())[2]
            if seal.save is not None and seal.save.step == step and seal.state == "digested":
                return path, seal.image_nbytes
        return None

    return wait_for(found)


def image_of(node: Node) -> str:
    (path,) = glob.glob(os.path.join(node.store, JOB, "step-*", "r00000-p00.safetensors"))
    return path


def scrub(node: Node) -> ScrubStatus:
    job = node.job(JOB)
    assert job is not None
    assert job.scrub is not None
    return job.scrub


def damages(store: str) -> list[log.Damaged]:
    return [entry for entry in entries(store) if isinstance(entry, log.Damaged)]


def ckptd(node: Node, *args: str) -> tuple[int, str]:
    done = pythons.run(
        [sys.executable, "-P", "-m", "ckptd", *args], env=node.environ(), capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_a_bit_in_idle_memory_is_made_good_from_the_store(node: Node):
    node.start(*MEMORY)
    with Ranks(node) as ranks:
        ranks.call("connect")
        save(ranks, 10)
        path, nbytes = slot_of(node, 10)
        before = Path(path).read_bytes()[:nbytes]
        wait_for(lambda: scrub(node).memory_nbytes > nbytes)
        flip(path, nbytes // 2)
        wait_for(lambda: scrub(node).mended == 1)
        assert Path(path).read_bytes()[:nbytes] == before
        assert scrub(node).damaged == []
        assert "made good from the store" in node.log_text()
        assert verify_path(node.arena).ok
        ranks.call("close")
    wait_for(lambda: damages(node.store))
    (entry,) = damages(node.store)
    assert (entry.step, entry.rank, entry.tier, entry.mended) == (10, 0, "arena", "the store")
    code, out = ckptd(node, "history", JOB)
    assert code == 0
    assert "scrub found rank 0 of step 10 damaged in memory" in out
    assert "made good from the store" in " ".join(out.split())


def test_what_nothing_has_stands_first_in_status_until_it_is_released(node: Node):
    node.start(*MEMORY)
    with Ranks(node) as ranks:
        ranks.call("connect", drain_every=1000)
        save(ranks, 5)
        assert ranks.call("save", 10)
        assert ranks.call("wait", 10, "staged")
        wait_for(lambda: scrub(node).memory_nbytes > 0)
        path, nbytes = slot_of(node, 10)
        flip(path, nbytes // 2)
        wait_for(lambda: scrub(node).damaged)
        code, out = ckptd(node, "status")
        assert code == 0
        assert "rank 0 of step 10 is damaged in memory of node" in "\n".join(out.splitlines()[:6]), out
        code, out = ckptd(node, "metrics")
        assert [line for line in out.splitlines() if 'code="damaged"' in line and line.endswith(" 1.0")], out
        assert ranks.call("save", 20)
        assert ranks.call("wait", 20, "staged")
        wait_for(lambda: not scrub(node).damaged)
        ranks.kill()


def test_bits_on_the_store_are_made_good_from_memory(node: Node):
    node.start(*STORE)
    with Ranks(node) as ranks:
        ranks.call("connect")
        save(ranks, 10)
        path = image_of(node)
        before = Path(path).read_bytes()
        wait_for(lambda: scrub(node).store_nbytes > len(before))
        flip(path, len(before) // 2)
        wait_for(lambda: scrub(node).mended == 1)
        assert Path(path).read_bytes() == before
        os.unlink(path)
        wait_for(lambda: scrub(node).mended == 2)
        assert Path(path).read_bytes() == before
        assert verify_path(os.path.dirname(path)).ok
        ranks.call("close")
    wait_for(lambda: len(damages(node.store)) == 2)
    assert {(entry.tier, entry.mended) for entry in damages(node.store)} == {("pfs", "memory")}


def test_a_bit_on_the_store_that_no_memory_has_is_reported(node: Node):
    node.start(*STORE, "--keep-last", "5")
    with Ranks(node) as ranks:
        ranks.call("connect")
        save(ranks, 10)
        path = image_of(node)
        save(ranks, 20, 30, 40)
        flip(path, 2000)
        (found,) = wait_for(lambda: scrub(node).damaged)
        assert (found.step, found.rank, found.tier) == (10, 0, "pfs")
        assert path in found.what
        code, out = ckptd(node, "status")
        assert "rank 0 of step 10 is damaged on the store" in out, out
        code, out = ckptd(node, "scrub", os.path.dirname(path))
        assert code == 1
        flip(path, 2000)
        wait_for(lambda: not scrub(node).damaged)
        ranks.call("close")


def test_saves_beside_a_scrub_without_a_pause_lose_nothing_and_raise_no_alarm(node: Node):
    node.start(
        *MEMORY[:2], "--scrub-memory-every-s", "0.001s", "--scrub-store", "1G", "--scrub-store-every-s", "0.001s"
    )
    with Ranks(node, 2) as ranks:
        ranks.call("connect")
        for step in range(1, 31):
            ranks.call("save", step)
        assert ranks.call("wait", 30) == [("durable", "durable")] * 2
        wait_for(lambda: scrub(node).memory_nbytes > 0 and scrub(node).store_nbytes > 0)
        assert (scrub(node).found, scrub(node).damaged) == (0, [])
        ranks.call("close")
    assert "scrub:" not in node.log_text()


@needs_fuse
def test_a_store_that_hangs_under_a_scrub_costs_no_save_and_raises_no_alarm(tmp_path: Path):
    with FuseStore(str(tmp_path)) as fuse, told(fuse.path, logs=str(tmp_path)) as node:
        node.start(*STORE, "--store-timeout-s", "1.5")
        with Ranks(node) as ranks:
            ranks.call("connect", drain_every=1000)
            save(ranks, 10)
            wait_for(lambda: scrub(node).store_nbytes)
            fuse.hang()
            wait_for(lambda: node.status().workers[0].busy)
            for step in (20, 30, 40, 50):
                assert ranks.call("save", step)[0] < 2
                assert [one[:2] for one in ranks.call("settle", step)] == [("staged", "kept")]
            began = time.monotonic()
            assert node.status().jobs
            assert time.monotonic() - began < 1
            fuse.go_on()
            read = scrub(node).store_nbytes
            wait_for(lambda: scrub(node).store_nbytes > read)
            assert (scrub(node).found, scrub(node).damaged) == (0, [])
            ranks.call("save", 60, drain=True)
            assert ranks.call("wait", 60) == [("durable", "durable")]
            ranks.kill()


def test_the_rate_of_a_daemon_is_kept(node: Node):
    rate = 64 << 20
    node.start("--scrub-memory", str(rate), "--scrub-memory-every-s", "0.001s")
    with Ranks(node) as ranks:
        ranks.call("connect")
        save(ranks, 10)
        wait_for(lambda: scrub(node).memory_nbytes > 0)
        first, began = scrub(node).memory_nbytes, time.monotonic()
        time.sleep(3.0)
        nbytes, took = scrub(node).memory_nbytes - first, time.monotonic() - began
        assert 0 < nbytes <= rate * took + (16 << 20)
        ranks.call("close")
