"""What the daemon may take of the machine, with real daemons and files: bandwidth, priorities, memory, the store."""

import ctypes
import os
import platform
import sys
import time

import pytest
import torch

import ckptd_client
from ckptd.shared.base.ids import JobKey
from ckptd.store.posix.scan import scan
from ckptd.system.files import FileLayer
from ckptd.system.niceness import _IOPRIO_SET
from tests import pythons
from tests.cluster import wait_for

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240)]
MB = 1 << 20
CAP = 16 * MB


def noise(nbytes):
    return {"w": torch.randint(0, 255, (nbytes,), dtype=torch.uint8)}


def ended(handles):
    return all(handle.end is not None for handle in handles)


# --- the drain


def test_a_large_drain_keeps_to_the_cap(node, join):
    node.start("--drain-bandwidth", str(CAP))
    client = join()
    handle = client.save(noise(40 * MB), 1).wait("staged")
    began = time.monotonic()
    handle.wait("durable", 60)
    rate = client.stats().nbytes / (time.monotonic() - began)
    assert 0.4 * CAP < rate <= 1.02 * CAP


def test_many_small_drains_keep_to_the_cap_together(node, join):
    """Each of them is a single write: of a cap that a write has to wait for behind others they would see nothing."""
    node.start("--drain-bandwidth", str(CAP))
    client, state = join(), noise(4 * MB)
    client.prepare(state)
    began = time.monotonic()
    for step in range(8):
        client.save(state, step).wait("durable", 60)
    rate = client.stats().nbytes / (time.monotonic() - began)
    assert 0.02 * CAP < rate <= 1.02 * CAP  # busy cores make it slower


def io_priority_of(thread):
    number = {"x86_64": 252, "aarch64": 31, "ppc64le": 274, "s390x": 283}[platform.machine()]
    return ctypes.CDLL(None, use_errno=True).syscall(number, 1, thread)


def nice_of(thread):
    with open(f"/proc/{thread}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[16])


@pytest.mark.skipif(platform.machine() not in _IOPRIO_SET, reason="the system call's number is not known here")
def test_every_thread_of_the_worker_stands_back_and_none_of_the_daemon(node, join):
    node.start("--worker-nice", "7", "--worker-ionice", "6")
    join().save(noise(MB), 1).wait("durable", 60)
    status = node.status()
    (worker,) = status.workers
    threads = {pid: [int(name) for name in os.listdir(f"/proc/{pid}/task")] for pid in (worker.pid, status.pid)}
    own = nice_of(os.getpid())
    assert len(threads[worker.pid]) > 2
    assert {nice_of(thread) for thread in threads[worker.pid]} == {min(own + 7, 19)}
    assert {io_priority_of(thread) for thread in threads[worker.pid]} == {2 << 13 | 6}
    assert {nice_of(thread) for thread in threads[status.pid]} == {own}
    assert 2 << 13 | 6 not in {io_priority_of(thread) for thread in threads[status.pid]}


# --- a store that is ten times too slow


def held_nbytes(node):
    """By the arena, as the tmpfs counts. Slots may go while they are looked at."""
    total = 0
    for directory, _, names in os.walk(os.path.join(node.arena, "jobs")):
        for name in names:
            try:
                total += os.stat(os.path.join(directory, name)).st_blocks * 512
            except FileNotFoundError:
                continue
    return total


def test_saves_ten_times_faster_than_the_store_take_no_byte_beyond_the_budget(node, join):
    budget = 3 * (2 * MB + 256 * 1024)
    node.start("--drain-bandwidth", "4M", "--budget-nbytes", str(budget))
    client, handles = join(), []
    for step in range(60):
        handles.append(client.save({"w": torch.full((MB // 2,), float(step))}, step))
        assert held_nbytes(node) <= budget + MB  # the rank file, and room for small ones
        time.sleep(0.05)
        if step % 20 == 0:
            status = node.status()
            assert status.used_nbytes <= min(budget, status.budget_nbytes)
    wait_for(lambda: ended(handles))
    ends = [str(handle.end) for handle in handles]
    assert set(ends) == {"durable", "superseded"}
    assert ends[-1] == "durable"
    assert ends.count("superseded") > 40
    assert node.job("job").ends == {end: ends.count(end) for end in set(ends)}
    assert "superseded" in node.complete(sys.executable, "-m", "ckptd", "status", timeout_s=30)
    state = {"w": torch.zeros(MB // 2)}
    restored = client.load(state)
    assert (restored.step, restored.tier, state["w"][0].item()) == (59, "arena", 59.0)


def test_a_save_that_finds_no_slot_beside_a_slow_drain_is_skipped_and_counted(node, join):
    node.start("--drain-bandwidth", "1M", "--slots-per-rank", "2")
    client, state = join(save_timeout_s=0.2), noise(2 * MB)
    client.prepare(state)
    handles = [client.save(state, step) for step in range(5)]
    wait_for(lambda: ended(handles[1:-1]))
    assert {str(handle.end) for handle in handles[2:]} == {"skipped"}
    assert client.load(state).step == 1
    wait_for(lambda: node.job("job").ends.get("skipped") == 3)


# --- cadence and retention


def test_a_cadence_in_seconds_drains_one_in_so_many(node, join):
    node.start()
    every_s = 2
    client, state, ends = join(drain_every=f"{every_s}s"), noise(MB), []
    client.prepare(state)
    began = time.monotonic()
    while "kept" not in ends or ends.count("durable") < 2:
        handle = client.save(state, len(ends)).wait("staged")
        wait_for(lambda handle=handle: handle.end is not None)
        ends.append(str(handle.end))
        time.sleep(0.05)
    assert ends[0] == "durable"
    assert set(ends) == {"durable", "kept"}
    assert ends.count("durable") <= 1 + (time.monotonic() - began) / every_s


def steps_on(store):
    return sorted(e.committed.save.step for e in scan(FileLayer(), JobKey(store, "job")).committed)


def test_multiples_and_pins_stay_with_the_newest(node, join):
    node.start("--keep-last", "2", "--keep-every", "10")
    client, state = join(), noise(MB)
    for step in (5, 10, 15):
        client.save(state, step).wait("durable", 60)
        if step == 5:
            pinned = os.path.join(node.store, "job", "step-000000005.i0001")
            node.complete(sys.executable, "-m", "ckptd", "pin", pinned, timeout_s=30)
    for step in (20, 25, 30, 35):
        client.save(state, step).wait("durable", 60)
    wait_for(lambda: steps_on(node.store) == [5, 10, 20, 30, 35])
    assert client.load(state, step=5).step == 5
    wait_for(lambda: client.steps() == [5, 10, 20, 30, 35])


def test_what_prune_removed_beside_a_live_daemon_is_not_promised_any_more(node, join):
    node.start("--keep-last", "10")
    client, state = join(), noise(MB)
    for step in range(4):
        client.save(state, step).wait("durable", 60)
    prune = [sys.executable, "-m", "ckptd", "prune", "--keep-last", "1", node.store]
    pythons.run(prune, env=node.environ(), check=True, capture_output=True, timeout=30)
    with pytest.raises(ckptd_client.RestoreError, match="no checkpoint of step 1"):
        client.load(state, step=1)
    assert client.steps() == [3]
    durable = [c.step for c in node.job("job").checkpoints if "pfs" in c.tiers]
    assert durable == [3]
    client.save(state, 4).wait("durable", 60)
    assert client.steps() == [3, 4]
