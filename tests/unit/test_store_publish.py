"""A trainer's files get their names in the right order, whoever comes late, and nobody else's files go."""

import os

import msgspec
import pytest

from ckptd.filelayer import FileLayer
from ckptd.protocol.ids import JobKey, SaveId
from ckptd.protocol.layout import Publication
from ckptd.protocol.manifest import STOCK_FILES, UNPUBLISHED
from ckptd.store_publish import TrainerFiles, publish, publish_left

OLD, NEW = SaveId(1, 1, 6), SaveId(1, 2, 5)  # a step says nothing of what is newer


@pytest.fixture
def key(tmp_path) -> JobKey:
    (tmp_path / "store").mkdir()
    return JobKey(str(tmp_path / "store"), "demo")


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


def committed(key: JobKey, save: SaveId, files: dict[str, bytes], directory, *, whole=True, latest: str = "") -> None:
    """A checkpoint that is still to be published. latest: what a file of that name beside the directory is to say."""
    path = os.path.join(key.store, key.job, save.dirname)
    os.makedirs(path)
    names = {name: f"r00000-p{part:02d}.bin" for part, name in enumerate(files, 1)}
    for name, data in files.items():
        with open(os.path.join(path, names[name]), "xb") as file:
            file.write(data)
    pointer = str(directory.parent / "latest") if latest else ""
    to = Publication(str(directory), whole, pointer, latest)
    index = TrainerFiles(save_id=save.text, files=names, publication=to)
    with open(os.path.join(path, STOCK_FILES), "xb") as file:
        file.write(msgspec.json.encode(index))
    with open(os.path.join(path, UNPUBLISHED), "xb"):
        pass


def published(key: JobKey, save: SaveId, fs: FileLayer | None = None) -> None:
    assert publish(fs or FileLayer(), key, save.dirname) == ""
    assert UNPUBLISHED not in os.listdir(os.path.join(key.store, key.job, save.dirname))


def test_an_older_one_that_comes_late_does_not_move_the_pointer_back(key, out) -> None:
    committed(key, OLD, {"a": b"old"}, out / "tag-old", latest="tag-old")
    committed(key, NEW, {"a": b"new"}, out / "tag-new", latest="tag-new")
    published(key, NEW)
    assert publish_left(FileLayer(), key) == []
    assert (out / "latest").read_text() == "tag-new"
    assert (out / "tag-old" / "a").read_bytes() == b"old"


def test_an_older_one_that_comes_late_does_not_take_a_directory(key, out) -> None:
    committed(key, OLD, {"a": b"old"}, out / "best")
    committed(key, NEW, {"a": b"new"}, out / "best")
    published(key, NEW)
    published(key, OLD)
    assert (out / "best" / "a").read_bytes() == b"new"


@pytest.mark.parametrize("order", [(OLD, NEW), (NEW, OLD)])
def test_of_single_files_the_newest_of_each_name_lies_there(order, key, out) -> None:
    committed(key, OLD, {"last": b"old", "epoch=5": b"5"}, out, whole=False)
    committed(key, NEW, {"last": b"new"}, out, whole=False)
    for save in order:
        published(key, save)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == {"last": b"new", "epoch=5": b"5"}


def test_a_newer_one_that_is_published_meanwhile_has_the_last_word(key, out) -> None:
    class Slow(FileLayer):
        slept = False

        def rename(self, src: str, dst: str) -> None:
            if dst == str(out / "latest") and not self.slept:  # it has looked already whether there is a newer one
                self.slept = True
                committed(key, NEW, {"a": b"new"}, out / "best", latest="new")
                published(key, NEW)
            super().rename(src, dst)

    committed(key, OLD, {"a": b"old"}, out / "best", latest="old")
    published(key, OLD, Slow())
    assert (out / "latest").read_text() == "new"
    assert (out / "best" / "a").read_bytes() == b"new"


def test_what_somebody_put_beside_our_files_stays(key, out) -> None:
    committed(key, OLD, {"a": b"old", "deep/b": b"old"}, out / "best")
    published(key, OLD)
    (out / "best" / "deep" / "notes").write_text("theirs")
    committed(key, NEW, {"a": b"new"}, out / "best")
    published(key, NEW)
    assert (out / "best" / "a").read_bytes() == b"new"
    assert (out / "best" / "deep" / "notes").read_text() == "theirs"
    assert NEW.text in (out / "best" / ".ckptd").read_text()


def test_a_link_to_a_directory_is_followed_and_stays(key, out, tmp_path) -> None:
    (tmp_path / "large").mkdir()
    out.mkdir()
    (out / "best").symlink_to(tmp_path / "large")
    committed(key, OLD, {"a": b"old"}, out / "best")
    published(key, OLD)
    assert (tmp_path / "large" / "a").read_bytes() == b"old"
    assert (out / "best").is_symlink()
