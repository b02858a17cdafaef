"""The id of a store: made once, never silently again where another one is remembered."""

import errno
import json
import os
import shutil

import pytest

from ckptd.shared.base.errors import DamagedError, WrongStoreError
from ckptd.shared.base.ids import ANY_STORE, JobKey, SaveId
from ckptd.store.posix.identity import STORE_FILE, store_id_at
from ckptd.store.posix.store import PosixStore
from ckptd.system.files import FileLayer
from tests.runs import OTHER_STORE_ID, RUN, STORE_ID
from tests.unit.store.test_store import committed

FS = FileLayer()


@pytest.fixture
def store(tmp_path) -> str:
    return str(tmp_path / "store")


def test_a_new_store_gets_an_id_and_keeps_it(store) -> None:
    made = PosixStore(store, fs=FS).open("demo")
    assert store_id_at(FS, store) == made.store_id
    again = PosixStore(store, fs=FS).open("demo", remembered=[made.store_id])
    assert again.store_id == made.store_id
    assert again.warnings == []


def test_a_new_store_on_the_root_file_system_or_tmpfs_is_a_warning_that_names_device_and_mount(store) -> None:
    (warning,) = PosixStore(store, fs=FS).open("demo").warnings
    assert store in warning
    assert "mounted at" in warning
    assert "is the parallel file system mounted?" in warning
    shm = f"/dev/shm/{os.path.basename(os.path.dirname(store))}-{os.getpid()}"
    os.mkdir(shm)
    try:
        (warning,) = PosixStore(f"{shm}/store", fs=FS).open("demo").warnings
        assert "tmpfs" in warning
        assert "lost with a reboot" in warning
    finally:
        shutil.rmtree(shm)


@pytest.mark.parametrize("there", [False, True], ids=["no directory", "an empty directory"])
def test_no_store_is_made_where_an_arena_remembers_another_one(store, there: bool) -> None:
    if there:
        os.mkdir(store)
    with pytest.raises(WrongStoreError, match=rf"{store} is not the store that.*store id {STORE_ID}.*mounted at"):
        PosixStore(store, fs=FS).open("demo", remembered=[STORE_ID])
    assert os.path.lexists(store) is there
    assert not there or os.listdir(store) == []


def test_a_look_makes_no_store(store) -> None:
    assert PosixStore(store, fs=FS).open("demo", make=False).store_id == ""
    assert not os.path.lexists(store)


def test_a_user_may_begin_again_on_purpose(store) -> None:
    made = PosixStore(store, fs=FS).open("demo", remembered=[STORE_ID], wanted=ANY_STORE)
    assert made.store_id not in {STORE_ID, ""}


def test_another_store_than_the_remembered_one_is_a_warning_and_with_store_id_an_error(store) -> None:
    there = PosixStore(store, fs=FS).open("demo").store_id
    (warning,) = PosixStore(store, fs=FS).open("demo", remembered=[STORE_ID]).warnings
    assert STORE_ID in warning
    assert there in warning
    assert "checkpoints in that store are not seen" in warning
    with pytest.raises(WrongStoreError, match=rf"{there}.*is saved to store {STORE_ID}"):
        PosixStore(store, fs=FS).open("demo", wanted=STORE_ID)
    assert PosixStore(store, fs=FS).open("demo", wanted=there).warnings == []


def test_a_session_that_has_seen_no_store_yet_takes_none_but_the_remembered_one(store) -> None:
    """A warning is for who connects. A scan has nobody to warn: drains wait."""
    there = PosixStore(store, fs=FS).open("demo").store_id
    with pytest.raises(WrongStoreError, match=rf"{there}.*job 'demo' is saved to store {STORE_ID}"):
        PosixStore(store, fs=FS).open("demo", remembered=[STORE_ID], exact=True)
    assert PosixStore(store, fs=FS).open("demo", remembered=[STORE_ID, there], exact=True).store_id == there
    assert PosixStore(store, fs=FS).open("demo", remembered=[STORE_ID], wanted=there, exact=True).store_id == there
    assert PosixStore(store, fs=FS).open("demo", remembered=[STORE_ID], wanted=ANY_STORE, exact=True).store_id == there
    assert PosixStore(store, fs=FS).open("demo", exact=True).store_id == there


def test_a_lost_id_is_written_again_from_the_jobs_checkpoints(tmp_path) -> None:
    key = JobKey(str(tmp_path / "store"), "demo")
    os.mkdir(key.store)
    committed(FS, key, SaveId(1, 1, 5, RUN))
    opened = PosixStore(key.store, fs=FS).open("demo", remembered=[STORE_ID])
    assert opened.store_id == STORE_ID
    assert "was lost: it is written again, with the store id" in opened.warnings[0]
    assert store_id_at(FS, key.store) == STORE_ID


def test_a_look_leaves_a_lost_id_to_who_can_be_warned(tmp_path) -> None:
    """The scan before a session and the number that it takes run side by side: ranks see the warnings of the second."""
    key = JobKey(str(tmp_path / "store"), "demo")
    os.mkdir(key.store)
    committed(FS, key, SaveId(1, 1, 5, RUN))
    seen = PosixStore(key.store, fs=FS).open("demo", make=False, exact=True)
    assert (seen.store_id, seen.warnings) == (STORE_ID, [])
    assert "was lost" in PosixStore(key.store, fs=FS).open("demo").warnings[0]


def test_a_store_whose_id_is_lost_is_still_the_one_that_its_checkpoints_say(tmp_path) -> None:
    """A daemon that adopted a job, and has no session, drains it: only a session writes the id again."""
    key = JobKey(str(tmp_path / "store"), "demo")
    os.mkdir(key.store)
    committed(FS, key, SaveId(1, 1, 5, RUN))
    PosixStore(key.store, fs=FS).check(STORE_ID, "demo")
    with pytest.raises(WrongStoreError, match=f"now {STORE_ID}"):
        PosixStore(key.store, fs=FS).check("f" * 32, "demo")
    with pytest.raises(WrongStoreError, match="is gone"):
        PosixStore(str(tmp_path), fs=FS).check(STORE_ID, "demo")


def test_a_lost_id_is_written_again_from_the_checkpoints_of_any_job(tmp_path) -> None:
    """Else a job with no checkpoints that connects first gives the store another id, and a running job loses it."""
    key = JobKey(str(tmp_path / "store"), "demo")
    os.mkdir(key.store)
    committed(FS, key, SaveId(1, 1, 5, RUN))
    os.makedirs(f"{key.store}/a-job-without/.incarnations")
    os.makedirs(f"{key.store}/another/step-00000007-i1")  # nothing in it can be read
    with open(f"{key.store}/README", "w") as file:
        file.write("no job")
    opened = PosixStore(key.store, fs=FS).open("new")
    assert opened.store_id == STORE_ID
    assert "was lost" in opened.warnings[0]
    PosixStore(key.store, fs=FS).check(STORE_ID, "demo")


# -- a store without hard links --


class _NoLinks(FileLayer):
    """Calls meanwhile, once, before the nth change of names."""

    def __init__(self, at: int = -1, meanwhile=lambda: None) -> None:
        super().__init__()
        self.left, self.meanwhile = at, meanwhile

    def _tick(self) -> None:
        self.left -= 1
        if self.left == -1:
            self.meanwhile()

    def link(self, src: str, dst: str) -> None:
        self._tick()
        raise OSError(errno.EPERM, "no hard links", src)

    def mkdir(self, path: str) -> bool:
        self._tick()
        return super().mkdir(path)

    def rename(self, src: str, dst: str) -> None:
        self._tick()
        super().rename(src, dst)

    def fsync_dir(self, path: str) -> None:
        self._tick()
        super().fsync_dir(path)


def test_without_hard_links_two_makers_give_one_id(tmp_path) -> None:
    for at in range(50):
        store = str(tmp_path / f"{at}")
        theirs: list[str] = []

        def meanwhile(store=store, theirs=theirs) -> None:
            theirs.append(PosixStore(store, fs=_NoLinks()).open("other").store_id)

        fs = _NoLinks(at, meanwhile)
        mine = PosixStore(store, fs=fs).open("demo").store_id
        if fs.left >= 0:
            break
        assert theirs == [mine], f"operation {at}"
        PosixStore(store, fs=FS).check(mine, "demo")
        assert not [name for name in os.listdir(store) if ".tmp-" in name]
    assert at >= 4


def test_without_hard_links_a_maker_killed_at_any_step_leaves_a_store_that_can_be_made(tmp_path) -> None:
    def killed() -> None:
        raise KeyboardInterrupt

    for at in range(50):
        store = str(tmp_path / f"{at}")
        fs = _NoLinks(at, killed)
        try:
            PosixStore(store, fs=fs).open("demo")
            break
        except KeyboardInterrupt:
            made = PosixStore(store, fs=_NoLinks()).open("demo").store_id
            PosixStore(store, fs=FS).check(made, "demo")
    assert at >= 4


def test_a_store_that_is_swapped_under_a_session_is_refused(store) -> None:
    made = PosixStore(store, fs=FS).open("demo").store_id
    PosixStore(store, fs=FS).check(made, "demo")
    os.rename(store, f"{store}.away")
    with pytest.raises(WrongStoreError, match=rf"{store} is gone: there is no such directory; .* id {made};") as caught:
        PosixStore(store, fs=FS).check(made, "demo")
    assert "mount its file system again" in caught.value.hint
    assert "if the store was deleted for good: start the job again with connect(store_id='any')" in caught.value.hint
    os.mkdir(store)
    with pytest.raises(WrongStoreError, match=rf"{store} is gone: the directory there has no {STORE_FILE}"):
        PosixStore(store, fs=FS).check(made, "demo")
    other = PosixStore(store, fs=FS).open("demo").store_id
    with pytest.raises(WrongStoreError, match=rf"is not the store that .*id {made}, now {other}"):
        PosixStore(store, fs=FS).check(made, "demo")


def test_an_id_that_none_but_the_user_names_is_the_users(store) -> None:
    with pytest.raises(WrongStoreError, match=rf"asks for the store with id {STORE_ID} .connect.store_id=") as caught:
        PosixStore(store, fs=FS).open("demo", wanted=STORE_ID)
    assert "forget" not in caught.value.hint
    assert "for a new store give no store_id" in caught.value.hint
    assert not os.path.lexists(store)


def test_a_damaged_record_is_named(store) -> None:
    os.mkdir(store)
    for content in (b"{", b"[]", json.dumps({"format": 1, "store_id": "../../etc"}).encode(), b"\xff\xfe"):
        with open(f"{store}/{STORE_FILE}", "wb") as file:
            file.write(content)
        with pytest.raises(DamagedError, match=STORE_FILE):
            PosixStore(store, fs=FS).open("demo", wanted=OTHER_STORE_ID)
