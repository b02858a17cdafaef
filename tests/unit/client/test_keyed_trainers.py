"""A client with a key under trainers: what is refused is never read, unproved, from where it lies."""

import os

import msgspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from msgspec.structs import replace

from ckptd.integrity_key import write_key
from ckptd.protocol.digest import KIND
from ckptd.protocol.errors import IntegrityError
from ckptd.protocol.manifest import COMMITTED
from ckptd.protocol.origin import Origin
from ckptd_client import _segments as segments
from ckptd_client.integrations._directory import promise
from ckptd_client.integrations._reader import reader_for, reader_of
from tests.cluster import Node

pytestmark = [pytest.mark.timeout(90), pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]


@pytest.fixture(scope="module")
def key(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("key") / "key")
    write_key(path)
    return path


@pytest.fixture(scope="module")
def node(tmp_path_factory, key):
    with Node(str(tmp_path_factory.mktemp("store"))) as node:
        node.start(CKPTD_INTEGRITY_KEY_FILE=key)
        yield node


@pytest.fixture
def connect(join, key):
    """With the key said in the call alone: the environment has none."""
    return lambda *names, **settings: join(*names, integrity_key_file=key, **settings)


@pytest.fixture
def plain_node(tmp_path_factory):
    with Node(str(tmp_path_factory.mktemp("plain"))) as node:
        node.start()
        yield node


def forge(path):
    """As who can write to the store: its record, made right for who checks without a key."""
    where = os.path.join(path, COMMITTED)
    with open(where, "rb") as file:
        said = msgspec.json.decode(file.read())
    with open(where, "wb") as file:
        file.write(msgspec.json.encode(said | {"digest_kind": KIND, "key_id": "", "proof": ""}))


# --- the reader under strategies that load through torch.distributed.checkpoint


def saved(client, step=7):
    handle = client.save({"w": torch.arange(5.0)}, step, drain=True)
    handle.wait("durable", 20)
    return Origin.of(segments.job_of(client), handle.save_id)


def loaded(reader):
    state = {"w": torch.zeros(5)}
    dcp.load(state, storage_reader=reader, no_dist=True)
    reader.close()
    return state["w"].tolist()


def test_a_directory_is_read_with_the_key_of_the_client(connect, job):
    """Here of another job, which the client's daemon does not find under this one's name."""
    origin = saved(connect())
    reader = reader_of(connect(f"{job}-2"), origin)
    assert loaded(reader) == list(range(5))


def test_a_forged_checkpoint_is_read_by_no_other_way(connect, emptied):
    client = connect()
    origin = saved(client)
    client.close()
    emptied()
    forge(origin.path)
    with pytest.raises(IntegrityError, match=f"{COMMITTED}.* is not keyed"):
        reader_of(connect(), origin)


def test_without_its_records_it_is_no_trainers_own(connect, emptied):
    """Whoever takes them away has the trainer's loader read what lies in its directory."""
    client = connect()
    origin = saved(client)
    client.close()
    emptied()
    os.unlink(os.path.join(origin.path, COMMITTED))
    with pytest.raises(IntegrityError, match=r"(?s)nothing proves it.*hint: .*integrity='xxh3'"):
        reader_of(connect(), origin)


def test_what_was_saved_over_it_is_no_trainers_own(connect, join, plain_node, tmp_path):
    client, place = connect(), str(tmp_path)
    promise(place, saved(client))
    reader = reader_for(client, place)
    assert reader.tier == "arena"
    reader.close()
    (tmp_path / ".metadata").write_bytes(b"of somebody else")
    with pytest.raises(IntegrityError, match="something was saved over it"):
        reader_for(client, place)
    assert reader_for(join(on=plain_node), place) is None
    (tmp_path / ".ckptd").unlink()
    assert reader_for(client, place) is None, "what was never ckptd's is the trainer's to read"


def test_without_a_key_what_ckptd_has_no_more_is_left_to_the_trainer(join, plain_node):
    client = join(on=plain_node)
    origin = saved(client)
    os.rename(origin.path, f"{origin.path}.old")
    other = replace(origin, store=os.path.join(origin.store, "elsewhere"))
    assert reader_of(join("other", on=plain_node), other) is None
