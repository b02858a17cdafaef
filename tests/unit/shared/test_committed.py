"""What open_committed finds that no file on a real disk shows: the machine's own errors, and the index of files."""

import errno
import os

import msgspec
import pytest

from ckptd.shared.base.errors import CkptdError, DamagedError
from ckptd.shared.base.ids import SaveId
from ckptd.shared.format.committed import (
    EVERYTHING,
    INCARNATIONS_DIR,
    About,
    Opened,
    identify,
    open_committed,
    open_sound,
)
from ckptd.shared.format.committed_record import encode_committed, make_committed
from ckptd.shared.format.digest import KIND, digest
from ckptd.shared.format.integrity import XXH3
from ckptd.shared.format.manifest import (
    COMMITTED,
    STOCK_FILES,
    FileRecord,
    StockFile,
    Vote,
    encode_record,
    make_manifest,
    vote_file,
)
from ckptd.shared.format.packed_layout import encode_layout, parted
from ckptd.shared.format.sealed_record import VERSION
from ckptd.shared.stores.directory import DirectoryFiles
from tests.runs import MANIFEST, RUN, SET, STORE_ID, VOTES
from tests.slots import build_image, some_tensors
from tests.stored import voted

SAVE = SaveId(3, 1, 100, RUN)
PATH = f"/store/demo/{SAVE.dirname}"


class Memory:
    """Files by path. failing: the error of each that cannot be read."""

    def __init__(self, files: dict[str, bytes], failing: dict[str, int] | None = None) -> None:
        self.files, self.failing = files, failing or {}

    def read_file(self, path: str, max_nbytes: int) -> bytes:
        self.size(path)
        assert len(self.files[path]) <= max_nbytes
        return self.files[path]

    def size(self, path: str) -> int:
        if path in self.failing or path not in self.files:
            number = self.failing.get(path, errno.ENOENT)
            raise OSError(number, os.strerror(number), path)
        return len(self.files[path])

    def listdir(self, path: str) -> list[str]:
        if path in self.failing:
            raise OSError(self.failing[path], os.strerror(self.failing[path]), path)
        found = {name[len(path) + 1 :].partition("/")[0] for name in self.files if name.startswith(f"{path}/")}
        if not found:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return sorted(found)


def checkpoint(path: str = PATH, index: object = None) -> Memory:
    """Of one rank. index: content of files.json."""
    image, layout = build_image(SAVE, some_tensors())
    digests = b"".join(digest(image[at : at + (16 << 20)]) for at in range(0, len(image), 16 << 20))
    record = FileRecord(
        name=layout.file,
        rank=0,
        nbytes=len(image),
        digests=digests,
        **parted(encode_layout(layout), "x")._asdict(),
        leaves=b"\x92\x01\x80",
    )
    files, stock = {layout.file: image}, []
    if index is not None:
        files[STOCK_FILES] = data = msgspec.json.encode(index)
        stock = [StockFile(STOCK_FILES, len(data), digest(data))]
    vote = Vote(
        version=VERSION, digest_kind=KIND, store_id=STORE_ID, job="demo", save=SAVE, node="node0", folder=SET,
        world_size=1, files=[record],
    )  # fmt: skip
    place, files[place] = vote_file(vote)
    manifest = make_manifest([voted(vote)], save=SAVE, writer="test", stock=stock)
    raw = encode_record(manifest)
    committed = make_committed(manifest, raw)
    files |= {committed.manifest: raw, COMMITTED: encode_committed(committed)}
    return Memory({f"{path}/{name}": data for name, data in files.items()})


def at(files: Memory, path: str = PATH) -> DirectoryFiles:
    return DirectoryFiles(path, XXH3, files)


def findings(files: Memory, path: str = PATH) -> list[str]:
    return list(map(str, open_committed(Opened(at(files, path)), EVERYTHING)))


def test_a_sound_one_has_none() -> None:
    files = checkpoint(index={"save_id": SAVE.text, "files": {"weights.pt": "r00000-p00.safetensors"}})
    assert findings(files) == []
    assert open_sound(at(files), EVERYTHING).save == SAVE
    assert identify(at(files), job="demo", save=SAVE).save == SAVE


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ESTALE, errno.EMFILE])
@pytest.mark.parametrize("name", [COMMITTED, MANIFEST, VOTES[0], "r00000-p00.safetensors"])
def test_an_error_of_the_machine_is_no_damage(name, number) -> None:
    """It may be gone at the next try: no reader may call the checkpoint damaged for it. verify tells of it, though."""
    files = checkpoint()
    (path,) = [path for path in files.files if path.startswith(f"{PATH}/{name}")]
    files.failing[path] = number
    with pytest.raises(OSError, match=name) as caught:
        open_sound(at(files), EVERYTHING)
    assert caught.value.errno == number
    assert f"{path}: {os.strerror(number)}" in findings(files)


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ([], "no index of a trainer's files"),
        ({"save_id": "1", "files": {}}, "is of save '1', not of step 100"),
        ({"save_id": SAVE.text, "files": {"a": "../a"}}, r"names '../a', which is no file of the manifest"),
        ({"save_id": SAVE.text, "files": {"a": COMMITTED}}, "names 'COMMITTED', which is no file of"),
    ],
)
def test_the_index_of_a_trainers_files_is_of_this_save_and_of_its_files_alone(index, words) -> None:
    (found,) = open_committed(Opened(at(checkpoint(index=index))), EVERYTHING)
    assert (found.about, found.path) == (About.STOCK, f"{PATH}/{STOCK_FILES}")
    assert words in found.what
    open_sound(at(checkpoint(index=index)), EVERYTHING - {About.STOCK})  # those who read no such file are not concerned


def test_what_a_path_claims() -> None:
    """The job's name counts where .incarnations says that it is a job's directory, though it cannot be looked into."""
    elsewhere = f"/data/handed-over/{SAVE.dirname}"
    files = checkpoint(elsewhere)
    assert findings(files, elsewhere) == []
    with pytest.raises(DamagedError, match=r"holds job 'demo'.* of job 'handed-over': the name does not agree"):
        identify(at(files, elsewhere), job="handed-over")
    files.failing[f"/data/handed-over/{INCARNATIONS_DIR}"] = errno.EACCES
    assert "of job 'handed-over': the name does not agree" in findings(files, elsewhere)[0]
    other = f"/data/handed-over/step-000000200.i{SAVE.incarnation:04d}"
    assert "lies in step-000000200" in findings(checkpoint(other), other)[0]
    assert findings(checkpoint("/data/of/step-200"), "/data/of/step-200") == []


def test_no_committed_is_made_that_no_reader_takes():
    committed = identify(at(checkpoint()))
    with pytest.raises(CkptdError, match="readers take 65,536"):
        encode_committed(msgspec.structs.replace(committed, dropped=("語" * 512,) * 64))
