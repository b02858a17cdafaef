"""The store's sequences on a real directory: repetition, races, refusals, fallbacks."""

import contextlib
import errno
import fcntl
import itertools
import mmap
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import msgspec
import pytest

from ckptd.checkpoint.verify import verify_path
from ckptd.shared.base.errors import CkptdError, DamagedError, UsageError
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.format.committed import TRASH_PREFIX
from ckptd.shared.format.manifest import COMMITTED, LATEST
from ckptd.shared.format.slot import align_up
from ckptd.store import image
from ckptd.store.image import Flow, Image
from ckptd.store.posix import image_writer
from ckptd.store.posix.commit import commit, write_vote
from ckptd.store.posix.image_writer import make_set, put_files, write_image
from ckptd.store.posix.removal import remove_checkpoint, remove_partial, sweep_trash
from ckptd.store.posix.scan import Place, scan
from ckptd.store.posix.store import PosixStore
from ckptd.store.worker import other_jobs
from ckptd.system.files import FileLayer, is_temp, temp_name
from tests.flips import flip
from tests.records import pin, unpin
from tests.runs import MANIFEST, RUN, SET, VOTES, manifest_in, vote_in
from tests.slots import Slot, make_vote, some_tensors, write_slot
from tests.stored import records_of

SAVE = SaveId(3, 7, 100, RUN)
OLDER = SaveId(3, 6, 90, RUN)


@pytest.fixture
def key(tmp_path) -> JobKey:
    (tmp_path / "store").mkdir()
    return JobKey(str(tmp_path / "store"), "demo")


@pytest.fixture
def shm() -> Iterator[str]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        yield path


def image_of(slot: Slot, **more) -> Image:
    pages = mmap.mmap(-1, align_up(len(slot.image)))  # aligned for direct writes
    pages[: len(slot.image)] = slot.image
    return Image(slot.layout.file, len(slot.image), memoryview(pages), **more)


def drained(fs: FileLayer, key: JobKey, save: SaveId, *, world_size: int = 2, nodes: int = 2) -> Place:
    """A save whose first nodes have written and voted, one rank each."""
    place = Place(key, save)
    make_set(fs, place, SET)
    for rank in range(nodes):
        slot = write_slot(f"{key.store}/slot", key, save, rank=rank, world_size=world_size)
        write_image(fs, place, SET, image_of(slot), Flow())
        write_vote(fs, key, make_vote(key, save, f"node{rank}", [slot], world_size=world_size))
    return place


def committed(fs: FileLayer, key: JobKey, save: SaveId) -> Place:
    place = drained(fs, key, save)
    assert commit(fs, key, save, "test").note == ""
    return place


# -- scan --


def test_scan_of_nothing_is_empty(key) -> None:
    for where in (key, JobKey("/nowhere", "demo")):
        found = scan(FileLayer(), where)
        assert (found.committed, found.partials, found.problems) == ([], [], [])


def test_other_jobs_are_listed_with_their_newest_steps_the_likest_name_first(key) -> None:
    os.makedirs(f"{key.store}/no-job-of-ours")
    for job in ("alpha", "beta", "demo"):
        for save in (SAVE, OLDER):
            os.makedirs(f"{key.store}/{job}/{save.dirname}")
    os.makedirs(f"{key.store}/.hidden/{SAVE.dirname}")
    open(f"{key.store}/zfile", "w").close()
    assert other_jobs(PosixStore(key.store), "dmeo") == ["demo (step 100)", "alpha (step 100)", "beta (step 100)"]
    assert other_jobs(PosixStore(key.store), "demo") == ["alpha (step 100)", "beta (step 100)"]
    assert other_jobs(PosixStore(f"{key.store}/none"), "demo") == []


def test_other_jobs_are_a_few_of_many(key) -> None:
    for number in range(40):
        os.makedirs(f"{key.store}/run{number:02d}/{SAVE.dirname}")
    some = [f"run{number:02d} (step 100)" for number in range(5)]
    assert other_jobs(PosixStore(key.store), key.job) == [*some, "..."]


def test_scan_lists_newest_first_by_incarnation_and_counter_not_by_step(key) -> None:
    fs = FileLayer()
    for save in (SaveId(1, 5, 900, RUN), SaveId(2, 1, 20, RUN), SaveId(1, 6, 30, RUN)):
        committed(fs, key, save)
    drained(fs, key, SaveId(2, 2, 40, RUN), nodes=1)
    found = scan(fs, key)
    assert [entry.committed.save for entry in found.committed] == [
        SaveId(2, 1, 20, RUN),
        SaveId(1, 6, 30, RUN),
        SaveId(1, 5, 900, RUN),
    ]
    (partial,) = found.partials
    assert (partial.voted, partial.world_size, partial.finishable) == (["node0"], 2, False)
    assert partial.missing == "1 of 2 ranks have no vote: 1"


def test_scan_lists_what_it_cannot_read_as_problems(key) -> None:
    fs = FileLayer()
    good = committed(fs, key, SAVE)
    os.makedirs(f"{key.store}/demo/step-000000001.i0001")
    other = f"{key.store}/demo/step-000000002.i0003"
    os.makedirs(other)
    for path in (f"{good.final}/{COMMITTED}", manifest_in(good.final)):
        os.link(path, f"{other}/{os.path.basename(path)}")
    found = scan(fs, key)
    assert [entry.dirname for entry in found.committed] == ["step-000000100.i0003"]
    assert len(found.problems) == 2
    assert "step-000000001.i0001" in found.problems[0]
    assert "the name does not agree" in found.problems[1]


def test_scan_names_a_damaged_vote(key) -> None:
    fs = FileLayer()
    place = drained(fs, key, SAVE)
    flip(vote_in(place.partial, 1), 60)
    (partial,) = scan(fs, key).partials
    assert not partial.finishable
    assert partial.voted == ["node0"]
    assert f"{place.partial}/{VOTES[1]}" in partial.missing
    with pytest.raises(DamagedError, match=r"node1\."):
        commit(fs, key, SAVE, "test")


# -- images --


@pytest.mark.parametrize("where", ["disk", "shm"])
@pytest.mark.parametrize("nbytes", [40, 4096 * 5, 4096 * 9 + 17])
def test_an_image_arrives_whole(key, shm, monkeypatch, where, nbytes) -> None:
    monkeypatch.setattr(image_writer, "CHUNK_NBYTES", 8192)
    if where == "shm":
        key = JobKey(shm, "demo")
    fs, place, seen = FileLayer(), Place(key, SAVE), []
    slot = write_slot(f"{shm}/slot", key, SAVE, some_tensors(nbytes))
    make_set(fs, place, SET)
    write_image(fs, place, SET, image_of(slot), Flow(report=lambda done: seen.append(sum(done.values()))))
    with open(f"{place.partial}/{slot.layout.file}", "rb") as file:
        assert file.read() == slot.image
    assert seen[-1] == len(slot.image)
    assert seen == sorted(seen)
    assert sorted(os.listdir(place.partial)) == [slot.layout.file, "sets"]
    assert os.listdir(place.set_dir(SET)) == []


@pytest.mark.parametrize("refuses", ["open", "write"])
def test_a_file_system_without_o_direct_is_written_buffered(key, tmp_path, monkeypatch, refuses) -> None:
    real_open, real_pwrite, direct_writes = os.open, os.pwrite, []

    def refusing_open(path, flags, mode=0o777, *, dir_fd=None):
        if refuses == "open" and flags & os.O_DIRECT:
            real_open(path, flags & ~os.O_DIRECT, mode, dir_fd=dir_fd)  # the kernel creates the file, then refuses
            raise OSError(errno.EINVAL, "Invalid argument", path)
        return real_open(path, flags, mode, dir_fd=dir_fd)

    def refusing_pwrite(fd, data, offset):
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            direct_writes.append(offset)
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_pwrite(fd, data, offset)

    fs, place = FileLayer(), Place(key, SAVE)
    make_set(fs, place, SET)
    slot = write_slot(tmp_path / "slot", key, SAVE)
    monkeypatch.setattr(os, "open", refusing_open)
    monkeypatch.setattr(os, "pwrite", refusing_pwrite)
    write_image(fs, place, SET, image_of(slot), Flow())
    with open(f"{place.partial}/{slot.layout.file}", "rb") as file:
        assert file.read() == slot.image
    assert bool(direct_writes) == (refuses == "write")


def test_an_image_whose_slot_changed_hands_gets_no_name(key, tmp_path) -> None:
    fs, place = FileLayer(), Place(key, SAVE)
    make_set(fs, place, SET)
    slot = write_slot(tmp_path / "slot", key, SAVE)

    def changed() -> None:
        raise CkptdError("changed hands")

    with pytest.raises(CkptdError, match="changed hands"):
        write_image(fs, place, SET, image_of(slot, check_source=changed), Flow())
    assert os.listdir(place.partial) == ["sets"]
    (left,) = os.listdir(place.set_dir(SET))
    assert is_temp(left, slot.layout.file)
    open_image = contextlib.nullcontext(image_of(slot))
    assert put_files(fs, place, SET, [lambda: open_image], Flow())  # and the next try takes the leftover away
    assert sorted(os.listdir(place.partial)) == [slot.layout.file, "sets"]
    assert os.listdir(place.set_dir(SET)) == []


def test_a_failed_write_is_raised_and_the_rest_is_not_written(key, tmp_path, monkeypatch) -> None:
    class Full(FileLayer):
        writes = 0

        def pwrite(self, fd: int, data: bytes | memoryview, offset: int) -> None:
            self.writes += 1
            time.sleep(0.002)  # as long as a write takes: else all have failed before the first is heard of
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(image_writer, "CHUNK_NBYTES", 4096)
    fs, place = Full(), Place(key, SAVE)
    make_set(fs, place, SET)
    slot = write_slot(tmp_path / "slot", key, SAVE, some_tensors(4096 * 200))
    with pytest.raises(OSError, match="No space"):
        write_image(fs, place, SET, image_of(slot), Flow())
    assert fs.writes < 200
    assert not os.path.exists(f"{place.partial}/{slot.layout.file}")


def test_a_bandwidth_cap_spaces_the_writes(monkeypatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(image.time, "monotonic", lambda: 100.0)
    monkeypatch.setattr(image.time, "sleep", slept.append)
    flow = Flow(bytes_per_s=1000)
    for _ in range(3):
        flow.pace(500)
    assert slept == [0.5, 1.0, 1.5]


# -- commit --


def test_a_commit_is_valid_and_latest_points_to_it(key) -> None:
    fs = FileLayer()
    place = committed(fs, key, SAVE)
    report = verify_path(place.final)
    assert report.ok, report.problems
    assert os.readlink(f"{place.job_dir}/{LATEST}") == SAVE.dirname
    assert not os.path.exists(place.partial)


def test_a_commit_can_be_repeated_and_latest_never_goes_back(key) -> None:
    fs = FileLayer()
    committed(fs, key, SaveId(3, 1, 100, RUN))
    committed(fs, key, SaveId(3, 2, 50, RUN))
    assert commit(fs, key, SaveId(3, 1, 100, RUN), "again").committed.step == 100
    assert os.readlink(f"{key.store}/demo/{LATEST}") == SaveId(3, 2, 50, RUN).dirname


def test_a_latest_that_cannot_be_set_is_a_note(key) -> None:
    fs = FileLayer()
    os.makedirs(f"{key.store}/demo/{LATEST}/in-the-way")
    drained(fs, key, SAVE)
    outcome = commit(fs, key, SAVE, "test")
    assert LATEST in outcome.note
    assert outcome.committed.save == SAVE


@pytest.mark.parametrize("error", [errno.EDQUOT, errno.ENOSPC])
@pytest.mark.parametrize("call", ["symlink", "rename"])
def test_a_store_that_is_full_when_latest_is_replaced(key, error, call) -> None:
    """The checkpoint counts, the former link stays whole, and the next commit sets it."""

    def refuse(source: str, path: str) -> None:
        if LATEST in os.path.basename(path):
            raise OSError(error, os.strerror(error), path)
        getattr(FileLayer, call)(full, source, path)

    committed(FileLayer(), key, OLDER)
    drained(FileLayer(), key, SAVE)
    full = FileLayer()
    setattr(full, call, refuse)
    outcome = commit(full, key, SAVE, "test")
    assert (outcome.committed.save, os.strerror(error) in outcome.note) == (SAVE, True)
    names = os.listdir(f"{key.store}/demo")
    assert not [name for name in names if is_temp(name)], "no half of a link is left"
    assert os.readlink(f"{key.store}/demo/{LATEST}") == OLDER.dirname
    assert scan(FileLayer(), key).committed[0].committed.save == SAVE, "what loads go by is not the link"
    assert commit(FileLayer(), key, SAVE, "test").note == ""
    assert os.readlink(f"{key.store}/demo/{LATEST}") == SAVE.dirname


@pytest.mark.parametrize("error", [errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY])
def test_a_rename_that_another_committer_did_first_is_success(key, error) -> None:
    class Beaten(FileLayer):
        def rename(self, src: str, dst: str) -> None:
            if dst == Place(key, SAVE).final:
                commit(FileLayer(), key, SAVE, "the other one")
                raise OSError(error, os.strerror(error), src)
            super().rename(src, dst)

    place = drained(FileLayer(), key, SAVE)
    assert commit(Beaten(), key, SAVE, "test").committed.save == SAVE
    assert verify_path(place.final).ok


def test_another_save_at_the_target_is_an_error(key) -> None:
    fs = FileLayer()
    theirs = committed(fs, key, SaveId(3, 1, 100, RUN))
    drained(fs, key, SAVE)
    with pytest.raises(DamagedError, match="holds job 'demo', step 100 ") as caught:
        commit(fs, key, SAVE, "test")
    assert "mv" in caught.value.hint
    assert verify_path(theirs.final).ok


def test_a_commit_refuses_missing_votes_and_files(key) -> None:
    fs = FileLayer()
    place = drained(fs, key, SAVE, nodes=1)
    with pytest.raises(DamagedError, match="cover 1 of 2 ranks"):
        commit(fs, key, SAVE, "test")
    drained(fs, key, SAVE)
    os.truncate(f"{place.partial}/r00001-p00.safetensors", 100)
    with pytest.raises(DamagedError, match=r"r00001-p00\.safetensors: 100 bytes"):
        commit(fs, key, SAVE, "test")
    os.unlink(f"{place.partial}/r00001-p00.safetensors")
    with pytest.raises(DamagedError, match=r"r00001-p00\.safetensors: missing"):
        commit(fs, key, SAVE, "test")
    assert not os.path.exists(place.final)


class Interleaved(FileLayer):
    """Runs another committer to its end before the n-th call that changes something."""

    def __init__(self, at: int, other) -> None:
        self.left, self.other = at, other

    def _tick(self) -> None:
        self.left -= 1
        if self.left == -1:
            self.other()

    def open_write(self, path: str, *, direct: bool) -> int:
        self._tick()
        return super().open_write(path, direct=direct)

    def publish(self, temp: str, path: str) -> bool:
        self._tick()
        return super().publish(temp, path)

    def fsync_dir(self, path: str) -> None:
        self._tick()
        super().fsync_dir(path)

    def rename(self, src: str, dst: str) -> None:
        self._tick()
        super().rename(src, dst)

    def size(self, path: str) -> int:
        self._tick()
        return super().size(path)


@pytest.mark.parametrize("at", range(14))
def test_two_committers_of_different_versions_at_once_are_harmless(key, at) -> None:
    place = drained(FileLayer(), key, SAVE)
    outcome = commit(Interleaved(at, lambda: commit(FileLayer(), key, SAVE, "ckptd 2")), key, SAVE, "ckptd 1")
    assert outcome.committed.save == SAVE
    report = verify_path(place.final)
    assert report.ok, report.problems


@pytest.mark.parametrize("at", range(14))
def test_a_committer_that_dies_anywhere_leaves_work_for_another_version_to_finish(key, at) -> None:
    class DiedError(Exception):
        pass

    def die() -> None:
        raise DiedError

    place = drained(FileLayer(), key, SAVE)
    try:
        commit(Interleaved(at, die), key, SAVE, "ckptd 1")
    except DiedError:
        commit(FileLayer(), key, SAVE, "ckptd 2")
    assert verify_path(place.final).ok
    assert not [name for name in os.listdir(place.final) if is_temp(name)]


def test_many_committers_in_threads(key) -> None:
    for step in range(5):
        save = SaveId(1, step, step, RUN)
        place, barrier = drained(FileLayer(), key, save), threading.Barrier(3)

        def race(n: int, save=save, barrier=barrier) -> SaveId:
            barrier.wait()
            return commit(FileLayer(), key, save, f"ckptd {n}").committed.save

        with ThreadPoolExecutor(3) as pool:
            assert list(pool.map(race, range(3))) == [save] * 3
        assert verify_path(place.final).ok


def test_a_manifest_that_is_torn_is_replaced_and_another_one_goes(key) -> None:
    fs = FileLayer()
    first = committed(fs, key, SAVE)
    name = os.path.basename(manifest_in(first.final))
    shutil.rmtree(first.final)
    place = drained(fs, key, SAVE)
    for one in (name, f"ckptd.{0:016x}.manifest"):
        with open(f"{place.partial}/{one}", "wb") as file:
            file.write(b"torn")
    commit(fs, key, SAVE, "test")
    assert os.path.basename(manifest_in(place.final)) == name
    assert verify_path(place.final).ok


def test_without_hard_links_a_commit_still_works(key, monkeypatch) -> None:
    def refuse(src, dst, **_):
        raise OSError(errno.EPERM, "Operation not permitted", src)

    monkeypatch.setattr(os, "link", refuse)
    assert verify_path(committed(FileLayer(), key, SAVE).final).ok


# -- removal --


def test_the_newest_checkpoint_is_never_removed(key) -> None:
    fs = FileLayer()
    old, new = committed(fs, key, SaveId(1, 1, 1, RUN)), committed(fs, key, SaveId(1, 2, 2, RUN))
    with pytest.raises(CkptdError, match="newest committed"):
        remove_checkpoint(fs, key, new.save)
    remove_checkpoint(fs, key, old.save)
    remove_checkpoint(fs, key, old.save)
    with pytest.raises(CkptdError, match="newest committed"):
        remove_checkpoint(fs, key, new.save)
    assert sorted(os.listdir(new.job_dir)) == [LATEST, new.save.dirname]


@pytest.mark.parametrize("moment", ["listdir", "fsync_dir", "replace_symlink", "rename", "rmtree"])
def test_a_pin_that_is_made_while_a_removal_runs_is_kept_or_refused(key, monkeypatch, moment) -> None:
    """Whoever is told that a checkpoint is pinned finds it there ever after."""
    fs = FileLayer()
    old, _ = committed(fs, key, SaveId(1, 1, 1, RUN)), committed(fs, key, SaveId(1, 2, 2, RUN))
    fs.replace_symlink(old.save.dirname, f"{old.job_dir}/{LATEST}")
    told, real = [], getattr(FileLayer, moment)

    def pin_first(*args):
        if not told:
            told.append(False)
            with contextlib.suppress(UsageError):
                told[0] = pin(fs, key, old.save.dirname)
        return real(*args)

    monkeypatch.setattr(FileLayer, moment, pin_first)
    gone = remove_checkpoint(fs, key, old.save)
    assert os.path.isdir(old.final) is not gone
    assert told == [not gone]
    assert moment == "rmtree" or not gone
    assert unpin(fs, key, old.save.dirname) is not gone


@pytest.mark.parametrize("end", ["", "/"])  # a link that somebody made by hand
def test_a_removal_that_cannot_move_latest_away_removes_nothing(key, monkeypatch, end) -> None:
    fs = FileLayer()
    old, _ = committed(fs, key, SaveId(1, 1, 1, RUN)), committed(fs, key, SaveId(1, 2, 2, RUN))
    fs.replace_symlink(old.save.dirname + end, f"{old.job_dir}/{LATEST}")

    def full(self, target, path):
        raise OSError(errno.EDQUOT, "Disk quota exceeded", path)

    monkeypatch.setattr(FileLayer, "replace_symlink", full)
    with pytest.raises(CkptdError, match=r"stays: .*quota"):
        remove_checkpoint(fs, key, old.save)
    assert os.path.isdir(old.final)
    assert os.path.isdir(f"{old.job_dir}/{LATEST}")
    monkeypatch.undo()
    assert remove_checkpoint(fs, key, old.save)


def test_latest_never_dangles_after_a_removal(key) -> None:
    fs = FileLayer()
    old, new = committed(fs, key, SaveId(1, 1, 1, RUN)), committed(fs, key, SaveId(1, 2, 2, RUN))
    fs.replace_symlink(old.save.dirname, f"{old.job_dir}/{LATEST}")
    remove_checkpoint(fs, key, old.save)
    assert os.readlink(f"{old.job_dir}/{LATEST}") == new.save.dirname


def test_what_is_no_valid_checkpoint_is_not_removed_as_one(key) -> None:
    fs = FileLayer()
    old = committed(fs, key, SaveId(1, 1, 1, RUN))
    committed(fs, key, SaveId(1, 2, 2, RUN))
    os.truncate(manifest_in(old.final), 3)
    with pytest.raises(DamagedError, match=r"ckptd\..*manifest: 3 bytes, COMMITTED says "):
        remove_checkpoint(fs, key, old.save)


def test_a_removal_takes_committed_away_first_and_of_a_link_the_link_alone(key) -> None:
    """So that whoever finds it half removed, under whatever name, finds no checkpoint."""

    class Told(FileLayer):
        done: ClassVar[list[str]] = []

        def unlink(self, path: str) -> None:
            self.done.append(os.path.basename(path))
            super().unlink(path)

        def fsync_dir(self, path: str) -> None:
            self.done.append(os.path.basename(path).split("-")[0])
            super().fsync_dir(path)

    fs = Told()
    old, new = (committed(fs, key, SaveId(1, counter, counter, RUN)) for counter in (1, 2))
    os.symlink(new.final, f"{new.job_dir}/{TRASH_PREFIX}link")
    Told.done.clear()
    remove_checkpoint(fs, key, old.save)
    at = Told.done.index(COMMITTED)
    assert Told.done[at : at + 2] == [COMMITTED, ".trash"]
    assert not [name for name in Told.done[:at] if name == ".metadata" or name.startswith((MANIFEST, "r0"))]
    sweep_trash(fs, key)
    assert [entry.committed.save for entry in scan(fs, key).committed] == [new.save]
    assert not [name for name in os.listdir(new.job_dir) if name.startswith(TRASH_PREFIX)]


def test_partials_and_leftovers_go(key) -> None:
    fs = FileLayer()
    place = drained(fs, key, SAVE)
    remove_partial(fs, key, SAVE)
    remove_partial(fs, key, SAVE)
    assert os.listdir(place.job_dir) == []
    os.makedirs(f"{place.job_dir}/.trash-x/votes")
    os.symlink("x", temp_name(f"{place.job_dir}/{LATEST}"))
    assert sweep_trash(fs, key) == 2
    assert os.listdir(place.job_dir) == []
    assert sweep_trash(fs, JobKey("/nowhere", "demo")) == 0


class _Nfs(FileLayer):
    """Files that somebody reads: unlink gives them another name, which cannot be unlinked."""

    def __init__(self, read: str, error: int = errno.EBUSY) -> None:
        self._read, self._error = read, error

    def unlink(self, path: str) -> None:
        head, name = os.path.split(path)
        if name.startswith(".nfs"):
            raise OSError(self._error, os.strerror(self._error), path)
        if name == self._read:
            os.rename(path, os.path.join(head, ".nfs0001"))
        else:
            super().unlink(path)


def _files_below(path: str) -> list[str]:
    return sorted(name for _, _, names in os.walk(path) for name in names)


@pytest.mark.parametrize("error", [errno.EBUSY, errno.ESTALE])
def test_a_file_that_another_process_reads_over_nfs_keeps_nothing_else(key, error) -> None:
    old, new = committed(FileLayer(), key, OLDER), committed(FileLayer(), key, SAVE)
    os.mknod(f"{old.final}/.nfs0000")  # removed already, and still read
    with pytest.raises(OSError, match=os.strerror(error)):
        remove_checkpoint(_Nfs("r00000-p00.safetensors", error), key, old.save)
    (trash,) = (name for name in os.listdir(old.job_dir) if name.startswith(TRASH_PREFIX))
    assert _files_below(f"{old.job_dir}/{trash}") == [".nfs0000", ".nfs0001"], "all other bytes are free"
    assert [entry.committed.save for entry in scan(FileLayer(), key).committed] == [SAVE]
    remove_checkpoint(_Nfs("", error), key, old.save)  # it is gone for whoever asks again
    os.makedirs(f"{old.job_dir}/{TRASH_PREFIX}z/votes")
    assert sweep_trash(_Nfs("", error), key) == 1, "and holds up nobody"
    for name in (".nfs0000", ".nfs0001"):  # the readers are done
        os.unlink(f"{old.job_dir}/{trash}/{name}")
    assert sweep_trash(_Nfs("", error), key) == 1
    assert sorted(os.listdir(new.job_dir)) == [LATEST, new.save.dirname]


class _Meanwhile(FileLayer):
    """Somebody else does something right after the job's directory was listed."""

    def __init__(self, key: JobKey, what) -> None:
        self._path, self._what = os.path.join(key.store, key.job), what

    def listdir(self, path: str) -> list[str]:
        names = super().listdir(path)
        if path == self._path and self._what is not None:
            what, self._what = self._what, None
            what()
        return names


def test_a_checkpoint_that_retention_removes_under_a_scan_is_no_problem(key) -> None:
    fs = FileLayer()
    committed(fs, key, OLDER)
    committed(fs, key, SAVE)
    found = scan(_Meanwhile(key, lambda: remove_checkpoint(fs, key, OLDER)), key)
    assert [entry.committed.save for entry in found.committed] == [SAVE]
    assert found.problems == []


def test_an_unfinished_one_that_is_removed_or_committed_under_a_scan_is_not_listed(key) -> None:
    fs = FileLayer()
    drained(fs, key, OLDER)
    found = scan(_Meanwhile(key, lambda: remove_partial(fs, key, OLDER)), key)
    assert (found.partials, found.problems) == ([], [])
    drained(fs, key, SAVE)
    found = scan(_Meanwhile(key, lambda: commit(fs, key, SAVE, "test")), key)
    assert (found.partials, found.problems) == ([], [])


def test_a_checkpoint_that_lacks_a_file_is_still_a_problem(key) -> None:
    fs = FileLayer()
    place = committed(fs, key, SAVE)
    os.unlink(os.path.join(place.final, COMMITTED))
    found = scan(fs, key)
    assert found.committed == []
    assert COMMITTED in found.problems[0]


# -- a rank that two nodes drained --


def voted_twice(fs: FileLayer, key: JobKey, *, seed: int = SAVE.step + 1) -> Place:
    """Rank 1 was drained by node1, and again by node2, which has fetched the segment."""
    place = drained(fs, key, SAVE)
    again = write_slot(f"{key.store}/slot", key, SAVE, some_tensors(seed=seed), rank=1, world_size=2)
    write_vote(fs, key, make_vote(key, SAVE, "node2", [again], world_size=2))
    return place


def test_two_votes_for_a_rank_that_agree_are_committed(key) -> None:
    fs = FileLayer()
    place = voted_twice(fs, key)
    (partial,) = scan(fs, key).partials
    assert partial.finishable
    commit(fs, key, SAVE, "test")
    assert [entry.committed.save for entry in scan(fs, key).committed] == [SAVE]
    report = verify_path(place.final)
    assert not report.problems


def test_two_votes_for_a_rank_that_differ_are_refused_by_name(key) -> None:
    fs = FileLayer()
    voted_twice(fs, key, seed=2)
    with pytest.raises(DamagedError, match="node1 and node2 differ about r00001"):
        commit(fs, key, SAVE, "test")


LATER_SET = "e00000002-89abcdef"


def voted_again(fs: FileLayer, key: JobKey, *, seed: int = SAVE.step + 1) -> Place:
    """node1 votes in the set that it came to since; its first vote is still in the old one's directory."""
    place = drained(fs, key, SAVE)
    slot = write_slot(f"{key.store}/slot", key, SAVE, some_tensors(seed=seed), rank=1, world_size=2)
    vote = make_vote(key, SAVE, "node1", [slot], world_size=2)
    write_vote(fs, key, msgspec.structs.replace(vote, folder=LATER_SET))
    return place


def test_a_node_whose_set_has_changed_counts_once_by_its_later_vote(key) -> None:
    fs = FileLayer()
    place = voted_again(fs, key)
    (partial,) = scan(fs, key).partials
    assert (partial.finishable, partial.voted) == (True, ["node0", "node1"])
    commit(fs, key, SAVE, "test")
    manifest = records_of(place.final).manifest
    folders = [os.path.dirname(manifest.place_of(ref)) for ref in manifest.votes]
    assert folders == [f"sets/{SET}", f"sets/{LATER_SET}"]
    assert not verify_path(place.final).problems


def test_the_later_vote_counts_also_where_the_first_said_something_else(key) -> None:
    """Whatever it drained before: the node says now what lies there."""
    fs = FileLayer()
    place = voted_again(fs, key, seed=2)
    commit(fs, key, SAVE, "test")
    layout = records_of(place.final)[1].digests
    assert layout == write_slot(f"{key.store}/slot", key, SAVE, some_tensors(seed=2), rank=1, world_size=2).digests


def test_a_vote_that_comes_while_two_commit_leaves_the_first_manifest_in_force(key) -> None:
    class Between(FileLayer):
        """Another committer comes, after one more vote, when the manifest lies there and COMMITTED does not."""

        came = False

        def rename(self, source: str, target: str) -> None:
            if target.endswith(COMMITTED) and not self.came:
                self.came = True
                voted_twice(FileLayer(), key)
                with pytest.raises(OSError, match="gone"):
                    commit(Dying(), key, SAVE, "other")
            super().rename(source, target)

    class Dying(FileLayer):
        def rename(self, source: str, target: str) -> None:
            if target.endswith(COMMITTED):
                raise OSError(errno.EIO, "gone")
            super().rename(source, target)

    place = drained(FileLayer(), key, SAVE)
    commit(Between(), key, SAVE, "test")
    report = verify_path(place.final)
    assert not report.problems


class Meeting(FileLayer):
    """Another process votes at the one call of a commit that has the number."""

    def __init__(self, number: int, meet: Callable[[], None]) -> None:
        super().__init__()
        self._left, self._meet = number, meet

    def _call(self) -> None:
        self._left -= 1
        if self._left == 0:
            self._meet()

    def read_file(self, path: str, max_nbytes: int) -> bytes:
        self._call()
        return super().read_file(path, max_nbytes)

    def rename(self, source: str, target: str) -> None:
        self._call()
        super().rename(source, target)

    def fsync_dir(self, path: str) -> None:
        self._call()
        super().fsync_dir(path)

    @property
    def reached(self) -> bool:
        return self._left <= 0


@pytest.mark.parametrize("number", range(1, 11))
def test_a_vote_that_is_written_while_another_process_commits_breaks_no_checkpoint(key, number) -> None:
    """The same node says more than before, between any two calls of the commit."""
    place = drained(FileLayer(), key, SAVE)
    slots = [write_slot(f"{key.store}/slot{rank}", key, SAVE, rank=rank, world_size=2) for rank in range(2)]
    more = make_vote(key, SAVE, "node1", slots, world_size=2)

    def vote() -> None:
        with contextlib.suppress(FileNotFoundError):  # it is committed: the vote is not needed any more
            write_vote(FileLayer(), key, more)

    fs = Meeting(number, vote)
    commit(fs, key, SAVE, "test")
    assert fs.reached
    assert not verify_path(place.final).problems
    assert [record.rank for record in records_of(place.final)] == [0, 1]


def test_of_votes_of_one_epoch_that_with_more_ranks_counts(key) -> None:
    """Whichever of the two directories is the later by name."""
    fs = FileLayer()
    for folder in ("e00000001-00000000", "e00000001-ffffffff"):
        place = drained(fs, key, SAVE, nodes=0)
        slots = [write_slot(f"{key.store}/slot{rank}", key, SAVE, rank=rank, world_size=2) for rank in range(2)]
        for slot in slots:
            write_image(fs, place, SET, image_of(slot), Flow())
        other = {"e00000001-00000000": "e00000001-ffffffff"}.get(folder, "e00000001-00000000")
        for where, said in ((folder, slots), (other, slots[1:])):
            vote = make_vote(key, SAVE, "node1", said, world_size=2)
            write_vote(fs, key, msgspec.structs.replace(vote, folder=where))
        assert scan(fs, key).partials[0].finishable
        commit(fs, key, SAVE, "test")
        assert not verify_path(place.final).problems
        shutil.rmtree(place.final)


def voted_for_both(fs: FileLayer, key: JobKey, *, seed: int = SAVE.step + 1) -> str:
    """node1 has voted for its rank, and then for both. Where its first vote lies."""
    place = drained(fs, key, SAVE)
    first = str(vote_in(place.partial, 1))
    seeds = (SAVE.step, seed)
    slots = [
        write_slot(f"{key.store}/slot{rank}", key, SAVE, some_tensors(seed=of), rank=rank, world_size=2)
        for rank, of in enumerate(seeds)
    ]
    write_vote(fs, key, make_vote(key, SAVE, "node1", slots, world_size=2))
    return first


def test_a_damaged_vote_of_a_node_that_has_voted_again_is_not_needed(key) -> None:
    fs = FileLayer()
    flip(voted_for_both(fs, key), 60)
    assert scan(fs, key).partials[0].finishable
    commit(fs, key, SAVE, "test")
    assert [record.rank for record in records_of(Place(key, SAVE).final)] == [0, 1]


def test_two_votes_of_a_node_that_differ_about_a_rank_are_not_committed(key) -> None:
    fs = FileLayer()
    voted_for_both(fs, key, seed=2)
    assert "node1 and node1 differ about r00001" in scan(fs, key).partials[0].missing
    with pytest.raises(DamagedError, match="node1 and node1 differ about r00001"):
        commit(fs, key, SAVE, "test")


def cut(nbytes: int, seconds_of) -> list[tuple[int, int]]:
    """The ranges of a file's writes, each of which takes as long as it is said to."""
    cuts, found = image_writer._Cuts(nbytes), []
    while (one := cuts.next()) is not None:
        found.append(one)
        cuts.took(one[1] - one[0], seconds_of(one[1] - one[0]))
    return found


def test_writes_are_as_large_as_the_store_takes_and_lie_where_large_ones_lie() -> None:
    mb = 1 << 20
    assert cut(50 * mb, lambda n: n / (500 * mb)) == [
        (0, mb), (mb, 16 * mb), (16 * mb, 32 * mb), (32 * mb, 48 * mb), (48 * mb, 50 * mb)
    ]  # fmt: skip
    slow = cut(4 * mb, lambda n: n / (2 * mb))  # half a MiB in a quarter of a second
    assert slow[:3] == [(0, mb), (mb, 3 * mb // 2), (3 * mb // 2, 2 * mb)]
    assert {stop - start for start, stop in slow[1:]} == {mb // 2}
    assert min(stop - start for start, stop in cut(2 * mb, lambda n: 60.0)) == 256 << 10, "and no smaller"
    for ranges in (slow, cut(50 * mb + 4096, lambda n: n / (30 * mb))):
        assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges)), "nothing is left out, nothing twice"


def test_progress_of_a_slow_store_is_reported_below_the_size_of_a_large_write(key, tmp_path) -> None:
    class Slow(FileLayer):
        def pwrite(self, fd: int, data: bytes | memoryview, offset: int) -> None:
            time.sleep(len(data) / (8 << 20))
            super().pwrite(fd, data, offset)

    seen: list[int] = []
    fs, place = Slow(), Place(key, SAVE)
    make_set(fs, place, SET)
    slot = write_slot(tmp_path / "slot", key, SAVE, some_tensors(8 << 20))
    flow = Flow(writers=1, report=lambda done: seen.append(sum(done.values())))
    write_image(fs, place, SET, image_of(slot), flow)
    assert seen[0] == 1 << 20, "not all 8 at once"
    assert len(seen) >= 4
