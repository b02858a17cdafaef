"""CkptdReader on a directory that ckptd published for a trainer: what its marker names, digests checked."""

import os
import shutil

import msgspec
import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckptd.shared.base.errors import CkptdError, DamagedError, UsageError
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.format.manifest import STOCK_METADATA
from ckptd.shared.format.origin import MARKER, Origin
from ckptd.shared.protocol.publication import Publication
from ckptd.store.posix.publish_state import publish_state
from ckptd.system.files import FileLayer
from ckptd_client.dcp import CkptdReader
from ckptd_client.integrations._kit.drafts import draft_in_place, prepare_in_place
from tests.checkpoints import SAVE, write_checkpoint
from tests.runs import RUN

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
IMAGE = "r00000-p00.safetensors"


@pytest.fixture(name="store")
def fixture_store(tmp_path):
    return tmp_path / "store"


@pytest.fixture(name="final")
def fixture_final(store):
    return write_checkpoint(store, [{"weight": torch.arange(3000.0)}])


@pytest.fixture(name="place")
def fixture_place(tmp_path, store, final):
    place, origin = tmp_path / "run" / "epoch=3", Origin.of(JobKey(str(store), "demo"), SAVE)
    place.mkdir(parents=True)
    prepare_in_place(str(place), origin, synced=())
    to = Publication.of_state(draft_in_place(str(place)))
    assert publish_state(FileLayer(str(store)), JobKey(str(store), "demo"), SAVE, to) == ""
    return place


def read(place):
    state, reader = {"weight": torch.zeros(3000)}, CkptdReader(place)
    reader.read_metadata()  # what DCP makes of what is raised here is text
    dcp.load(state, storage_reader=reader)
    assert (reader.step, reader.tier) == (SAVE.step, "pfs")
    assert torch.equal(state["weight"], torch.arange(3000.0))


def mark(place, **changes):
    raw = msgspec.json.decode((place / MARKER).read_bytes())
    (place / MARKER).write_bytes(msgspec.json.encode(raw | changes))


def test_it_is_read_where_it_is_and_where_it_was_moved_to(place, final, tmp_path):
    read(place)
    os.symlink(place, tmp_path / "last")
    read(tmp_path / "last")
    copied = shutil.copytree(place, tmp_path / "copied")
    assert not os.path.samefile(copied / STOCK_METADATA, final / STOCK_METADATA)
    read(copied)


def test_one_that_is_promised_and_not_listed_yet_is_read_once_it_is_committed(place, final):
    (place / STOCK_METADATA).unlink()
    read(place)
    final.rename(final.with_name("elsewhere"))
    with pytest.raises(UsageError, match="is gone"):
        read(place)


def test_its_digests_are_checked(place, final):
    with open(place / IMAGE, "r+b") as file:
        file.seek(-300, os.SEEK_END)
        file.write(b"?")
    with pytest.raises(dcp.api.CheckpointException, match=rf"{final}/{IMAGE}: block 0 "):
        read(place)


def test_what_was_saved_over_it_is_not_taken_for_it(place, tmp_path):
    (place / STOCK_METADATA).unlink()
    dcp.save({"weight": torch.zeros(3000)}, checkpoint_id=tmp_path / "theirs", no_dist=True)
    shutil.copy(tmp_path / "theirs" / STOCK_METADATA, place / STOCK_METADATA)
    with pytest.raises(UsageError, match=r"(?s)\.metadata is not that of .*hint: .*load_from"):
        read(place)


def test_one_whose_checkpoint_is_gone_says_so(place, final):
    shutil.rmtree(final)
    with pytest.raises(UsageError, match=r"(?s)is gone, and its digests with it.*hint: dcp.load"):
        read(place)


@pytest.mark.parametrize(
    "changes",
    [
        {"job": ".."}, {"job": "a/b"}, {"checkpoint": "../demo"}, {"checkpoint": "latest"}, {"store": "relative"},
        {"checkpoint": SAVE.partial_dirname}, {"save_id": "1"},
    ],
)  # fmt: skip
def test_a_marker_that_leads_elsewhere_is_refused_by_name(place, changes):
    mark(place, **changes)
    with pytest.raises(DamagedError, match=rf"{MARKER}: "):
        read(place)


def test_a_marker_of_another_save_is_refused(place):
    mark(place, save_id=SaveId(1, 2, 10, RUN).text)
    with pytest.raises(DamagedError, match=rf"{MARKER}: says save '.*', but .* holds step 10 "):
        read(place)


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff", b" " * 100])
def test_a_marker_that_is_none_is_refused_by_name(place, content):
    (place / MARKER).write_bytes(content)
    with pytest.raises(DamagedError, match=rf"{MARKER}: "):
        read(place)


@pytest.mark.timeout(10)
@pytest.mark.parametrize("what", ["fifo", "device", "terabyte"])
def test_a_marker_that_is_no_file_never_holds_the_reader(place, what):
    (place / MARKER).unlink()
    if what == "fifo":
        os.mkfifo(place / MARKER)
    elif what == "device":
        os.symlink("/dev/zero", place / MARKER)
    else:
        (place / MARKER).touch()
        os.truncate(place / MARKER, 1 << 40)
    with pytest.raises(CkptdError, match=rf"{MARKER}: "):
        read(place)
