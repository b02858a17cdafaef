"""What a node asks of the store beside its images: a few calls, none of them in a directory that all nodes share."""

import mmap
import os
from collections import Counter
from contextlib import nullcontext

import msgspec

from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.format.integrity import XXH3
from ckptd.shared.format.manifest import ParityRecord
from ckptd.shared.format.slot import align_up
from ckptd.store.image import Flow, Image
from ckptd.store.posix.scan import Place
from ckptd.store.posix.store import PosixStore
from ckptd.system.files import FileLayer
from tests.runs import RUN, SET, give_id
from tests.slots import make_vote, write_slot

SAVE = SaveId(1, 1, 100, RUN)
MOST_CREATED, MOST_SYNCED = 2, 3


class Counting(FileLayer):
    """Counts by directory what is made, synced and listed; images and their syncs apart."""

    def __init__(self):
        self.made, self.synced, self.listed = Counter(), Counter(), Counter()
        self._images = set()

    def open_write(self, path, *, direct):
        fd = super().open_write(path, direct=direct)
        if direct and ".parity" not in path:
            self._images.add(fd)
        else:
            self.made[os.path.dirname(path)] += 1
        return fd

    def mkdir(self, path):
        made = super().mkdir(path)
        self.made[os.path.dirname(path)] += made
        return made

    def fsync(self, fd):
        super().fsync(fd)
        self.synced["a file"] += fd not in self._images
        self._images.discard(fd)

    def fsync_dir(self, path):
        super().fsync_dir(path)
        self.synced[path] += 1

    def listdir(self, path):
        found = super().listdir(path)
        self.listed[path] += 1
        return found


def image(name, data):
    pages = mmap.mmap(-1, align_up(len(data)))
    pages[: len(data)] = data
    return lambda: nullcontext(Image(name, len(data), memoryview(pages)))


def drained(key, node, ranks, *, parity, folder=SET):
    """The calls of one node's drain and vote."""
    fs = Counting()
    store = PosixStore(key.store, XXH3, fs)
    slots = [write_slot(f"{key.store}/slot", key, SAVE, rank=rank, world_size=64) for rank in ranks]
    images = [image(slot.layout.file, slot.image) for slot in slots]
    assert store.put_files(key.job, SAVE, folder, images, Flow())
    said = None
    if parity:
        said = ParityRecord(folder, f"{'0' * 16}-{ranks[0]:02d}.parity", 4096, 1, bytes(16))
        store.put_files(key.job, SAVE, folder, [image(said.place, bytes(4097))], Flow())
    vote = make_vote(key, SAVE, node, slots, world_size=64)
    store.put_vote(key.job, msgspec.structs.replace(vote, parity=said, folder=folder))
    return fs


def test_a_node_makes_two_files_and_syncs_three_times_in_its_sets_directory_alone(tmp_path):
    give_id(tmp_path)
    key = JobKey(str(tmp_path), "demo")
    place = Place(key, SAVE)
    for parity in (False, True):
        for number in range(4):
            ranks = range(8 * number, 8 * number + 8)
            fs = drained(key, f"node{number}", ranks, parity=parity)
            if number == 0 and not parity:
                continue  # it makes the directories
            assert sum(fs.made.values()) <= MOST_CREATED, fs.made
            assert sum(fs.synced.values()) <= MOST_SYNCED, fs.synced
            own = place.set_dir(SET)
            assert {*+fs.made, *+fs.synced, *fs.listed} <= {own, "a file"}
            assert fs.listed[own] <= 2, "once a drain, whatever the number of files"


def test_the_first_node_of_a_set_makes_its_directory_and_syncs_none_that_is_shared(tmp_path):
    give_id(tmp_path)
    key = JobKey(str(tmp_path), "demo")
    drained(key, "node0", range(8), parity=False)
    fs = drained(key, "node8", range(8, 16), parity=True, folder="e00000001-89abcdef")
    place = Place(key, SAVE)
    assert fs.made == {f"{place.partial}/sets": 1, place.set_dir("e00000001-89abcdef"): 2}
    assert {*fs.synced} == {place.set_dir("e00000001-89abcdef"), "a file"}
