"""A trainer's files get their names in the right order, whoever comes late, and nobody else's files go."""

import contextlib
import errno
import json
import os
import shutil
from typing import ClassVar

import pytest

from ckptd.shared.base.errors import CkptdError, DamagedError, UsageError
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.format.integrity import XXH3, Keyed
from ckptd.shared.format.manifest import LINKED, STOCK_FILES, UNPUBLISHED
from ckptd.shared.protocol.publication import Publication, check_publication
from ckptd.store.posix.commit import commit
from ckptd.store.posix.links import is_linked_to, remember_links
from ckptd.store.posix.publish import publish, publish_left, publish_own_part, publish_to
from ckptd.store.posix.removal import remove_checkpoint
from ckptd.store.posix.store import PosixStore
from ckptd.store.stock_files import Stock
from ckptd.system.files import FileLayer
from tests.checkpoints import write_files
from tests.runs import OTHER_RUN, RUN

OLD, NEW = SaveId(1, 1, 6, RUN), SaveId(1, 2, 5, RUN)  # a step says nothing of what is newer
NAMESAKE = SaveId(1, 1, 6, OTHER_RUN)  # of a job that was started over: with the directory of OLD
BESIDE = SaveId(1, 2, 5, OTHER_RUN)  # of that run, under another name than OLD
NEWEST = SaveId(2, 1, 9, RUN)
KEY = Keyed(bytes(range(32)))


@pytest.fixture
def key(tmp_path) -> JobKey:
    (tmp_path / "store").mkdir()
    return JobKey(str(tmp_path / "store"), "demo")


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


class Saved(dict):
    """Intents of an arena; ``commit`` has a checkpoint appear that is still to be published."""

    def __init__(self, key: JobKey) -> None:
        self.key = key
        self.integrity = XXH3

    def commit(self, save, files, directory, *, whole=True, latest="", names=None) -> None:
        """latest: what a file of that name beside the directory is to say. names: of this node; default all."""
        pointer = str(directory.parent / "latest") if latest else ""
        to = Publication(str(directory), whole, pointer, latest, tuple(files if names is None else names))
        write_files(self.key, save, files, to.said, self.integrity)
        assert self.is_unpublished(save)
        self[save] = to

    def publish(self, save: SaveId, fs: FileLayer | None = None) -> None:
        assert publish(fs or FileLayer(self.key.store), self.key, save, self) == ""
        assert not self.is_unpublished(save)

    def path(self, save: SaveId, name: str = "") -> str:
        return os.path.join(self.key.store, self.key.job, save.dirname, name)

    def is_unpublished(self, save: SaveId) -> bool:
        return UNPUBLISHED in os.listdir(self.path(save))


@pytest.fixture
def saved(key) -> Saved:
    return Saved(key)


def layer(key) -> FileLayer:
    return FileLayer(key.store)


def test_an_older_one_that_comes_late_does_not_move_the_pointer_back(saved, key, out) -> None:
    saved.commit(OLD, {"a": b"old"}, out / "tag-old", latest="tag-old")
    saved.commit(NEW, {"a": b"new"}, out / "tag-new", latest="tag-new")
    saved.publish(NEW)
    assert publish_left(layer(key), key, saved) == ([OLD, NEW], [])
    assert (out / "latest").read_text() == "tag-new"
    assert (out / "tag-old" / "a").read_bytes() == b"old"


def test_an_older_one_that_comes_late_does_not_take_a_directory(saved, out) -> None:
    saved.commit(OLD, {"a": b"old"}, out / "best")
    saved.commit(NEW, {"a": b"new"}, out / "best")
    saved.publish(NEW)
    saved.publish(OLD)
    assert (out / "best" / "a").read_bytes() == b"new"


@pytest.mark.parametrize("order", [(OLD, NEW), (NEW, OLD)])
def test_of_single_files_the_newest_of_each_name_lies_there(order, saved, out) -> None:
    saved.commit(OLD, {"last": b"old", "epoch=5": b"5"}, out, whole=False)
    saved.commit(NEW, {"last": b"new"}, out, whole=False)
    for save in order:
        saved.publish(save)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == {"last": b"new", "epoch=5": b"5"}


def a_slow_disk(saved, out, *, known: bool, other: SaveId = NEW, published: bool = True, then=lambda: None):
    """Before the older pointer gets its name, another checkpoint is published. known: to this arena too."""

    class Slow(FileLayer):
        slept: ClassVar[list[bool]] = []

        def rename(self, src: str, dst: str) -> None:
            if dst == str(out / "latest") and not self.slept:  # it has looked already whether there is a newer one
                self.slept.append(True)
                saved.commit(other, {"a": b"new"}, out / "best", latest="new")
                if published:
                    saved.publish(other, FileLayer(saved.key.store, saved.integrity))
                if not known:
                    del saved[other]
                then()
            super().rename(src, dst)

    return Slow(saved.key.store, saved.integrity)


def test_a_newer_one_that_is_published_meanwhile_has_the_last_word(saved, out) -> None:
    saved.commit(OLD, {"a": b"old"}, out / "best", latest="old")
    saved.publish(OLD, a_slow_disk(saved, out, known=True))
    assert (out / "latest").read_text() == "new"
    assert (out / "best" / "a").read_bytes() == b"new"


def test_a_newer_one_that_only_the_store_knows_of_is_not_put_back_but_reported(saved, key, out) -> None:
    """What it says of itself could be anybody's word."""
    saved.commit(OLD, {"a": b"old"}, out / "best", latest="old")
    note = publish(a_slow_disk(saved, out, known=False), key, OLD, saved)
    assert f"type: ckptd publish {key.store}/{key.job}/{NEW.dirname} --to DIRECTORY" in note
    assert (out / "latest").read_text() == "old"


def test_what_another_process_put_beside_our_files_stays(saved, out) -> None:
    saved.commit(OLD, {"a": b"old", "deep/b": b"old"}, out / "best")
    saved.publish(OLD)
    (out / "best" / "deep" / "notes").write_text("theirs")
    saved.commit(NEW, {"a": b"new"}, out / "best")
    saved.publish(NEW)
    assert (out / "best" / "a").read_bytes() == b"new"
    assert (out / "best" / "deep" / "notes").read_text() == "theirs"
    assert NEW.text in (out / "best" / ".ckptd").read_text()


def test_a_link_of_this_users_own_in_the_directorys_place_is_followed_and_stays(saved, out, tmp_path) -> None:
    (tmp_path / "large").mkdir()
    out.mkdir()
    (out / "best").symlink_to(tmp_path / "large")
    saved.commit(OLD, {"a": b"old"}, out / "best")
    saved.publish(OLD)
    assert (tmp_path / "large" / "a").read_bytes() == b"old"
    assert (out / "best").is_symlink()


# -- what only a rank of this node may say --


def test_without_an_intent_nothing_is_written_whatever_the_store_says(saved, key, out) -> None:
    saved.commit(OLD, {"a": b"old"}, out / "best", latest="old")
    saved.clear()
    assert "--to DIRECTORY" in publish(layer(key), key, OLD, saved)
    assert not out.exists()
    assert saved.is_unpublished(OLD)


@pytest.mark.parametrize("whole", [True, False])
def test_beside_somebodys_files_lie_only_names_that_ranks_of_this_node_saved(whole, saved, key, out) -> None:
    """The store's index can be anybody's: of a name that no rank said nothing is replaced, or made."""
    out.mkdir()
    (out / "train.py").write_text("mine")
    saved.commit(OLD, {"a": b"1", "train.py": b"evil", "torch.py": b"evil"}, out, whole=whole, names=["a"])
    note = publish(layer(key), key, OLD, saved)
    assert sorted(os.listdir(out)) == ["a", "train.py"]
    assert (out / "train.py").read_text() == "mine"
    assert ("2 files that no rank of this node saved" in note) == whole


def test_a_directory_of_its_own_has_the_files_of_all_nodes(saved, out) -> None:
    saved.commit(OLD, {"a": b"1", "b": b"2"}, out / "best", names=["a"])
    saved.publish(OLD)
    assert sorted(os.listdir(out / "best")) == [".ckptd", "a", "b"]


def test_each_node_puts_its_own_files_beside_others(saved, key, out) -> None:
    saved.commit(OLD, {"a": b"1", "b": b"2"}, out, whole=False, names=["a"], latest="x")
    saved.publish(OLD)
    assert sorted(os.listdir(out)) == ["a"]
    there = Publication(str(out), False, str(out.parent / "latest"), "other", ("b",))
    os.unlink(out.parent / "latest")
    assert publish_own_part(layer(key), key, OLD, {OLD: there}) == ""
    assert sorted(os.listdir(out)) == ["a", "b"]
    assert not (out.parent / "latest").exists(), "who committed has written it"


def test_another_node_finishes_what_the_committer_left(saved, key, out) -> None:
    saved.commit(OLD, {"a": b"1", "b": b"2"}, out / "best", names=["b"], latest="x")
    assert publish_own_part(layer(key), key, OLD, saved) == ""
    assert sorted(os.listdir(out / "best")) == [".ckptd", "a", "b"]
    assert not saved.is_unpublished(OLD)


class _Sick(FileLayer):
    """A disk that cannot read what lies in the checkpoint of OLD."""

    def listdir(self, path: str) -> list[str]:
        if path.endswith(OLD.dirname):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return super().listdir(path)

    def size(self, path: str) -> int:
        if path.endswith(f"{OLD.dirname}/{UNPUBLISHED}"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return super().size(path)


def test_a_publication_whose_state_cannot_be_read_is_reported_and_the_others_are_done(saved, key, out) -> None:
    saved.commit(OLD, {"a": b"old"}, out / "old")
    saved.commit(NEW, {"a": b"new"}, out / "new")
    del saved[OLD]
    sick = _Sick(key.store)
    text = "whether it is published cannot be read: [Errno 5] Input/output error"
    (note,), wanted = publish_left(sick, key, saved)[1], f"{saved.path(OLD).rstrip('/')}: {text}"
    assert note.startswith(wanted)
    assert (out / "new" / "a").read_bytes() == b"new"
    standings, (problem,) = PosixStore(key.store, fs=sick).standings(key.job)
    assert list(standings) == [NEW.dirname]
    assert problem.startswith(wanted)


# -- links in the way --


@pytest.mark.parametrize("name", ["deep/b", "deep/er/b"])
def test_no_link_below_the_directory_is_followed(name, saved, key, out, tmp_path) -> None:
    (tmp_path / "home" / "er").mkdir(parents=True)
    out.mkdir()
    (out / "deep").symlink_to(tmp_path / "home")
    saved.commit(OLD, {name: b"evil"}, out, whole=False)
    assert "a symbolic link where a directory belongs" in publish(layer(key), key, OLD, saved)
    assert os.listdir(tmp_path / "home") == ["er"]
    assert os.listdir(tmp_path / "home" / "er") == []


def test_a_link_where_a_file_goes_is_replaced_and_not_written_through(saved, out, tmp_path) -> None:
    (tmp_path / "bashrc").write_text("mine")
    out.mkdir()
    (out / "a").symlink_to(tmp_path / "bashrc")
    (out.parent / "latest").symlink_to(tmp_path / "bashrc")
    saved.commit(OLD, {"a": b"evil"}, out, whole=False, latest="evil")
    saved.publish(OLD)
    assert (tmp_path / "bashrc").read_text() == "mine"
    assert not (out / "a").is_symlink()
    assert (out.parent / "latest").read_text() == "evil"


def test_a_link_for_a_file_of_the_checkpoint_gets_no_second_name(saved, key, out, tmp_path) -> None:
    """Else a trainer that writes its file anew would write to whatever the store says."""
    (tmp_path / "bashrc").write_text("mine")
    saved.commit(OLD, {"a": b"old"}, out / "best")
    part = os.path.join(key.store, key.job, OLD.dirname, "r00000-p01.bin")
    os.unlink(part)
    os.symlink(tmp_path / "bashrc", part)
    assert "a symbolic link where a file belongs" in publish(layer(key), key, OLD, saved)
    assert not (out / "best").exists()


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("a", "../../x"), ("a", "/etc/passwd"), ("a", ".."), ("a", "a/b"), ("a", ""), ("a", "COMMITTED"),
        ("../a", "r00000-p01.bin"), ("/a", "r00000-p01.bin"), (".ckptd", "r00000-p01.bin"),
    ],
)  # fmt: skip
def test_an_index_that_leads_elsewhere_is_refused(name, file, saved, out, monkeypatch) -> None:
    """Also one that was committed so."""
    index = json.dumps({"save_id": OLD.text, "files": {name: file}}).encode()
    monkeypatch.setattr("ckptd.store.posix.commit.stock_files", lambda *_: Stock({STOCK_FILES: index}))
    write_files(saved.key, OLD, {"a": b"old"}, None)
    open(saved.path(OLD, UNPUBLISHED), "wb").close()
    saved[OLD] = Publication(str(out / "best"), True, names=("a", name))
    note = publish(layer(saved.key), saved.key, OLD, saved)
    assert "leads elsewhere" in note or "is no file of" in note
    assert not out.exists()


# -- two runs of one number --


def orders(save):
    """All that may publish a save; each gives what was said."""

    def refused(call):
        try:
            return call() or ""
        except CkptdError as error:
            return str(error)

    return {
        "publish": lambda fs, key, intents: publish(fs, key, save, intents),
        "own part": lambda fs, key, intents: publish_own_part(fs, key, save, intents),
        "left": lambda fs, key, intents: "; ".join(publish_left(fs, key, intents)[1]),
        "removal": lambda fs, key, intents: refused(lambda: remove_checkpoint(fs, key, save, intents)),
    }


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("order", orders(OLD))
def test_what_one_run_wanted_is_not_done_with_files_of_another(order, whole, saved, key, out) -> None:
    """The job was started over, in the emptied directory, and its daemon's intent is not here."""
    saved.commit(NAMESAKE, {"a": b"theirs"}, out / "best", latest="theirs", whole=whole)
    theirs = saved.pop(NAMESAKE)
    write_files(key, NEWEST, {"a": b"newest"}, None)
    note = orders(OLD)[order](layer(key), key, {OLD: theirs})
    assert saved.path(NAMESAKE).rstrip("/") in note
    assert "another run" in note
    assert not out.exists()
    assert saved.is_unpublished(NAMESAKE)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("order", ["own part", "removal"])
def test_nor_is_a_published_one_of_another_run_taken_for_it(order, whole, saved, key, out) -> None:
    saved.commit(NAMESAKE, {"a": b"theirs"}, out / "best", whole=whole)
    saved.publish(NAMESAKE)
    write_files(key, NEWEST, {"a": b"newest"}, None)
    mine = Publication(str(out / "mine"), whole, names=("a",))
    assert "another run" in orders(OLD)[order](layer(key), key, {OLD: mine})
    assert os.listdir(out) == ["best"]
    assert os.path.exists(saved.path(NAMESAKE))


def test_an_intent_whose_checkpoint_is_gone_is_not_reported_done_by_its_namesake(saved, key, out) -> None:
    mine = Publication(str(out / "mine"), True)
    saved.commit(NAMESAKE, {"a": b"theirs"}, out / "best")
    assert publish_left(layer(key), key, {OLD: mine, **saved}) == ([NAMESAKE], [])
    assert publish_left(layer(key), key, {OLD: mine}) == ([], [])
    assert os.listdir(out) == ["best"]


def wanting(saved, out, how) -> None:
    """Two runs of one number that want the same."""
    saved.commit(OLD, {"a": b"one"}, out / "best", whole=how != "files", latest="one")
    there = out / ("other" if how == "pointer" else "best")
    saved.commit(BESIDE, {"a": b"other"}, there, whole=how != "files", latest="other")


@pytest.mark.parametrize("how", ["whole", "files", "pointer"])
@pytest.mark.parametrize("runs", [(OLD, BESIDE), (BESIDE, OLD)])
def test_of_two_runs_of_one_number_neither_is_taken_for_newer(runs, how, saved, key, out) -> None:
    """Neither counter nor random bits say which it is."""
    wanting(saved, out, how)
    for save in runs:
        note = publish(layer(key), key, save, saved)
        assert "another run" in note
        assert "which of both is newer" in note
        assert f"type: ckptd publish {saved.path(save).rstrip('/')} --to DIRECTORY" in note
    done, notes = publish_left(layer(key), key, saved)
    assert (done, len(notes)) == ([], 2)
    assert not out.exists()


@pytest.mark.parametrize("how", ["whole", "files", "pointer"])
@pytest.mark.parametrize(("first", "late"), [(OLD, BESIDE), (BESIDE, OLD)])
def test_what_a_run_of_the_same_number_has_published_stays(first, late, how, saved, out) -> None:
    wanting(saved, out, how)
    os.rename(saved.path(late), hidden := saved.path(late).rstrip("/") + ".old")
    saved.publish(first)
    said = (out / "latest").read_bytes()
    os.rename(hidden, saved.path(late))
    key = saved.key
    assert "another run" in publish(layer(key), key, late, saved)
    assert saved.is_unpublished(late)
    assert (out / "latest").read_bytes() == said
    typed = Publication(str(out / "typed"), True, str(out / "latest"), "typed")
    publish_to(layer(key), key, late.dirname, typed)
    assert (out / "latest").read_text() == "typed", "whom a person has named"


def test_two_runs_of_one_number_that_want_different_places_have_them(saved, key, out) -> None:
    saved.commit(OLD, {"a": b"one"}, out / "one")
    saved.commit(BESIDE, {"a": b"other"}, out / "other")
    assert publish_left(layer(key), key, saved) == ([OLD, BESIDE], [])
    assert [(out / name / "a").read_bytes() for name in ("one", "other")] == [b"one", b"other"]


def test_where_a_later_number_has_both_places_two_runs_of_one_do_not_meet(saved, key, out) -> None:
    saved.commit(OLD, {"a": b"one"}, out / "best", latest="one")
    saved.commit(BESIDE, {"a": b"other"}, out / "best", latest="other")
    saved.commit(NEWEST, {"a": b"newest"}, out / "best", latest="newest")
    saved.publish(NEWEST)
    saved.publish(OLD)
    saved.publish(BESIDE)
    assert (out / "latest").read_text() == "newest"


def test_a_run_of_the_same_number_that_is_committed_meanwhile_is_reported(saved, key, out) -> None:
    saved.commit(OLD, {"a": b"old"}, out / "best", latest="old")
    slow = a_slow_disk(saved, out, known=True, other=BESIDE, published=False)
    note = publish(slow, key, OLD, saved)
    assert "another run" in note
    assert saved.is_unpublished(OLD)


# -- what is proved before anything is written --


def ways(saved, out):
    """All that can publish OLD; each gives what was said."""
    key, fs = saved.key, FileLayer(saved.key.store, saved.integrity)

    def typed():
        with pytest.raises(DamagedError) as caught:
            publish_to(fs, key, OLD.dirname, Publication(str(out / "typed"), True))
        return str(caught.value)

    return {"typed": typed} | {name: lambda order=order: order(fs, key, saved) for name, order in orders(OLD).items()}


def rename_a_file(index: dict) -> None:
    index["files"] = {f"train{number}.py": file for number, file in enumerate(index["files"].values())}


def swap_two_files(index: dict) -> None:
    index["files"] = dict(zip(index["files"], reversed(index["files"].values()), strict=True))


def name_another_save(index: dict) -> None:
    index["save_id"] = NEWEST.text


@pytest.mark.parametrize("integrity", [XXH3, KEY], ids=["xxh3", "keyed"])
@pytest.mark.parametrize("change", [rename_a_file, swap_two_files, name_another_save])
@pytest.mark.parametrize("way", ["typed", *orders(OLD)])
def test_an_index_that_is_not_the_manifests_is_refused(way, change, integrity, saved, out) -> None:
    saved.integrity = integrity
    saved.commit(OLD, {"a": b"1", "b": b"2"}, out / "best", latest="best")
    write_files(saved.key, NEWEST, {"a": b"newest"}, None, integrity)
    with open(saved.path(OLD, STOCK_FILES)) as file:
        index = json.load(file)
    change(index)
    with open(saved.path(OLD, STOCK_FILES), "w") as file:
        json.dump(index, file)
    note = ways(saved, out)[way]()
    assert saved.path(OLD, STOCK_FILES) in note
    assert not out.exists()
    assert saved.is_unpublished(OLD)


@pytest.mark.parametrize("integrity", [XXH3, KEY], ids=["xxh3", "keyed"])
@pytest.mark.parametrize("way", ["typed", *orders(OLD)])
def test_a_file_of_another_size_is_refused(way, integrity, saved, key, out) -> None:
    saved.integrity = integrity
    saved.commit(OLD, {"a": b"1", "b": b"2"}, out / "best", latest="best")
    write_files(key, NEWEST, {"a": b"newest"}, None, integrity)
    with open(saved.path(OLD, "r00000-p02.bin"), "ab") as file:
        file.write(b"more")
    assert f"{saved.path(OLD, 'r00000-p02.bin')}: 5 bytes, should be 1" in ways(saved, out)[way]()
    assert not out.exists()


@pytest.mark.parametrize("integrity", [XXH3, KEY], ids=["xxh3", "keyed"])
def test_what_is_sound_is_published(integrity, saved, key, out) -> None:
    saved.integrity = integrity
    saved.commit(OLD, {"a": b"1", "deep/b": b"2", "empty": b""}, out / "best", latest="best")
    saved.publish(OLD, FileLayer(key.store, integrity))
    publish_to(FileLayer(key.store, integrity), key, OLD.dirname, Publication(str(out / "typed"), True))
    for folder in ("best", "typed"):
        assert [(out / folder / name).read_bytes() for name in ("a", "deep/b", "empty")] == [b"1", b"2", b""]


@pytest.mark.parametrize("way", ["typed", *orders(OLD)])
def test_a_checkpoint_without_a_mac_is_not_published_where_there_is_a_key(way, saved, key, out) -> None:
    saved.commit(OLD, {"a": b"evil"}, out / "best", latest="best")
    saved.integrity = KEY
    write_files(key, NEWEST, {"a": b"newest"}, None, KEY)
    assert "is not keyed" in ways(saved, out)[way]()
    assert not out.exists()


@pytest.mark.parametrize("integrity", [XXH3, KEY], ids=["xxh3", "keyed"])
def test_what_is_put_back_is_proved_too(integrity, saved, key, out) -> None:
    saved.integrity = integrity
    saved.commit(OLD, {"a": b"old"}, out / "best", latest="old")
    note = publish(a_slow_disk(saved, out, known=True, then=lambda: _forge_name(saved, NEW)), key, OLD, saved)
    assert saved.path(NEW, STOCK_FILES) in note
    assert not (out / "best" / "train0.py").exists()


def _forge_name(saved, save) -> None:
    with open(saved.path(save, STOCK_FILES)) as file:
        index = json.load(file)
    rename_a_file(index)
    with open(saved.path(save, STOCK_FILES), "w") as file:
        json.dump(index, file)


def test_the_index_that_is_proved_is_the_one_that_is_used(saved, key, out) -> None:
    """Somebody changes it between any two reads."""

    class Swapped(FileLayer):
        reads: ClassVar[list[str]] = []

        def read_file(self, path: str, max_nbytes: int) -> bytes:
            data = super().read_file(path, max_nbytes)
            if path == saved.path(OLD, STOCK_FILES):
                self.reads.append(path)
                _forge_name(saved, OLD)
            return data

    saved.integrity = KEY
    saved.commit(OLD, {"a": b"1"}, out / "best")
    assert publish(Swapped(key.store, KEY), key, OLD, saved) == ""
    assert Swapped.reads
    assert sorted(os.listdir(out / "best")) == [".ckptd", "a"]


# -- retention, and by hand --


def test_directories_with_links_keep_the_checkpoint_and_are_only_read(saved, key, out) -> None:
    class NoHardLinks(FileLayer):
        def link_from(self, other, src, dst):
            raise OSError(1, "no hard links", dst)

    saved.commit(OLD, {"a": b"old"}, out / "best")
    saved.publish(OLD, NoHardLinks(key.store))
    assert os.readlink(out / "best" / "a") == os.path.join(key.store, key.job, OLD.dirname, "r00000-p01.bin")
    assert LINKED in os.listdir(os.path.join(key.store, key.job, OLD.dirname))
    assert is_linked_to(layer(key), key, OLD.dirname)
    os.unlink(out / "best" / "a")
    assert not is_linked_to(layer(key), key, OLD.dirname)


def test_of_two_that_record_links_at_once_neither_loses_those_of_the_other(saved, key, out) -> None:
    """Two daemons, or two runs: one does all of its own before the nth file operation of the other."""
    saved.commit(OLD, {"a": b"old"}, out / "best")
    for at in range(1, 100):
        one, other = out.parent / f"one{at}", out.parent / f"other{at}"
        disk = _Meanwhile(key.store, at, lambda other=other: remember_links(layer(key), saved.path(OLD), str(other)))
        remember_links(disk, saved.path(OLD), str(one))
        if disk.count[0] < at:
            break
        for directory in (one, other):
            assert not is_linked_to(layer(key), key, OLD.dirname)
            directory.mkdir()
            (directory / "a").symlink_to(saved.path(OLD, "r00000-p01.bin"))
            assert is_linked_to(layer(key), key, OLD.dirname), (at, directory)
            (directory / "a").unlink()
    assert at > 5


def test_what_cannot_be_read_of_a_checkpoint_is_named_where_no_place_for_it_is_known(saved, key, out) -> None:
    """As by ckptd commit: that nobody knows its place would be the wrong cause."""

    class Sick(FileLayer):
        def size(self, path: str) -> int:
            if path.endswith(UNPUBLISHED):
                raise OSError(errno.EIO, os.strerror(errno.EIO), path)
            return super().size(path)

    saved.commit(OLD, {"a": b"old"}, out / "best")
    note = commit(Sick(key.store), key, OLD, "test").note
    assert f"{saved.path(OLD).rstrip('/')} was not published: [Errno {errno.EIO}] {os.strerror(errno.EIO)}" in note
    assert "nobody here knows" not in note
    assert "nobody here knows any more where to" in commit(layer(key), key, OLD, "test").note


def test_links_that_cannot_be_read_keep_the_checkpoint(saved, key, out) -> None:
    class Sick(FileLayer):
        def listdir(self, path: str) -> list[str]:
            if path.endswith(LINKED):
                raise OSError(errno.EIO, os.strerror(errno.EIO), path)
            return super().listdir(path)

    saved.commit(OLD, {"a": b"old"}, out / "best")
    saved.commit(NEW, {"a": b"new"}, out / "new")
    saved.publish(OLD)
    with pytest.raises(OSError, match="Input/output error"):
        remove_checkpoint(Sick(key.store), key, OLD, saved)
    assert os.path.exists(saved.path(OLD, "COMMITTED"))
    assert remove_checkpoint(layer(key), key, OLD, saved)


def _record(path: str, content: bytes) -> None:
    os.mkdir(os.path.join(path, LINKED))
    with open(os.path.join(path, LINKED, "0" * 32), "wb") as file:
        file.write(content)


def _old_list(path: str) -> None:
    with open(os.path.join(path, LINKED), "wb") as file:
        file.write(b'{"directories": ["/runs/best"]}')


def _too_many(path: str) -> None:
    _record(path, b'{"directory": "/runs/best"}')
    for number in range(1, 65):
        shutil.copyfile(os.path.join(path, LINKED, "0" * 32), os.path.join(path, LINKED, f"{number:032x}"))


def _damaged_index(path: str) -> None:
    _record(path, b'{"directory": "/runs/best"}')
    with open(os.path.join(path, STOCK_FILES), "wb") as file:
        file.write(b"[]")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda path: _record(path, b"{}"), f"{LINKED}/0+: .*directory"),
        (lambda path: _record(path, b"\xff"), f"{LINKED}/0+: .*links to the checkpoint, so it stays"),
        (lambda path: _record(path, b" " * (1 << 20) + b"{}"), "1048578 bytes, at most 1048576 expected"),
        (_too_many, f"{LINKED}: has 65 records, this program reads 64"),
        (_old_list, f"{LINKED}: is a file, of an earlier version; this program reads a folder"),
        (_damaged_index, STOCK_FILES),
    ],
    ids=["no record", "no JSON", "large", "many", "earlier version", "index"],
)
def test_a_record_of_links_that_is_none_keeps_the_checkpoint_and_is_said(change, said, saved, key, out) -> None:
    saved.commit(OLD, {"a": b"old"}, out / "best")
    saved.commit(NEW, {"a": b"new"}, out / "new")
    saved.publish(OLD)
    change(saved.path(OLD))
    with pytest.raises((OSError, DamagedError), match=said) as caught:
        remove_checkpoint(layer(key), key, OLD, saved)
    assert os.path.exists(saved.path(OLD, "COMMITTED"))
    if f"hint: if none has: rm -r {saved.path(OLD, LINKED)}" in str(caught.value):
        shutil.rmtree(saved.path(OLD, LINKED), ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(saved.path(OLD, LINKED))
        assert remove_checkpoint(layer(key), key, OLD, saved)


def test_what_is_not_committed_is_not_put_anywhere_by_hand(saved, key, out) -> None:
    saved.commit(OLD, {"a": b"old"}, out / "best")
    with open(os.path.join(key.store, key.job, OLD.dirname, "COMMITTED"), "wb") as file:
        file.write(b"{}")
    with pytest.raises(DamagedError):
        publish_to(layer(key), key, OLD.dirname, Publication(str(out / "typed"), True))
    assert not out.exists()


@pytest.mark.parametrize(
    ("directory", "pointer", "names"),
    [
        ("/", "", ()), ("relative", "", ()), ("/a/../b", "", ()), ("//a", "", ()), ("/a/./b", "", ()), ("/a/", "", ()),
        ("/a\nb", "", ()), ("/a", "b", ()), ("/a", "/b/../c", ()),
        ("/store/demo/x", "", ()), ("/a", "/store/demo/latest", ()),
        ("/a", "", ("../x",)), ("/a", "", ("/x",)), ("/a", "", (".ckptd",)), ("/" + "a" * 2000, "", ()),
    ],
)  # fmt: skip
def test_places_that_are_none(directory, pointer, names) -> None:
    with pytest.raises(UsageError):
        check_publication(Publication(directory, True, pointer, "", names), JobKey("/store", "demo"))


class _Meanwhile(FileLayer):
    """Runs something else before the nth file operation, of the layers made of it too."""

    def __init__(self, top: str, at: int, other) -> None:
        super().__init__(top)
        self.count, self.at, self.other = [0], at, other

    def __getattribute__(self, name: str):
        method = super().__getattribute__(name)
        if name in {"below", "integrity", "count", "at", "other"} or name.startswith("_") or not callable(method):
            return method
        self.count[0] += 1
        if self.count[0] == self.at:
            self.other()
        return method


class _Stopped(Exception):  # noqa: N818 - no error
    """Of a publisher that goes no further."""


@pytest.mark.parametrize("whole", [True, False])
def test_of_two_publishers_at_once_neither_shows_half_of_it(whole: bool, saved, key, out) -> None:
    """One does its first m file operations, the other all of its own between the nth and the next of these."""
    files = {"a": b"a", "b/c": b"bc", "d": b"d"}
    saved.commit(OLD, files, out / "tag", whole=whole, latest="tag")
    ends = set()
    for at in range(1, 400, 1 if os.environ.get("FAULTS") == "long" else 2):
        first = _Meanwhile(key.store, at, lambda: None)
        halves = []

        def look(*, last: bool = False, halves=halves) -> None:
            if (out / "latest").exists() or (whole and (out / "tag").exists()) or last:
                halves.append({name: (out / "tag" / name).read_bytes() for name in files} == files)

        def second(at=at, look=look) -> None:
            for stop in (7 * at % 60, 400):  # the first of them dies on its way
                other = _Meanwhile(key.store, stop, lambda: (_ for _ in ()).throw(_Stopped))
                with contextlib.suppress(_Stopped):
                    publish(other, key, OLD, saved)
                look()

        first.other = second
        told = publish(first, key, OLD, saved)
        look(last=True)
        assert all(halves), f"operation {at}"
        assert told == "", f"operation {at}"
        assert os.listdir(out) in (["latest", "tag"], ["tag", "latest"]), f"operation {at}"
        ends.add(first.count[0] >= at)
        if first.count[0] < at:
            break
        shutil.rmtree(out)
        with open(os.path.join(key.store, key.job, OLD.dirname, UNPUBLISHED), "wb"):
            pass
    assert ends == {True, False}
