"""The checkpoint of a state gets into a trainer's directory: whole, its own save's, never an older one's."""

import contextlib
import errno
import os
import subprocess

import msgspec
import pytest
import torch
from msgspec.structs import replace

from ckptd.shared.base.errors import CkptdError, DamagedError, UsageError
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.format.integrity import Keyed
from ckptd.shared.format.manifest import STOCK_METADATA
from ckptd.shared.format.origin import MARKER, Origin
from ckptd.shared.protocol.publication import Draft, Publication, check_publication
from ckptd.store.posix.publish_state import publish_state
from ckptd.store.posix.removal import remove_checkpoint
from ckptd.store.posix.store import PosixStore
from ckptd.system.files import FileLayer
from tests.checkpoints import write_checkpoint
from tests.runs import OTHER_RUN, RUN, manifest_in

SAVE = SaveId(3, 1, 100, RUN)
NEWER = SaveId(3, 2, 90, RUN)
PLAIN = SaveId(2, 9, 80, RUN)
KEY = Keyed(bytes(range(32)))
FILES = [".metadata", "objects.pt", "r00000-p00.safetensors", "r00001-p00.safetensors"]


@pytest.fixture
def key(tmp_path):
    return JobKey(str(tmp_path / "store"), "job")


@pytest.fixture
def committed(key):
    """Checkpoints of two ranks."""
    for save in (SAVE, NEWER):
        write_checkpoint(key.store, [{"w": torch.arange(5.0), "lr": 0.1}] * 2, job="job", save=save)
    return key


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def drafted(key, place, save=SAVE, *, path=None, origin=None, files=("meta.pt",)):
    """As a rank prepares it."""
    path = path or place.with_name(f".{place.name}.ckptd-{save.text}")
    path.mkdir(exist_ok=True)
    for name in files:
        (path / name).write_text(save.text)
    (path / MARKER).write_bytes(msgspec.json.encode(origin or Origin.of(key, save)))
    return Draft(str(place), str(path))


def published(key, save, *drafts, fs=None):
    to = Publication("/unused", whole=True, drafts=drafts)
    return publish_state(fs or FileLayer(key.store), key, save, to)


def listed(path):
    return sorted(os.listdir(path))


def test_the_place_appears_with_the_files_of_both_and_the_draft_is_gone(committed, folder):
    draft = drafted(committed, folder / "last.ckpt")
    assert published(committed, SAVE, draft) == ""
    assert listed(folder) == ["last.ckpt"]
    assert listed(folder / "last.ckpt") == sorted([MARKER, "meta.pt", *FILES])
    for name in FILES:
        assert os.path.samefile(folder / "last.ckpt" / name, f"{committed.store}/job/{SAVE.dirname}/{name}")
    found = msgspec.json.decode((folder / "last.ckpt" / MARKER).read_bytes(), type=Origin)
    assert (found.save, found.files) == (SAVE, sorted([*FILES, "meta.pt"]))
    assert published(committed, SAVE, draft) == "", "as often as one likes"


def test_a_place_that_is_its_own_draft_gets_its_listing_last(committed, folder):
    place = folder / "iter_100"
    draft = drafted(committed, place, path=place, files=("common.pt",))
    seen = []

    class Watched(FileLayer):
        def rename(self, src, dst):
            super().rename(src, dst)
            seen.append(os.path.basename(dst))

    assert published(committed, SAVE, draft, fs=Watched(committed.store)) == ""
    assert listed(place) == sorted([MARKER, "common.pt", *FILES])
    assert seen[-1] == STOCK_METADATA
    (place / STOCK_METADATA).unlink()
    (place / STOCK_METADATA).write_text("of the trainer's own saver")
    assert published(committed, SAVE, draft) == ""
    assert (place / STOCK_METADATA).read_text() == "of the trainer's own saver"


def nothing(key, draft):
    os.unlink(os.path.join(draft.path, MARKER))


def another_run(key, draft):
    origin = Origin.of(key, replace(SAVE, run=OTHER_RUN))
    with open(os.path.join(draft.path, MARKER), "wb") as file:
        file.write(msgspec.json.encode(origin))


def another_store(key, draft):
    with open(os.path.join(draft.path, MARKER), "wb") as file:
        file.write(msgspec.json.encode(Origin.of(JobKey(f"{key.store}-2", "job"), SAVE)))


def no_marker(key, draft):
    with open(os.path.join(draft.path, MARKER), "wb") as file:
        file.write(b"[]")


@pytest.mark.parametrize("says", [nothing, another_run, another_store, no_marker])
@pytest.mark.parametrize("in_place", [False, True])
def test_without_a_draft_of_this_save_nothing_is_done(committed, folder, says, in_place):
    """A trainer that has removed its directory does not get it back."""
    draft = drafted(committed, folder / "x", path=folder / "x" if in_place else None)
    says(committed, draft)
    before = {name: listed(folder / name) for name in listed(folder)}
    assert published(committed, SAVE, draft) == ""
    assert {name: listed(folder / name) for name in listed(folder)} == before


def test_nothing_appears_before_the_commit_and_nothing_of_another_run(key, folder):
    os.makedirs(key.store)
    draft = drafted(key, folder / "x")
    assert published(key, SAVE, draft) == ""
    write_checkpoint(key.store, [{"w": torch.arange(5.0)}], job="job", save=replace(SAVE, run=OTHER_RUN))
    assert published(key, SAVE, draft) == ""
    assert listed(folder) == [os.path.basename(draft.path)]


@pytest.mark.parametrize("in_place", [False, True])
def test_another_runs_checkpoint_under_the_name_gets_no_place_by_what_this_run_wanted(key, folder, in_place):
    """Neither by the daemon that committed nor by a later one; and nothing of it is taken for done."""
    states = [{"w": torch.arange(5.0), "lr": 0.1}] * 2
    theirs = write_checkpoint(key.store, states, job="job", save=replace(SAVE, run=OTHER_RUN))
    draft = drafted(key, folder / "x", path=folder / "x" if in_place else None)
    intents, store = {SAVE: Publication.of_state(draft)}, PosixStore(key.store)
    before = listed(draft.path)
    assert store.publish("job", intents, SAVE) == ([], [])
    assert store.publish("job", intents) == ([], [])
    with pytest.raises(DamagedError, match=OTHER_RUN.hex()):
        store.remove("job", SAVE, intents)
    assert listed(folder) == [os.path.basename(draft.path)]
    assert listed(draft.path) == before
    assert {os.stat(theirs / name).st_nlink for name in FILES} == {1}


@pytest.mark.parametrize("in_place", [False, True])
def test_with_a_key_only_what_it_proves_gets_a_place(key, folder, in_place):
    states = [{"w": torch.arange(5.0), "lr": 0.1}] * 2
    write_checkpoint(key.store, states, job="job", save=SAVE, integrity=KEY)
    forged = write_checkpoint(key.store, states, job="job", save=NEWER)  # by a user without the key
    ours = drafted(key, folder / "ours", path=folder / "ours" if in_place else None)
    other = drafted(key, folder / "forged", NEWER, path=folder / "forged" if in_place else None)
    keyed = FileLayer(key.store, KEY)
    assert published(key, SAVE, ours, fs=keyed) == ""
    assert listed(folder / "ours") == sorted([MARKER, "meta.pt", *FILES])
    before = listed(other.path)
    note = published(key, NEWER, other, fs=keyed)
    assert f"{other.place} is not published: {forged}" in note
    assert "--integrity xxh3" in note
    assert listed(other.path) == before
    assert {os.stat(forged / name).st_nlink for name in FILES} == {1}


def test_with_a_key_a_manifest_that_another_user_wrote_publishes_nothing(key, folder):
    """COMMITTED is ours, and the files that the records name are another's."""
    states = [{"w": torch.arange(5.0), "lr": 0.1}] * 2
    final = write_checkpoint(key.store, states, job="job", save=SAVE, integrity=KEY)
    raw = manifest_in(final).read_bytes()
    manifest_in(final).write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    draft = drafted(key, folder / "x")
    assert "x is not published" in published(key, SAVE, draft, fs=FileLayer(key.store, KEY))
    assert listed(folder) == [os.path.basename(draft.path)]


def test_an_older_one_that_comes_late_does_not_take_the_place(committed, folder):
    place = folder / "last.ckpt"
    older, newer = drafted(committed, place), drafted(committed, place, NEWER)
    assert published(committed, NEWER, newer) == ""
    assert published(committed, SAVE, older) == ""
    assert (place / "meta.pt").read_text() == NEWER.text
    assert listed(folder) == ["last.ckpt"]


@pytest.mark.parametrize("kind", ["directory", "file", "link"])
def test_what_the_trainer_had_there_before_is_replaced_and_what_it_saved_later_is_not(committed, folder, kind):
    for name, age in (("before", 100), ("after", -100)):
        place = folder / name
        if kind == "directory":
            place.mkdir()
            (place / "own").touch()
        elif kind == "file":
            place.touch()
        else:
            place.symlink_to("elsewhere")
        draft = drafted(committed, place)
        now = os.stat(draft.path).st_mtime
        os.utime(place, (now - age, now - age), follow_symlinks=False)
        assert published(committed, SAVE, draft) == ""
    assert listed(folder / "before") == sorted([MARKER, "meta.pt", *FILES])
    assert not os.path.exists(folder / "after" / MARKER)
    assert set(listed(folder)) == {"before", "after"}


def test_the_same_place_again_has_what_was_prepared_last(committed, folder):
    place = folder / "x"
    assert published(committed, SAVE, drafted(committed, place)) == ""
    assert published(committed, SAVE, drafted(committed, place, files=("meta.pt", "more"))) == ""
    assert listed(place) == sorted([MARKER, "meta.pt", "more", *FILES])


def test_where_one_place_cannot_be_the_others_are(committed, folder):
    gone = Draft(str(folder / "no" / "x"), str(folder / "no" / ".x"))
    (folder / "shut").mkdir()
    shut = drafted(committed, folder / "shut" / "x")
    os.rename(f"{committed.store}/job/{SAVE.dirname}/.metadata", f"{committed.store}/kept")
    assert "is not published" in published(committed, SAVE, gone, shut)
    os.rename(f"{committed.store}/kept", f"{committed.store}/job/{SAVE.dirname}/.metadata")
    assert published(committed, SAVE, gone, shut, drafted(committed, folder / "x")) == ""
    assert (folder / "shut" / "x" / STOCK_METADATA).exists()
    assert (folder / "x" / STOCK_METADATA).exists()


def test_a_place_for_which_there_is_no_room_keeps_its_checkpoint_and_holds_no_bytes(committed, folder):
    """Second names in a temporary directory would keep what retention removes."""

    class Full(FileLayer):
        def write_temp(self, path, data, **options):
            if path.startswith(str(folder)):
                raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), path)
            return super().write_temp(path, data, **options)

    draft, full = drafted(committed, folder / "x"), Full(committed.store)
    intents = {SAVE: Publication.of_state(draft)}
    with pytest.raises(CkptdError, match=f"x is not published: .*quota.* to give that place up: rm -r {draft.path}"):
        remove_checkpoint(full, committed, SAVE, intents)
    assert listed(folder) == [os.path.basename(draft.path)]
    assert os.path.exists(f"{committed.store}/job/{SAVE.dirname}/COMMITTED")
    assert remove_checkpoint(FileLayer(committed.store), committed, SAVE, intents)
    assert listed(folder) == ["x"]


@pytest.mark.parametrize("in_place", [False, True])
def test_a_state_that_no_reader_of_dcp_can_read_goes_when_its_place_is_given_up(committed, folder, in_place):
    final = f"{committed.store}/job/{SAVE.dirname}"
    write_checkpoint(committed.store, [{"w": torch.arange(5.0)}], job="job", save=PLAIN, dual=False)
    assert not os.path.exists(f"{committed.store}/job/{PLAIN.dirname}/{STOCK_METADATA}"), final
    draft = drafted(committed, folder / "x", PLAIN, path=folder / "x" if in_place else None)
    intents, fs = {PLAIN: Publication.of_state(draft)}, FileLayer(committed.store)
    with pytest.raises(
        CkptdError, match=r"x is not published: .* has no \.metadata, .*; to give that place up: "
    ) as hit:
        remove_checkpoint(fs, committed, PLAIN, intents)
    command = str(hit.value).partition("give that place up: ")[2].partition(": it stays")[0]
    subprocess.run(command.split(), check=True)
    assert remove_checkpoint(fs, committed, PLAIN, intents)


def test_a_checkpoint_stays_while_symbolic_links_lead_to_it(committed):
    """Elsewhere: on another file system, where there can be no hard links."""
    place = f"/dev/shm/ckptd-test-links-{os.getpid()}"
    os.mkdir(place)
    try:
        with open(os.path.join(place, MARKER), "wb") as file:
            file.write(msgspec.json.encode(Origin.of(committed, SAVE)))
        assert published(committed, SAVE, Draft(place, place)) == ""
        assert all(os.path.islink(os.path.join(place, name)) for name in FILES)
        assert not remove_checkpoint(FileLayer(committed.store), committed, SAVE)
    finally:
        for name in os.listdir(place):
            os.unlink(os.path.join(place, name))
        os.rmdir(place)
    assert remove_checkpoint(FileLayer(committed.store), committed, SAVE)


def test_a_draft_lies_beside_its_place():
    with pytest.raises(UsageError, match="does not lie beside"):
        check_publication(Publication.of_state(Draft("/run/x", "/other/.x")), JobKey("/store", "job"))
    with pytest.raises(UsageError, match="is its own of job"):
        check_publication(Publication.of_state(Draft("/store/job/x", "/store/job/.x")), JobKey("/store", "job"))


class KilledError(BaseException):
    """Stands for SIGKILL: no handler of OSError sees it."""


def killed_at(store, number):
    """A layer whose process ends at that change of a file or a directory, counted over all layers made of it."""
    left = [number]

    def dies(name):
        def change(self, *args, **options):
            if not left[0]:
                raise KilledError
            left[0] -= 1
            return getattr(FileLayer, name)(self, *args, **options)

        return change

    changes = ("rename", "link", "link_from", "mkdir", "unlink", "rmdir", "fsync_dir", "open_write")
    return type("Mortal", (FileLayer,), {name: dies(name) for name in changes})(store), left


@pytest.mark.parametrize("in_place", [False, True])
def test_wherever_a_publisher_is_killed_the_next_one_finishes(committed, folder, in_place):
    """And until then the place has what it had before, or all of the save."""
    number = 0
    while True:
        place = folder / f"x{number}"
        draft = drafted(committed, place, path=place if in_place else None)
        mortal, left = killed_at(committed.store, number)
        with contextlib.suppress(KilledError):
            assert published(committed, SAVE, draft, fs=mortal) == ""
        if in_place:
            listing = place / STOCK_METADATA
            assert not listing.exists() or set(FILES) <= set(listed(place))
        else:
            assert not place.exists() or listed(place) == sorted([MARKER, "meta.pt", *FILES])
        assert published(committed, SAVE, draft) == ""
        assert listed(place) == sorted([MARKER, "meta.pt", *FILES])
        hidden = [folder / name for name in listed(folder) if name.startswith(".")]
        assert not any(FILES[-1] in listed(path) for path in hidden), "no second name of large files is left"
        if left[0]:
            break
        number += 1
    assert number > 10


def test_a_draft_that_cannot_be_read_is_a_problem_and_stays(committed, folder):
    draft = drafted(committed, folder / "last.ckpt")
    os.unlink(os.path.join(draft.path, MARKER))
    os.mkdir(os.path.join(draft.path, MARKER))
    assert "last.ckpt is not published" in published(committed, SAVE, draft)
    assert listed(folder) == [os.path.basename(draft.path)]


def test_a_place_that_has_the_save_is_not_replaced(committed, folder):
    """A publisher that comes second would take it away for a moment, and for good if it ends there."""
    place = folder / "last.ckpt"
    published(committed, SAVE, drafted(committed, place))
    first = place.stat().st_ino
    assert published(committed, SAVE, drafted(committed, place)) == ""
    assert (place.stat().st_ino, listed(folder)) == (first, ["last.ckpt"])
