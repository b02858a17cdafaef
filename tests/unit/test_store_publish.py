"""A trainer's files get their names in the right order, whoever comes late, and nobody else's files go."""

import contextlib
import os
import shutil
from typing import ClassVar

import msgspec
import pytest

from ckptd.filelayer import FileLayer
from ckptd.protocol.errors import DamagedError, UsageError
from ckptd.protocol.ids import JobKey, SaveId
from ckptd.protocol.manifest import LINKED, STOCK_FILES, UNPUBLISHED
from ckptd.protocol.publication import Publication, check_publication
from ckptd.store_publish import TrainerFiles, is_linked_to, publish, publish_left, publish_own_part, publish_to
from tests.runs import RUN

OLD, NEW = SaveId(1, 1, 6, RUN), SaveId(1, 2, 5, RUN)  # a step says nothing of what is newer


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

    def commit(self, save, files, directory, *, whole=True, latest="", names=None) -> None:
        """latest: what a file of that name beside the directory is to say. names: of this node; default all."""
        path = os.path.join(self.key.store, self.key.job, save.dirname)
        os.makedirs(path)
        parts = {name: f"r00000-p{part:02d}.bin" for part, name in enumerate(files, 1)}
        for name, data in files.items():
            with open(os.path.join(path, parts[name]), "xb") as file:
                file.write(data)
        pointer = str(directory.parent / "latest") if latest else ""
        to = Publication(str(directory), whole, pointer, latest, tuple(files if names is None else names))
        index = TrainerFiles(save_id=save.text, files=parts, saved_for=to.said)
        with open(os.path.join(path, STOCK_FILES), "xb") as file:
            file.write(msgspec.json.encode(index))
        with open(os.path.join(path, UNPUBLISHED), "xb"):
            pass
        self[save] = to

    def publish(self, save: SaveId, fs: FileLayer | None = None) -> None:
        assert publish(fs or FileLayer(self.key.store), self.key, save, self) == ""
        assert not self.is_unpublished(save)

    def is_unpublished(self, save: SaveId) -> bool:
        return UNPUBLISHED in os.listdir(os.path.join(self.key.store, self.key.job, save.dirname))


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


def a_slow_disk(saved, out, *, known: bool):
    """Before the older pointer gets its name, a newer checkpoint is published. known: to this arena too."""

    class Slow(FileLayer):
        slept: ClassVar[list[bool]] = []

        def rename(self, src: str, dst: str) -> None:
            if dst == str(out / "latest") and not self.slept:  # it has looked already whether there is a newer one
                self.slept.append(True)
                saved.commit(NEW, {"a": b"new"}, out / "best", latest="new")
                saved.publish(NEW)
                if not known:
                    del saved[NEW]
            super().rename(src, dst)

    return Slow(saved.key.store)


def test_a_newer_one_that_is_published_meanwhile_has_the_last_word(saved, out) -> None:
    saved.commit(OLD, {"a": b"old"}, out / "best", latest="old")
    saved.publish(OLD, a_slow_disk(saved, out, known=True))
    assert (out / "latest").read_text() == "new"
    assert (out / "best" / "a").read_bytes() == b"new"


def test_a_newer_one_that_only_the_store_knows_of_is_not_put_back_but_told_of(saved, key, out) -> None:
    """What it says of itself could be anybody's word."""
    saved.commit(OLD, {"a": b"old"}, out / "best", latest="old")
    note = publish(a_slow_disk(saved, out, known=False), key, OLD, saved)
    assert f"type: ckptd publish {key.store}/{key.job}/{NEW.dirname} --to DIRECTORY" in note
    assert (out / "latest").read_text() == "old"


def test_what_somebody_put_beside_our_files_stays(saved, out) -> None:
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


@pytest.mark.parametrize("file", ["../../x", "/etc/passwd", "..", "a/b", ""])
def test_an_index_that_leads_elsewhere_is_refused(file, saved, key, out) -> None:
    saved.commit(OLD, {"a": b"old"}, out / "best")
    index = TrainerFiles(save_id=OLD.text, files={"a": file})
    with open(os.path.join(key.store, key.job, OLD.dirname, STOCK_FILES), "wb") as stream:
        stream.write(msgspec.json.encode(index))
    assert "leads elsewhere" in publish(layer(key), key, OLD, saved)


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
    for at in range(1, 400):
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
