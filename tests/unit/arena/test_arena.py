"""The arena on a real tmpfs: whose it is, what fits, what a new daemon finds, and that the accounts stay true."""

import errno
import os
import subprocess
import sys
import tempfile
import threading
import time

import pytest

from ckptd.arena import arena as arena_module
from ckptd.arena import slot_memory
from ckptd.arena.arena import Arena
from ckptd.arena.budget import Budget, Limit
from ckptd.shared.base.errors import BudgetError, ConfigError, DamagedError
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.files.arena_location import misplaced
from ckptd.shared.files.mapping import HUGE_NBYTES
from ckptd.shared.files.mounts import Mount
from ckptd.shared.format import arena_paths
from ckptd.shared.format.digest import digest
from ckptd.shared.format.manifest import StockObjects, encode_objects
from ckptd.shared.format.slot import PAGE, SEALS_NBYTES, Seal, SlotState, next_seal
from tests import pythons
from tests.cluster import ROOT
from tests.runs import RUN
from tests.slots import write_slot

KEY = JobKey("/store", "job")
SAVE = SaveId(1, 1, 10, RUN)
CAPACITY = 16 * PAGE


@pytest.fixture
def path():
    with tempfile.TemporaryDirectory(prefix="ckptd-test-", dir="/dev/shm") as directory:
        yield os.path.join(directory, "arena")


@pytest.fixture
def arena(path):
    arena = Arena(path)
    arena.open()
    yield arena
    if arena._lock_fd >= 0:
        os.close(arena._lock_fd)


def a_slot(arena, capacity=CAPACITY, rank=0):
    arena.reserve(rank, 1, capacity)
    return arena.allocate(KEY, rank, capacity)


OBJECTS = StockObjects(b"archives", {"step": (0, 8)})


def sealed(arena, **words):
    """A slot that a rank wrote and sealed."""
    name = a_slot(arena)
    slot = write_slot(arena.slot_path(KEY, name), KEY, SAVE, state=SlotState.SEALED, **words)
    return name, slot


# --- the directory


def test_it_is_made_for_its_owner_only_and_goes_when_empty(path):
    arena = Arena(path)
    arena.open()
    assert os.stat(path).st_mode & 0o777 == 0o700
    arena.close(remove=True)
    assert not os.path.exists(path)


def test_it_stays_when_it_holds_slots(path):
    arena = Arena(path)
    arena.open()
    name = a_slot(arena)
    arena.close(remove=True)
    assert os.path.exists(os.path.join(path, arena_paths.job_dir(KEY), name))


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_a_directory_that_others_may_enter_is_refused(path, mode):
    os.mkdir(path)
    os.chmod(path, mode)
    with pytest.raises(ConfigError, match=f"mode {mode:04o}"):
        Arena(path).open()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_another_user_is_refused(path):
    os.mkdir(path, 0o700)
    os.chown(path, 12345, -1)
    with pytest.raises(ConfigError, match="it is of uid 12345"):
        Arena(path).open()


def test_a_symlink_or_a_file_is_refused(path):
    os.mkdir(path + "-real", 0o700)
    os.symlink(path + "-real", path)
    with pytest.raises(ConfigError, match=r"must be a directory .* it is a symbolic link of uid"):
        Arena(path).open()
    os.unlink(path)
    with open(path, "w"):
        pass
    with pytest.raises(ConfigError, match=r"must be a directory .* it is a file of uid"):
        Arena(path).open()


def test_a_path_that_no_socket_can_have_is_refused_before_anything_is_made(path):
    long = path + "x" * 100
    with pytest.raises(ConfigError, match="may have 107") as caught:
        Arena(long).open()
    assert "--arena" in caught.value.hint
    assert not os.path.exists(long)


def test_a_second_daemon_learns_who_has_it(path):
    code = (
        "import sys, time; from ckptd.arena.arena import Arena; a = Arena(sys.argv[1]); a.open();"
        "print('up', flush=True);"
        "time.sleep(60)"
    )
    with pythons.Popen([sys.executable, "-c", code, path], stdout=subprocess.PIPE, cwd=ROOT) as other:
        try:
            assert other.stdout.readline() == b"up\n"
            with pytest.raises(ConfigError, match=rf"pid {other.pid}\) already serves"):
                Arena(path).open()
        finally:
            other.kill()
    arena = Arena(path)
    arena.open()  # the lock went with its process
    arena.close(remove=True)


def test_a_directory_whose_parent_is_missing_is_reported_and_nothing_is_made(path):
    for wrong in (os.path.join(path, "deep", "arena"), "/dev/shm/ckptd-test-missing/arena"):
        with pytest.raises(ConfigError, match=r"cannot make arena .*: there is no directory") as caught:
            Arena(wrong).open()
        assert "--arena /dev/shm/ckptd-" in caught.value.hint
        assert not os.path.exists(os.path.dirname(wrong))


@pytest.mark.parametrize("place", ["disk", "/proc/ckptd", "/sys/ckptd"])
def test_a_place_that_is_no_memory_is_refused_by_its_file_system(place):
    with tempfile.TemporaryDirectory(prefix="ckptd-test-", dir=ROOT) as directory:
        wrong = os.path.join(directory, "arena") if place == "disk" else place
        with pytest.raises(ConfigError, match=r"lies on \S+ \(mounted at /") as caught:
            Arena(wrong).open()
        assert "tmpfs" in caught.value.hint
        assert not os.path.exists(wrong)


def test_a_mount_of_its_own_counts():
    mounts = [Mount("/", "/", "ext4", ()), Mount("/", "/arena", "tmpfs", ()), Mount("/", "/huge", "hugetlbfs", ())]
    assert misplaced("/arena", mounts) == misplaced("/arena/x", mounts) == misplaced("/huge/x", mounts) == ""
    assert "lies on ext4 (mounted at /)" in misplaced("/arenas", mounts)
    assert misplaced("/arena", []) == "", "nothing is known"


# --- memory


def test_what_does_not_fit_is_refused_with_numbers_and_the_setting(path):
    arena = Arena(path, 8 * CAPACITY)
    arena.open()
    arena.reserve(0, 6, CAPACITY)
    with pytest.raises(BudgetError) as caught:
        arena.reserve(1, 3, CAPACITY)
    assert "rank 1 needs 3 slots of 64.0 KiB = 192.0 KiB" in caught.value.message
    assert "room for 128.0 KiB more" in caught.value.message
    assert "budget_nbytes" in caught.value.hint
    arena.reserve(1, 2, CAPACITY)
    assert arena.used_nbytes == 8 * CAPACITY
    arena.close(remove=False)


def test_the_machines_own_limit_is_named(arena, monkeypatch):
    limit = Limit("memory.max of cgroup /x", 3 * CAPACITY, "ask Slurm")
    monkeypatch.setattr(arena_module, "budget", lambda _: Budget(limit.nbytes_free, (limit,)))
    arena.reserve(0, 2, CAPACITY)
    with pytest.raises(BudgetError, match=r"memory\.max of cgroup /x") as caught:
        arena.reserve(0, 2, CAPACITY)
    assert caught.value.hint == "ask Slurm"


def test_allocating_freeing_and_unlinking_keep_the_accounts(arena):
    arena.reserve(0, 2, CAPACITY)
    names = [arena.allocate(KEY, 0, CAPACITY) for _ in range(2)]
    assert arena.used_nbytes == 2 * CAPACITY
    assert [os.stat(arena.slot_path(KEY, n)).st_blocks * 512 for n in names] == [CAPACITY] * 2  # faulted in
    for name in names:
        arena.unlink(KEY, name)
    assert arena.used_nbytes == 0
    arena.unlink(KEY, names[0])  # again: nothing happens
    assert arena.used_nbytes == 0


def test_an_allocation_that_fails_gives_its_share_back_and_leaves_no_file(arena, monkeypatch):
    def full(fd, start, length):
        raise OSError(errno.ENOSPC, "No space left on device")

    arena.reserve(0, 1, CAPACITY)
    monkeypatch.setattr(os, "posix_fallocate", full)  # what huge pages do not fill
    with pytest.raises(OSError, match="No space"):
        arena.allocate(KEY, 0, CAPACITY)
    assert arena.used_nbytes == 0
    assert os.listdir(arena.job_path(KEY)) == []


def test_an_allocation_whose_job_directory_cannot_be_made_gives_its_share_back(arena):
    with open(os.path.join(arena.path, arena_paths.job_dir(KEY)), "w"):
        pass
    arena.reserve(0, 1, CAPACITY)
    with pytest.raises(OSError, match="exists"):
        arena.allocate(KEY, 0, CAPACITY)
    assert arena.used_nbytes == 0


def test_a_serial_is_never_used_twice(arena):
    first = a_slot(arena)
    arena.unlink(KEY, first)
    arena.adopt_serial(KEY, arena_paths.slot_name(0, 41))
    names = [a_slot(arena), a_slot(arena), a_slot(arena, rank=1)]
    assert names == [arena_paths.slot_name(0, 42), arena_paths.slot_name(0, 43), arena_paths.slot_name(1, 1)]


# --- slots


def test_a_slot_from_allocation_to_vote_and_back(arena):
    name, slot = sealed(arena, objects=OBJECTS)
    assert arena.seal_of(KEY, name).save == SAVE
    with pytest.raises(DamagedError, match="no digests"):
        arena.fragments(KEY, name)
    table = arena.digests(KEY, name, SAVE)
    assert table == slot.digests
    arena.seal_digests(KEY, name, table)
    found = arena.fragments(KEY, name)
    assert found.seal.state is SlotState.DIGESTED
    assert found[1:] == (table, slot.layout_raw, slot.leaves_raw, encode_objects(OBJECTS))
    arena.free(KEY, name)
    assert arena.seal_of(KEY, name).state is SlotState.FREE
    assert arena.digests(KEY, name, SAVE) is None


def test_digests_of_another_save_are_not_taken(arena):
    name, _ = sealed(arena)
    assert arena.digests(KEY, name, SaveId(1, 2, 20, RUN)) is None


def test_a_seal_that_claims_more_than_the_file_has_is_not_read(arena):
    name = a_slot(arena)
    seal = Seal(state=SlotState.SEALED, job=KEY, save=SAVE, image_nbytes=100 * CAPACITY)
    with open(arena.slot_path(KEY, name), "r+b") as file:
        file.seek(CAPACITY - SEALS_NBYTES)
        offset, page = next_seal(bytes(SEALS_NBYTES), seal)
        file.seek(offset, os.SEEK_CUR)
        file.write(page)
    assert arena.digests(KEY, name, SAVE) is None


@pytest.mark.parametrize("part", ["table", "layout", "leaves", "objects"])
def test_a_changed_byte_of_the_tail_is_found_before_it_is_voted_for(arena, part):
    name, _ = sealed(arena, objects=OBJECTS)
    arena.seal_digests(KEY, name, arena.digests(KEY, name, SAVE))
    seal = arena.seal_of(KEY, name)
    with open(arena.slot_path(KEY, name), "r+b") as file:
        file.seek(getattr(seal, f"{part}_offset"))
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(DamagedError, match=part if part != "table" else "digest table"):
        arena.fragments(KEY, name)


def test_the_table_is_vouched_for_only_once_it_is_written(arena):
    name, _ = sealed(arena)
    table = arena.digests(KEY, name, SAVE)
    arena.seal_digests(KEY, name, table)
    assert arena.seal_of(KEY, name).table_digest == digest(table)


# --- what a new daemon finds


def test_a_new_daemon_finds_slots_and_their_seals(arena):
    name, _ = sealed(arena)
    idle = a_slot(arena)
    again = Arena(arena.path)
    found = {s.name: s for s in again.scan()}
    assert set(found) == {name, idle}
    assert (found[name].seal.save, found[name].rank, found[name].capacity) == (SAVE, 0, os.path.getsize(
        arena.slot_path(KEY, name)
    ))  # fmt: skip
    assert found[idle].seal.state is SlotState.FREE
    assert again.used_nbytes == sum(s.capacity for s in found.values())


def test_a_slot_whose_allocation_was_cut_short_is_not_adopted(arena):
    """It has its size from the start and its pages one after the other: a rank would die where none is left."""
    path = os.path.join(arena.job_path(KEY), "r00000-000007.slot")
    with open(path, "wb") as file:
        file.truncate(CAPACITY)
        os.posix_fallocate(file.fileno(), 0, CAPACITY // 2)
    assert arena.scan() == []
    assert not os.path.exists(path)


@pytest.mark.parametrize("whole", [3, 40])
def test_a_slot_of_huge_pages_has_all_its_bytes_and_counts_them(arena, whole):
    capacity = whole * HUGE_NBYTES + PAGE
    arena.reserve(0, 1, capacity)
    name = arena.allocate(KEY, 0, capacity)
    assert os.stat(arena.slot_path(KEY, name)).st_blocks * 512 == arena.used_nbytes == capacity
    assert [found.capacity for found in arena.scan()] == [capacity]


@pytest.mark.parametrize(("refused", "small"), [(0, 0), (1, 32), (2, 32)])
def test_a_large_slot_is_made_in_few_calls_and_in_more_where_one_is_refused(arena, monkeypatch, refused, small):
    """Each call has all cores give back pages that they set aside: 3 ms, a first save of 512 MiB waits for 128."""
    asked, at_the_start = [], []

    def fill_huge(mapping, start, nbytes):
        asked.append(nbytes)
        if start == 0:
            at_the_start.append(nbytes)
            if len(at_the_start) <= refused:
                return False
        slot_memory.fill(mapping, start, nbytes)
        return True

    monkeypatch.setattr(slot_memory, "fill_huge", fill_huge)
    capacity = 64 * HUGE_NBYTES
    arena.reserve(0, 1, capacity)
    name = arena.allocate(KEY, 0, capacity)
    assert 1 <= asked.count(32 << 20) <= 4  # those that were not begun when one was refused are not tried
    assert asked.count(4 << 20) == small
    assert os.stat(arena.slot_path(KEY, name)).st_blocks * 512 == arena.used_nbytes == capacity


def test_debris_is_left_alone_or_removed_and_never_stops_the_scan(arena):
    name, _ = sealed(arena)
    directory = arena.job_path(KEY)
    for junk, size in (
        ("r00000-000007.slot", 10),  # its allocation was cut short
        ("r00000-000008.slot", 5 * PAGE),  # garbage
        ("r0-1.slot", 5 * PAGE),
        ("README", 3),
        ("r00000-0123456789abcdef.rank", 9),
    ):
        with open(os.path.join(directory, junk), "wb") as file:
            file.write(b"\xa5" * size)
    os.mkdir(os.path.join(directory, "r00000-000009.slot"))
    os.symlink("/etc/passwd", os.path.join(directory, "r00000-000010.slot"))
    os.symlink(arena.slot_path(KEY, name), os.path.join(directory, "r00000-000011.slot"))
    with open(os.path.join(arena.path, arena_paths.JOBS, "a-file"), "w"):
        pass
    found = {s.name: s.seal.state for s in Arena(arena.path).scan()}
    assert found == {name: SlotState.SEALED, "r00000-000008.slot": SlotState.FREE}
    assert not os.path.exists(os.path.join(directory, "r00000-000007.slot"))
    assert os.path.exists(os.path.join(directory, "README"))


def test_a_stray_is_removed_with_its_directory(arena):
    a_slot(arena)
    again = Arena(arena.path)
    for slot in again.scan():
        again.remove_stray(slot)
    assert again.used_nbytes == 0
    assert os.listdir(os.path.join(arena.path, arena_paths.JOBS)) == []


def test_a_job_is_forgotten_with_the_files_of_dead_ranks(arena):
    directory = arena.job_path(KEY)
    with open(os.path.join(directory, arena_paths.rank_file_name(0, "s")), "w") as file:
        file.write("{}")
    arena.forget_job(KEY)
    assert not os.path.exists(directory)
    arena.forget_job(KEY)


# --- files that go while somebody looks or works


def test_a_reader_keeps_no_memory_of_slots_that_go(arena, monkeypatch):
    real, over = os.unlink, threading.Event()

    def slow(path, *args, **words):
        time.sleep(0.002)
        real(path, *args, **words)

    monkeypatch.setattr(arena_module.os, "unlink", slow)

    def look():
        while not over.is_set():
            arena.slot_of(KEY, 0, SAVE)

    reader = threading.Thread(target=look)
    reader.start()
    try:
        for _ in range(40):
            arena.unlink(KEY, a_slot(arena))
    finally:
        over.set()
        reader.join()
    assert arena._mappings == {}
    assert arena.used_nbytes == 0


def test_what_is_unlinked_while_it_is_made_is_no_longer_counted(arena, monkeypatch):
    real, parts = arena_module.make_slot, []

    def make(path, capacity):
        for taken in real(path, capacity):
            parts.append(taken)
            if len(parts) == 2:
                arena.forget_job(KEY)
            yield taken

    monkeypatch.setattr(arena_module, "make_slot", make)
    name, capacity = arena_paths.parity_name(SAVE, 1), 5 * 2 * HUGE_NBYTES
    arena.reserve(0, 1, capacity)
    with pytest.raises(FileNotFoundError, match="given up"):
        arena.allocate_file(KEY, name, capacity)
    assert (arena.used_nbytes, arena._reserved, arena._making, len(parts)) == (0, 0, {}, 2)


def test_parity_that_does_not_fit_says_so(arena):
    with pytest.raises(BudgetError, match=r"^parity of step 7 needs [0-9.]+ [KMGTPE]iB, the arena") as caught:
        arena.reserve(0, 1, 1 << 60, "parity of step 7")
    assert "slots" not in caught.value.message
