"""Votes that a node gives again, and two committers between which one comes: what is committed, every reader takes."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from ckptd.checkpoint.finish import finish_again
from ckptd.checkpoint.verify import verify_path
from ckptd.shared.base.ids import JobKey
from ckptd.shared.format.manifest import COMMITTED, StockObjects
from ckptd.store.image import Flow
from ckptd.store.posix.commit import commit, write_vote
from ckptd.store.posix.image_writer import make_set, write_image
from ckptd.store.posix.scan import Place, committed_at, scan
from ckptd.system.files import FileLayer
from tests.flips import flip
from tests.runs import SET, VOTES, give_id, vote_in
from tests.slots import Slot, make_vote, write_slot
from tests.stored import records_of
from tests.unit.store.test_store import SAVE, image_of


@pytest.fixture
def key(tmp_path: Path) -> JobKey:
    (tmp_path / "store").mkdir()
    give_id(tmp_path / "store")
    return JobKey(str(tmp_path / "store"), "demo")


def written(key: JobKey, world_size: int) -> tuple[Place, list[Slot]]:
    """A save whose images lie there, and no vote."""
    fs, place = FileLayer(), Place(key, SAVE)
    make_set(fs, place, SET)
    slots = [
        write_slot(f"{key.store}/slot{rank}", key, SAVE, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]  # fmt: skip
    for slot in slots:
        write_image(fs, place, SET, image_of(slot), Flow())
    return place, slots


def vote(key: JobKey, slots: list[Slot], node: str, ranks: list[int]) -> None:
    write_vote(FileLayer(), key, make_vote(key, SAVE, node, [slots[r] for r in ranks], world_size=len(slots)))


@pytest.mark.parametrize("again", [[0, 2], [2]])
def test_a_node_that_is_ordered_again_with_other_ranks_has_said_both(key, again) -> None:
    """A coordinator died after the first; its successor has assigned the ranks anew."""
    place, slots = written(key, 3)
    vote(key, slots, "node0", [0, 1])
    vote(key, slots, "node0", again)
    assert scan(FileLayer(), key).partials[0].missing == ""
    commit(FileLayer(), key, SAVE, "test")
    assert [record.rank for record in records_of(place.final)] == [0, 1, 2]
    assert not verify_path(place.final).problems


def test_a_vote_whose_ranks_the_node_has_all_said_again_is_not_pinned(key) -> None:
    place, slots = written(key, 3)
    for ranks in ([0, 1], [0, 1, 2]):
        vote(key, slots, "node0", ranks)
    commit(FileLayer(), key, SAVE, "test")
    assert [list(ref.ranks) for ref in records_of(place.final).manifest.votes] == [[0, 1, 2]]
    report = verify_path(place.final)
    assert not report.problems
    assert any("a vote that the manifest does not pin" in note for note in report.notes)


class Second(FileLayer):
    """Of a committer that is late with the final name: COMMITTED of the first one, source to target, comes before."""

    def __init__(self, source: str, target: str) -> None:
        super().__init__()
        self._first = source, target

    def rename(self, source: str, target: str) -> None:
        if os.path.basename(target) == SAVE.dirname:
            os.rename(*self._first)
        super().rename(source, target)


class First(FileLayer):
    """Of a committer that is late with COMMITTED: a node votes again and another committer comes before."""

    def __init__(self, more: Callable[[FileLayer], None]) -> None:
        super().__init__()
        self._more, self.other = more, ""

    def rename(self, source: str, target: str) -> None:
        if os.path.basename(target) == COMMITTED:
            second, (job_dir, _) = Second(source, target), os.path.split(os.path.dirname(target))
            self._more(second)
            key = JobKey(*os.path.split(job_dir))
            self.other = commit(second, key, SAVE, "test").committed.manifest_digest
        super().rename(source, target)


def with_objects(key: JobKey, slots: list[Slot]) -> Callable[[FileLayer], None]:
    """The node has the plain leaves for stock readers now: the digest of its vote may be the larger one, or not."""
    objects = StockObjects(b"abc", {"x": (0, 3)})
    vote = msgspec.structs.replace(make_vote(key, SAVE, "node0", slots, world_size=2), stock_objects=objects)
    return lambda fs: write_vote(fs, key, vote)


def with_another_node(key: JobKey, slots: list[Slot]) -> Callable[[FileLayer], None]:
    vote = make_vote(key, SAVE, "node1", slots[:1], world_size=2)
    vote = msgspec.structs.replace(vote, stock_objects=StockObjects(b"abc", {"x": (0, 3)}))
    return lambda fs: write_vote(fs, key, vote)


@pytest.mark.parametrize("more", [with_objects, with_another_node])
def test_of_two_committers_with_different_votes_both_say_what_is_committed(key, more) -> None:
    place, slots = written(key, 2)
    vote(key, slots, "node0", [0, 1])
    first = First(more(key, slots))
    own = commit(first, key, SAVE, "test").committed.manifest_digest
    found = committed_at(FileLayer(), place)
    assert found is not None
    assert own == first.other == found.manifest_digest
    report = verify_path(place.final)
    assert not report.problems
    assert not [note for note in report.notes if "does not select" in note]
    assert [record.rank for record in records_of(place.final)] == [0, 1]


def test_a_damaged_vote_of_a_node_that_has_voted_again_is_no_damage_of_the_checkpoint(key) -> None:
    place, slots = written(key, 2)
    vote(key, slots, "node0", [0])
    flip(str(vote_in(place.partial)), 60)
    vote(key, slots, "node0", [0, 1])
    commit(FileLayer(), key, SAVE, "test")
    report = verify_path(place.final)
    assert not report.problems
    assert any("a vote that the manifest does not pin" in note for note in report.notes)
    (Path(place.job_dir) / ".incarnations").mkdir(exist_ok=True)
    os.unlink(Path(place.final) / COMMITTED)
    assert finish_again(place.final, "test").committed
    assert not verify_path(place.final).problems


class Unreadable(FileLayer):
    """A disk on which these files cannot be read."""

    def __init__(self, *paths: str) -> None:
        super().__init__()
        self._paths = paths

    def read_file(self, path: str, max_nbytes: int) -> bytes:
        if path in self._paths:
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return super().read_file(path, max_nbytes)


def test_a_vote_that_cannot_be_read_is_needed_only_for_ranks_that_no_other_has(key) -> None:
    place, slots = written(key, 2)
    vote(key, slots, "node0", [0])
    first = str(vote_in(place.partial))
    fs = Unreadable(first)
    vote(key, slots, "node1", [1])
    assert "Input/output error" in scan(fs, key).partials[0].missing
    with pytest.raises(OSError, match="Input/output error") as caught:
        commit(fs, key, SAVE, "test")
    assert caught.value.filename == first
    vote(key, slots, "node0", [0, 1])
    assert scan(fs, key).partials[0].finishable
    commit(fs, key, SAVE, "test")
    assert not verify_path(place.final).problems
    assert VOTES[0] in first
