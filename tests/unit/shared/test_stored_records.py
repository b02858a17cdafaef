"""Records of images from the votes that a manifest pins: what two votes say of one rank, and several threads."""

import errno
import os
import threading

import msgspec
import pytest

from ckptd.shared.base.errors import DamagedError
from ckptd.shared.format import manifest as man
from ckptd.shared.format.committed import EVERYTHING, About, Opened, open_committed
from ckptd.shared.format.committed_record import encode_committed, make_committed
from ckptd.shared.format.integrity import XXH3
from ckptd.shared.format.stored_records import StoredRecords, read_vote_of
from ckptd.shared.stores.directory import DirectoryFiles
from tests.stored import voted
from tests.unit.shared.test_manifest import SAVE, a_file, a_vote

OTHER_SET = "e00000001-89abcdef"


class Memory:
    """Files by name in a checkpoint."""

    def __init__(self, files):
        self.files = {f"/store/job/{SAVE.dirname}/{name}": data for name, data in files.items()}

    def read_file(self, path, max_nbytes):
        self.size(path)
        return self.files[path]

    def size(self, path):
        if path not in self.files:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return len(self.files[path])

    def listdir(self, path):
        return sorted({name[len(path) + 1 :].partition("/")[0] for name in self.files if name.startswith(f"{path}/")})


def stored(*votes, runs):
    """A checkpoint of these votes, from which these runs of ranks are read, whatever they say."""
    sound = man.make_manifest([a_vote("n0", (0,)), a_vote("n1", (1,))], save=SAVE, writer="test")
    refs = [
        man.VoteRef(one.vote.node, 0, one.nbytes, one.digest, run) for one, run in zip(votes, runs, strict=True)
    ]  # fmt: skip
    manifest = msgspec.structs.replace(sound, votes=refs)
    raw = man.encode_record(manifest)
    files = {manifest.place_of(ref): man.encode_record(one.vote) for ref, one in zip(refs, votes, strict=True)}
    committed = make_committed(manifest, raw)
    files |= {committed.manifest: raw, man.COMMITTED: encode_committed(committed)}
    return DirectoryFiles(f"/store/job/{SAVE.dirname}", XXH3, Memory(files)), manifest


def other(rank):
    return msgspec.structs.replace(a_file(rank), leaves=b"other")


def test_two_pinned_votes_that_differ_about_a_rank_are_found():
    second = a_vote("n1", files=[other(0), a_file(1)])
    files, manifest = stored(a_vote("n0", (0,)), second, runs=[(0, 1), (1, 2)])
    opened = Opened(files)
    found = [str(one) for one in open_committed(opened, EVERYTHING) if one.about == About.VOTES]
    where = files.where(manifest.place_of(manifest.votes[1]))
    assert found == [f"{where}: says something else of r00000-p00.safetensors than another vote"]
    with pytest.raises(DamagedError, match="of n0 and n1 differ about r00000-p00") as caught:
        list(StoredRecords(files, manifest))
    assert files.location in caught.value.message
    assert "ckptd verify" in caught.value.hint


def test_two_pinned_votes_that_agree_about_a_rank_are_sound():
    files, manifest = stored(a_vote("n0", (0,)), a_vote("n1", (0, 1)), runs=[(0, 1), (1, 2)])
    assert [record.rank for record in StoredRecords(files, manifest)] == [0, 1]
    assert not [one for one in open_committed(Opened(files), EVERYTHING) if one.about == About.VOTES]


def test_a_vote_of_another_sets_directory_is_none_of_the_manifests():
    there = a_vote("n0", (0, 1))
    moved = voted(msgspec.structs.replace(there.vote, folder=OTHER_SET))
    files, manifest = stored(moved, runs=[(0, 2)])
    with pytest.raises(DamagedError, match=f"in {OTHER_SET}"):
        read_vote_of(files, manifest, manifest.votes[0])


def test_a_thread_that_finds_a_vote_finds_its_records():
    """Another one is between the vote and its records."""
    files, manifest = stored(a_vote("n0", (0, 1)), runs=[(0, 2)])
    found = []

    class Between(dict):
        def update(self, *more):
            if not found:
                found.append(None)
                other = threading.Thread(target=lambda: found.append(records[1]))
                other.start()
                other.join()
            super().update(*more)

    records = StoredRecords(files, manifest)
    records._records = Between()
    assert records[0].rank == 0
    assert found[1].rank == 1
