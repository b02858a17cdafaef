"""Power cuts at every call of a save's way to the store and of the removal after it, on a disk that forgets."""

import contextlib
import os
import random
from collections.abc import Iterator

import pytest

from ckptd.checkpoint.verify import verify_path
from ckptd.shared.base.errors import DamagedError
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.format.committed import TRASH_PREFIX
from ckptd.shared.format.manifest import COMMITTED, STOCK_METADATA, STOCK_OBJECTS, StockObjects
from ckptd.shared.format.slot import align_up
from ckptd.store.facts import Scan
from ckptd.store.image import Flow, Image
from ckptd.store.posix import image_writer
from ckptd.store.posix.commit import commit, write_vote
from ckptd.store.posix.image_writer import make_set, write_image
from ckptd.store.posix.removal import remove_checkpoint, remove_partial, sweep_trash
from ckptd.store.posix.scan import Place, scan
from ckptd.system.files import FileLayer
from tests.disk.forgetting import ForgettingDisk, PowerCut
from tests.long_form import in_long
from tests.records import take
from tests.runs import RUN, SET, TAKER
from tests.slots import Slot, make_vote, write_slot

STORE = "/store"
KEY = JobKey(STORE, "demo")
OLD, NEW = SaveId(1, 1, 10, RUN), SaveId(1, 2, 20, RUN)
RANKS = 2  # each on a node of its own
OBJECTS = (StockObjects(b"a saved leaf", {"step": (2, 5)}), None)  # of each rank's node
LUCKS = (None, 1, *in_long(2, 3))  # what survives of the unsynced: nothing, or some, by seed


@pytest.fixture(scope="module")
def slots(tmp_path_factory: pytest.TempPathFactory) -> dict[SaveId, list[Slot]]:
    root = tmp_path_factory.mktemp("slots")
    return {
        save: [
            write_slot(root / f"{save.step}-{rank}", KEY, save, rank=rank, world_size=RANKS, archives=True)
            for rank in range(RANKS)
        ]
        for save in (OLD, NEW)
    }


@pytest.fixture(autouse=True)
def small_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_writer, "CHUNK_NBYTES", 4096)


class History:
    """What the program was told, and so may rely on, when the power went."""

    def __init__(self) -> None:
        self.durable: list[SaveId] = []
        self.removing: list[SaveId] = []

    def run(self, fs: FileLayer, slots: dict[SaveId, list[Slot]], saves: tuple[SaveId, ...] = (OLD, NEW)) -> None:
        take(fs, KEY, TAKER)
        for save in saves:
            for rank, slot in enumerate(slots[save]):
                drain_and_vote(fs, save, f"node{rank}", slot)
            commit(fs, KEY, save, "test")
            self.durable.append(save)
        if saves[-1] == OLD:
            return
        self.removing.append(OLD)
        remove_checkpoint(fs, KEY, OLD)
        sweep_trash(fs, KEY)


def drain_and_vote(fs: FileLayer, save: SaveId, node: str, slot: Slot) -> None:
    place = Place(KEY, save)
    make_set(fs, place, SET)
    padded = memoryview(slot.image.ljust(align_up(len(slot.image)), b"\0"))
    write_image(fs, place, SET, Image(slot.layout.file, len(slot.image), padded), Flow(writers=1))
    write_vote(fs, KEY, make_vote(KEY, save, node, [slot], world_size=RANKS, objects=OBJECTS[slot.layout.rank]))


def new_disk(cut_at: int = -1, *, deaf: str = "") -> ForgettingDisk:
    disk = ForgettingDisk(deaf=deaf)
    disk.mkdir(STORE)
    disk.root.synced = dict(disk.root.live)
    disk.calls, disk.cut_at = 0, cut_at
    return disk


def violations(store: str, history: History) -> Iterator[str]:
    """What is wrong with what survived, before and after a new program tidies up."""
    key = JobKey(store, KEY.job)
    fs = FileLayer()
    before = scan(fs, key)
    yield from _broken_promises(store, before, history, "after the cut")
    yield from _half_removed(store)
    for partial in before.partials:
        if partial.finishable:
            try:
                commit(fs, key, partial.save, "finisher")
            except Exception as error:  # names of images are synced by the commit: a cut before it may lose some
                if not (isinstance(error, DamagedError) and "missing" in error.message):
                    yield f"votes of {partial.save} are all there, but: {error}"
    yield from _broken_promises(store, scan(fs, key), history, "after finishing")


def _half_removed(store: str) -> Iterator[str]:
    """What a removal left. Under any name: somebody may give it another, or go by what lies in it."""
    job = f"{store}/{KEY.job}"
    for name in filter(lambda name: name.startswith(TRASH_PREFIX), os.listdir(job) if os.path.isdir(job) else ()):
        os.rename(f"{job}/{name}", f"{store}/found")
        if os.path.lexists(f"{store}/found/{COMMITTED}"):
            problems = verify_path(f"{store}/found").problems
            yield from (f"{name} is taken for a checkpoint, and half removed: {problem}" for problem in problems)
        os.rename(f"{store}/found", f"{job}/{name}")


def _broken_promises(store: str, found: Scan, history: History, when: str) -> Iterator[str]:
    offered = {entry.committed.save for entry in found.committed}
    for save in history.durable:
        if save not in offered and save not in history.removing:
            yield f"{when}: {save} was committed and is gone"
    if history.durable and not offered:
        yield f"{when}: no checkpoint is left"
    for entry in found.committed:
        path = f"{store}/{KEY.job}/{entry.dirname}"
        report = verify_path(path)
        if report.ok and not {STOCK_METADATA, STOCK_OBJECTS}.issubset(os.listdir(path)):
            yield f"{when}: {path} lacks what stock readers need"
        yield from (f"{when}: offered but damaged: {problem}" for problem in report.problems)
    yield from (f"{when}: {problem}" for problem in found.problems)


def campaign(slots: dict[SaveId, list[Slot]], tmp_path_factory: pytest.TempPathFactory, deaf: str = "") -> list[str]:
    """Every violation found by cutting the power at each call in turn."""
    whole = new_disk(deaf=deaf)
    History().run(whole, slots)
    found = []
    for cut_at in range(whole.calls + 1):
        history, disk = History(), new_disk(cut_at, deaf=deaf)
        try:
            history.run(disk, slots)
            assert cut_at == whole.calls, f"call {cut_at} was never made"
        except PowerCut:
            pass
        for seed in LUCKS:
            root = tmp_path_factory.mktemp("after")
            disk.survivors(str(root), None if seed is None else random.Random(f"{cut_at}-{seed}"))
            found += [f"cut at call {cut_at}, luck {seed}: {text}" for text in violations(f"{root}{STORE}", history)]
        if deaf and found:
            break
    return found


def test_no_power_cut_breaks_a_promise(slots, tmp_path_factory) -> None:
    assert campaign(slots, tmp_path_factory) == []


@pytest.mark.parametrize("deaf", ["fsync", "fsync_dir"])
def test_the_campaign_notices_a_disk_that_does_not_sync(slots, tmp_path_factory, deaf) -> None:
    assert campaign(slots, tmp_path_factory, deaf) != []


def test_incarnations_are_never_given_twice_whatever_is_lost(tmp_path_factory) -> None:
    fs = new_disk()
    for _ in range(7):
        take(fs, KEY, TAKER)
    calls = fs.calls
    for cut_at in range(calls + 1):
        disk, taken = new_disk(cut_at), [0]
        try:
            for _ in range(7):
                taken.append(take(disk, KEY, TAKER))  # noqa: PERF401  # kept when the power goes
        except PowerCut:
            pass
        for seed in LUCKS:
            root = tmp_path_factory.mktemp("after")
            disk.survivors(str(root), None if seed is None else random.Random(f"{cut_at}-{seed}"))
            assert take(FileLayer(), JobKey(f"{root}{STORE}", "demo"), TAKER) > taken[-1]


def test_nothing_is_lost_when_the_node_that_made_the_directories_died_unsynced(slots, tmp_path_factory) -> None:
    disk = new_disk()
    for path in (f"{STORE}/{KEY.job}", Place(KEY, NEW).partial):
        disk.mkdir(path)  # by a node that died before it synced the parents
    for rank, slot in enumerate(slots[NEW]):
        drain_and_vote(disk, NEW, f"node{rank}", slot)
    commit(disk, KEY, NEW, "test")
    assert survivors_keep(disk, NEW, tmp_path_factory)


def test_a_removal_waits_for_the_newer_commit_of_another_node_to_be_synced(slots, tmp_path_factory) -> None:
    disk = new_disk()
    History().run(disk, slots, saves=(OLD,))
    for rank, slot in enumerate(slots[NEW]):
        drain_and_vote(disk, NEW, f"node{rank}", slot)
    job = disk._dir(f"{STORE}/{KEY.job}")
    before = dict(job.live)
    commit(disk, KEY, NEW, "another node")
    job.synced = before  # as if that node had died right after its rename
    job.pending.append(dict.fromkeys(before.keys() - job.live.keys()))
    remove_checkpoint(disk, KEY, OLD)
    assert survivors_keep(disk, NEW, tmp_path_factory)


def survivors_keep(disk: ForgettingDisk, save: SaveId, tmp_path_factory: pytest.TempPathFactory) -> bool:
    history = History()
    history.durable.append(save)
    root = tmp_path_factory.mktemp("after")
    disk.survivors(str(root), None)
    return not list(violations(f"{root}{STORE}", history))


def test_of_an_unfinished_save_that_was_about_to_be_renamed_committed_goes_first(slots, tmp_path_factory) -> None:
    """COMMITTED is there a moment before the final name is; the removal may be of just that moment."""

    def run(fs: ForgettingDisk) -> None:
        for rank, slot in enumerate(slots[OLD]):
            drain_and_vote(fs, OLD, f"node{rank}", slot)
        commit(fs, KEY, OLD, "test")
        fs.rename(Place(KEY, OLD).final, Place(KEY, OLD).partial)
        fs.fsync_dir(Place(KEY, OLD).job_dir)
        fs.calls = 0
        remove_partial(fs, KEY, OLD)

    whole = new_disk()
    run(whole)
    for cut_at in range(whole.calls):
        disk = new_disk()
        disk.mkdir(f"{STORE}/{KEY.job}")
        with contextlib.suppress(PowerCut):
            run(cut_after_reset(disk, cut_at))
        for seed in LUCKS:
            root = tmp_path_factory.mktemp("after")
            disk.survivors(str(root), None if seed is None else random.Random(f"{cut_at}-{seed}"))
            assert list(_half_removed(f"{root}{STORE}")) == [], f"cut at call {cut_at}, luck {seed}"


def cut_after_reset(disk: ForgettingDisk, cut_at: int) -> ForgettingDisk:
    """The power goes at that call after the count was set back to 0."""
    disk.cut_at = cut_at
    disk.calls = -(10**6)
    return disk
