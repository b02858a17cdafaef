"""Incarnation numbers on the store, and the fence between a takeover and a commit."""

import errno
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from ckptd.shared.base.errors import CkptdError, WrongStoreError
from ckptd.shared.base.ids import JobKey, SaveId, incarnation_at
from ckptd.store.facts import Committer, Taker
from ckptd.store.numbers import KEPT_RECORDS
from ckptd.store.posix.commit import commit
from ckptd.store.posix.scan import scan
from ckptd.system.files import FileLayer
from tests.records import claim, records_of, superseded, take, taken_over_by
from tests.runs import OTHER_RUN, RUN, STORE_ID, TAKER, give_id
from tests.unit.store.test_store import committed, drained

SAVE = SaveId(1, 7, 100, RUN)
US = Committer(1, "session", STORE_ID)


@pytest.fixture
def key(tmp_path) -> JobKey:
    (tmp_path / "store").mkdir()
    give_id(tmp_path / "store")
    return JobKey(str(tmp_path / "store"), "demo")


def test_incarnations_grow_and_old_records_go(key) -> None:
    fs = FileLayer()
    assert [take(fs, key, TAKER) for _ in range(2 * KEPT_RECORDS)] == list(range(1, 2 * KEPT_RECORDS + 1))
    assert take(fs, key, TAKER, at_least=50) == 50
    assert len(os.listdir(f"{key.store}/demo/.incarnations")) == KEPT_RECORDS


def test_a_number_among_the_clocks_is_not_behind_the_clock(key) -> None:
    behind = incarnation_at(time.time()) - 100
    assert take(FileLayer(), key, TAKER, at_least=behind) >= behind + 100


def test_a_record_names_run_session_and_node(key) -> None:
    fs = FileLayer()
    take(fs, key, TAKER)
    take(fs, key, Taker(OTHER_RUN, "another", "b"))
    told = [(r.incarnation, r.run, r.session, r.node) for r in records_of(fs, key)]
    assert told == [(1, RUN.hex(), "session", "node"), (2, OTHER_RUN.hex(), "another", "b")]


def test_a_damaged_record_keeps_its_number_taken(key) -> None:
    fs = FileLayer()
    take(fs, key, TAKER)
    with open(f"{key.store}/demo/.incarnations/i00000001", "w") as file:
        file.write("{")
    assert records_of(fs, key) == []
    assert take(fs, key, TAKER) == 2
    assert taken_over_by(fs, key, SaveId(0, 1, 1, RUN), Committer(0, "session", STORE_ID)) == 1


def test_incarnation_is_above_every_trace_of_the_job(key) -> None:
    fs = FileLayer()
    committed(fs, key, SaveId(8, 1, 5, RUN))
    assert take(fs, key, TAKER) == 9
    drained(fs, key, SaveId(20, 1, 5, RUN), nodes=1)
    assert take(fs, key, TAKER) == 21


def test_takers_at_once_get_different_numbers(key) -> None:
    with ThreadPoolExecutor(4) as pool:
        numbers = list(pool.map(lambda _: take(FileLayer(), key, TAKER), range(24)))
    assert len(set(numbers)) == 24


def test_a_taker_that_slept_does_not_take_a_number_that_was_taken_and_pruned(key) -> None:
    class Sleeper(FileLayer):
        slept = False

        def link(self, src: str, dst: str) -> None:
            if not self.slept:
                self.slept = True
                assert [take(FileLayer(), key, TAKER) for _ in range(40)] == list(range(1, 41))
            super().link(src, dst)

    assert take(Sleeper(), key, TAKER) == 41


# -- a store without hard links --


class _NoLinks(FileLayer):
    """Calls meanwhile, once, when the method of the name has begun or, after=True, has ended."""

    def __init__(self, meanwhile=lambda: None, at: str = "link", *, after: bool = False) -> None:
        super().__init__()
        self.meanwhile, self.at, self.after = meanwhile, at, after

    def __getattribute__(self, name: str):
        method = super().__getattribute__(name)
        if name.startswith("_") or name != super().__getattribute__("at"):
            return method

        def around(*args, **kwargs):
            self.at = ""
            if not self.after:
                self.meanwhile()
            result = method(*args, **kwargs)
            if self.after:
                self.meanwhile()
            return result

        return around

    def link(self, src: str, dst: str) -> None:
        raise OSError(errno.EPERM, "no hard links", src)


@pytest.mark.parametrize("at", ["link", "create_exclusive", "rename", "fsync_dir"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_without_hard_links_two_takers_get_two_numbers_and_one_fence_sees_the_other(key, at: str, after: bool) -> None:
    other = Taker(OTHER_RUN, "another", "b")
    theirs: list[int] = []

    def meanwhile() -> None:
        theirs.append(take(_NoLinks(), key, other))

    after = after and at != "link"  # that one raises
    mine = take(_NoLinks(meanwhile, at, after=after), key, TAKER)
    assert [mine, *theirs] in ([1, 2], [2, 1])
    assert {r.incarnation: r.session for r in records_of(FileLayer(), key)} == {mine: "session", theirs[0]: "another"}
    low, by = (mine, TAKER) if mine < theirs[0] else (theirs[0], other)
    save = SaveId(low, 1, 10, by.run)
    assert taken_over_by(FileLayer(), key, save, Committer(low, by.session, STORE_ID)) == max(mine, theirs[0])


def test_without_hard_links_takers_at_once_get_different_numbers(key) -> None:
    with ThreadPoolExecutor(4) as pool:
        numbers = list(pool.map(lambda _: take(_NoLinks(), key, TAKER), range(24)))
    assert len(set(numbers)) == 24


def test_without_hard_links_a_taker_killed_between_claim_and_record_leaves_a_number_that_none_has(key) -> None:
    class Killed(_NoLinks):
        def rename(self, src: str, dst: str) -> None:
            raise KeyboardInterrupt

    take(_NoLinks(), key, TAKER)
    drained(FileLayer(), key, SAVE)
    with pytest.raises(KeyboardInterrupt):
        take(Killed(), key, Taker(OTHER_RUN, "another", "b"))
    assert os.path.getsize(f"{key.store}/demo/.incarnations/i00000002") == 0
    assert commit(FileLayer(), key, SAVE, "test", US).taken_over == 0  # it will never scan, or only after this commit
    assert take(_NoLinks(), key, TAKER) == 3


def test_a_record_that_another_taker_replaced_is_not_had(key) -> None:
    """A file system whose exclusive creation is none."""

    class Loose(_NoLinks):
        def create_exclusive(self, path: str) -> None:
            pass

    def meanwhile() -> None:
        with open(f"{key.store}/demo/.incarnations/i00000001", "w") as file:
            file.write(f'{{"incarnation":1,"run":"{OTHER_RUN.hex()}","session":"another","node":"b"}}')

    assert take(Loose(meanwhile, "rename", after=True), key, TAKER) == 2


# -- the fence: a takeover and a commit at once --


def test_a_commit_after_a_takeover_is_not_reported_durable(key) -> None:
    """Start: record, sync, scan. Commit: rename, sync, list. Here the start scans before the rename."""
    fs = FileLayer()
    take(fs, key, TAKER)
    drained(fs, key, SAVE)
    assert take(fs, key, Taker(OTHER_RUN, "another", "b")) == 2
    assert scan(fs, key).committed == []  # the start restores nothing

    outcome = commit(fs, key, SAVE, "test", US)
    assert outcome.taken_over == 2
    assert superseded(fs, key) == {SAVE.dirname: 2}
    assert not os.path.lexists(f"{key.store}/demo/latest")


def test_a_commit_that_knows_a_session_to_be_over_takes_the_mark_away(key) -> None:
    """A node that made the commit in its coordinator's place may not have known."""
    fs = FileLayer()
    take(fs, key, TAKER)
    drained(fs, key, SAVE)
    take(fs, key, Taker(OTHER_RUN, "over", "b"))
    assert commit(fs, key, SAVE, "test", US).taken_over == 2
    assert commit(fs, key, SAVE, "test", Committer(US.incarnation, US.session, US.store_id, ["over"])).taken_over == 0
    assert superseded(fs, key) == {}


@pytest.mark.parametrize("number", [1, 2])
def test_a_run_whose_directory_was_emptied_commits_nothing_beside_the_one_that_began_again(key, number) -> None:
    """Its number may be higher: its checkpoint would hide what the living run was told is durable."""
    fs, save = FileLayer(), SaveId(number, 1, 50, RUN)
    for _ in range(number):
        take(fs, key, TAKER)
    shutil.rmtree(f"{key.store}/demo")
    assert take(fs, key, Taker(OTHER_RUN, "another", "b")) == 1
    drained(fs, key, save)
    with pytest.raises(WrongStoreError, match=f"incarnation {number} of run {RUN.hex()}.*emptied"):
        commit(fs, key, save, "test", Committer(number, "session", STORE_ID))
    assert scan(fs, key).committed == []
    commit(fs, key, save, "test")  # a user may
    assert [entry.committed.save for entry in scan(fs, key).committed] == [save]


def test_a_run_whose_directory_was_emptied_goes_on_there_while_none_has_begun_again(key) -> None:
    fs = FileLayer()
    take(fs, key, TAKER)
    shutil.rmtree(f"{key.store}/demo")
    drained(fs, key, SAVE)
    assert commit(fs, key, SAVE, "test", US).taken_over == 0
    assert take(fs, key, Taker(OTHER_RUN, "another", "b")) == 2


def test_a_number_whose_record_went_with_the_old_ones_may_be_committed(key) -> None:
    fs = FileLayer()
    for _ in range(KEPT_RECORDS + 1):
        take(fs, key, TAKER)
    drained(fs, key, SAVE)
    assert commit(fs, key, SAVE, "test", US).taken_over == 0


def test_a_takeover_after_a_commit_sees_it(key) -> None:
    """The other order: the committer lists before the record, so the start's scan comes after the rename."""
    fs = FileLayer()
    take(fs, key, TAKER)
    drained(fs, key, SAVE)
    assert commit(fs, key, SAVE, "test", US).taken_over == 0
    take(fs, key, Taker(OTHER_RUN, "another", "b"))
    assert [entry.committed.save for entry in scan(fs, key).committed] == [SAVE]


class _Interleaved(FileLayer):
    """Runs the other process's sequence before the nth file operation of this one."""

    def __init__(self, at: int, other) -> None:
        self.left, self.other = at, other

    def __getattribute__(self, name: str):
        method = super().__getattribute__(name)
        if name.startswith("_") or not callable(method) or name == "other":
            return method
        if self.left == 0:
            self.left = -1
            self.other()
        elif self.left > 0:
            self.left -= 1
        return method


STEP = 1 if os.environ.get("FAULTS") == "long" else 2  # every operation, or each second one


class _InterleavedNoLinks(_Interleaved):
    def link(self, src: str, dst: str) -> None:
        raise OSError(errno.EPERM, "no hard links", src)


@pytest.mark.parametrize("links", [True, False], ids=["hard links", "no hard links"])
@pytest.mark.parametrize("whole", ["takeover in a commit", "commit in a takeover"])
def test_at_every_interleaving_one_of_both_sees_the_other(tmp_path, whole: str, links: bool) -> None:
    """A takeover (take, scan) between any two file operations of a commit, and the other way round."""
    outcomes = set()
    for at in range(0, 200, STEP):
        store = tmp_path / f"{whole.replace(' ', '-')}-{at}"
        store.mkdir()
        give_id(store)
        key = JobKey(str(store), "demo")
        take(FileLayer(), key, TAKER)
        drained(FileLayer(), key, SAVE)
        seen: list[bool] = []
        told: list[int] = []

        def start(fs: FileLayer, key=key, seen=seen) -> None:
            take(fs, key, Taker(OTHER_RUN, "another", "b"))
            seen.append(bool(scan(fs, key).committed))

        def end(fs: FileLayer, key=key, told=told) -> None:
            told.append(commit(fs, key, SAVE, "test", US).taken_over)

        inner, outer = (start, end) if whole == "takeover in a commit" else (end, start)
        layer, outer_layer = (FileLayer, _Interleaved) if links else (_NoLinks, _InterleavedNoLinks)
        fs = outer_layer(at, lambda inner=inner, layer=layer: inner(layer()))
        outer(fs)
        if fs.left >= 0:
            break
        assert seen[0] or told[0], f"operation {at}: durable was reported, and the takeover restores without it"
        outcomes.add((seen[0], bool(told[0])))
    assert {(True, False), (False, True)} <= outcomes


@pytest.mark.parametrize("whole", ["takeover in a claim and a commit", "claim and commit in a takeover"])
def test_at_every_interleaving_a_session_with_a_number_of_its_own_and_a_takeover_see_each_other(
    tmp_path, whole
) -> None:
    """The number is the clock's; without the claim's record neither the takeover nor the commit sees the other."""
    outcomes = set()
    for at in range(0, 300, STEP):
        store = tmp_path / f"store-{at}"
        store.mkdir()
        give_id(store)
        key, number = JobKey(str(store), "demo"), incarnation_at(time.time())
        save = SaveId(number, 1, 10, RUN)
        took: list[int] = []
        seen: list[bool] = []
        told: list[int] = []

        def start(fs: FileLayer, key=key, seen=seen, took=took) -> None:
            took.append(take(fs, key, Taker(OTHER_RUN, "another", "b")))
            seen.append(bool(scan(fs, key).committed))

        def end(fs: FileLayer, key=key, told=told, save=save) -> None:
            assert claim(fs, key, save.incarnation, TAKER)
            drained(fs, key, save)
            told.append(commit(fs, key, save, "test", Committer(save.incarnation, "session", STORE_ID)).taken_over)

        inner, outer = (start, end) if whole.startswith("takeover") else (end, start)
        fs = _Interleaved(at, lambda inner=inner: inner(FileLayer()))
        outer(fs)
        if fs.left >= 0:
            break
        higher = took[0] > number
        late = taken_over_by(
            FileLayer(), key, SaveId(took[0], 1, 10, OTHER_RUN), Committer(took[0], "another", STORE_ID)
        )
        assert higher == bool(not late), f"operation {at}: exactly one of both has the last word"
        assert seen[0] or told[0] or not higher, (
            f"operation {at}: durable was reported, and the takeover goes without it"
        )
        outcomes.add((seen[0], bool(told[0]), higher))
    assert len(outcomes) >= 2, outcomes


def test_a_number_of_its_own_that_another_process_has_is_lost(key) -> None:
    number = incarnation_at(time.time())
    assert claim(FileLayer(), key, number, TAKER)
    assert claim(FileLayer(), key, number, Taker(RUN, "session", "another node"))  # its coordinator moved
    assert not claim(FileLayer(), key, number, Taker(OTHER_RUN, "another", "b"))
    assert records_of(FileLayer(), key)[0].run == RUN.hex()


def test_a_number_that_was_given_and_said_not_to_be_is_the_sessions_still(key) -> None:
    """An error after the record was made: the session went on with a number of its own, which is that very one."""
    number = take(FileLayer(), key, Taker(OTHER_RUN, "session", "node"))
    assert claim(FileLayer(), key, number, TAKER)
    assert [record.run for record in records_of(FileLayer(), key)] == [RUN.hex()]


def test_a_number_that_comes_when_none_waits_any_more_is_given_back(key) -> None:
    """A store that hung; its daemon went on with a number of the clock, and another session may be the job by now."""
    with pytest.raises(CkptdError, match="too late"):
        take(FileLayer(), key, TAKER, until=time.monotonic() - 1)
    assert records_of(FileLayer(), key) == []
    assert take(FileLayer(), key, TAKER, until=time.monotonic() + 60) == 1


def test_a_session_that_is_over_takes_nothing_over(key) -> None:
    fs = FileLayer()
    take(fs, key, TAKER)
    late = take(fs, key, Taker(OTHER_RUN, "over", "node"))
    assert taken_over_by(fs, key, SAVE, US) == late
    assert taken_over_by(fs, key, SAVE, Committer(1, "session", STORE_ID, ["over"])) == 0


def test_a_load_of_the_session_itself_takes_nothing_over_at_any_operation_of_a_commit_beside_it(tmp_path) -> None:
    """A number that the session takes while the records are read is no other session's."""
    at = 0
    while True:
        (tmp_path / str(at)).mkdir()
        give_id(tmp_path / str(at))
        key = JobKey(str(tmp_path / str(at)), "demo")
        take(FileLayer(), key, TAKER)
        fs = _Interleaved(at, lambda key=key: take(FileLayer(), key, TAKER))
        assert taken_over_by(fs, key, SAVE, US) == 0, f"operation {at}"
        if fs.left >= 0:
            break
        at += 1
    assert at >= 1


def test_a_load_of_the_session_itself_takes_nothing_over(key) -> None:
    fs = FileLayer()
    take(fs, key, TAKER)
    drained(fs, key, SAVE)
    take(fs, key, Taker(OTHER_RUN, "session", "node"))  # its own load has begun
    assert commit(fs, key, SAVE, "test", US).taken_over == 0
