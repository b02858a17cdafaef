"""A client with a key under trainers: what is refused is never read, unproved, from where it lies."""

import os
from contextlib import nullcontext
from types import SimpleNamespace

import msgspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from msgspec.structs import replace

from ckptd.shared.base.errors import IntegrityError
from ckptd.shared.files.integrity_key import write_key
from ckptd.shared.format.digest import KIND
from ckptd.shared.format.manifest import COMMITTED
from ckptd.shared.format.origin import Origin
from ckptd_client.client import staging_of
from ckptd_client.integrations import deepspeed, hf, lightning
from ckptd_client.integrations._kit.dcp_reader import reader_for, reader_of
from ckptd_client.integrations._kit.drafts import prepare_in_place
from ckptd_client.integrations._kit.memory_directory import MemoryDirectory
from ckptd_client.integrations._kit.trainer_run import TrainerRun
from ckptd_client.integrations.accelerate import CkptdAccelerator
from tests.cluster import Node

pytestmark = [pytest.mark.timeout(240), pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]


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
    handle.wait("durable", 60)
    return Origin.of(staging_of(client).job, handle.save_id)


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
    prepare_in_place(place, saved(client), synced=())
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


# --- trainers that save files of their own


@pytest.fixture(params=["keyed", "xxh3"])
def world(request, key, join, emptied, tmp_path):
    """Trainings that save files to a folder, with a key and without."""
    return World(request, key if request.param == "keyed" else None, join, emptied, tmp_path / "out")


class World:
    def __init__(self, request, key, join, emptied, out):
        self.keyed = key is not None
        self.node = request.getfixturevalue("node" if key else "plain_node")
        self.out, self._join, self._emptied = out, join, emptied
        self.settings = {"store": self.node.store, "arena": self.node.arena, "start": False}
        self.settings |= {"integrity_key_file": key} if key else {}
        out.mkdir()

    def join(self):
        return self._join(on=self.node, **self.settings)

    def run(self, request, job):
        run = TrainerRun(str(self.out), self.settings | {"job": job})
        request.addfinalizer(run.close)
        return run

    def save(self, *names, content=b"as saved"):
        """Published directories of a training that has ended; nothing of it is in memory. Their checkpoints."""
        found = []
        with self.join() as client:
            for step, name in enumerate(names):
                handle = client.save_files({"file.pt": content}, step, directory=self.out / name, drain=True)
                handle.wait("durable", 60)
                found.append(Origin.of(staging_of(client).job, handle.save_id).path)
            job = client.job
        assert self._emptied(job, self.node)
        return [str(self.out / name) for name in names], found

    def refusal(self, said):
        """What becomes of bytes that ckptd refuses: with a key they are not loaded."""
        return pytest.raises(IntegrityError, match=rf"(?s){said}.*hint: .*xxh3") if self.keyed else nullcontext()


def damage(path):
    """So that ckptd refuses it; what a trainer finds in its directory is the same file."""
    (image,) = [entry.path for entry in os.scandir(path) if entry.name.endswith(".bin")]
    with open(image, "r+b") as file:
        file.write(b"FORGED")


spoiled = pytest.mark.parametrize(  # a forged one is, without a key, one like any other
    ("world", "spoil"), [("keyed", damage), ("keyed", forge), ("xxh3", damage)], indirect=["world"]
)


def read(directory):
    with open(os.path.join(directory, "file.pt"), "rb") as file:
        return file.read()


@pytest.fixture(autouse=True)
def last(monkeypatch):
    """What Trainer finds in the folder."""
    monkeypatch.setattr(hf, "_last", lambda out: os.path.join(out, max(n for n in os.listdir(out) if "-" in n)))


@spoiled
@pytest.mark.parametrize("asked", [True, "path"])
def test_hf_resumes_nothing_that_was_refused(world, spoil, request, job, asked):
    (place,), (final,) = world.save("checkpoint-1")
    spoil(final)
    run = world.run(request, job)
    with world.refusal("nothing proves it"):
        assert hf._place_to_resume(run, str(world.out), place if asked == "path" else True) == place


@spoiled
def test_hf_resumes_none_that_is_newer_than_what_was_left(world, spoil, request, job):
    """The newest was refused, and an older one found."""
    (_, place), (_, final) = world.save("checkpoint-1", "checkpoint-2")
    spoil(final)
    run = world.run(request, job)
    with world.refusal("nothing proves it"):
        assert hf._place_to_resume(run, str(world.out), True) == place


def test_hf_reads_what_is_published_through_ckptd_where_it_must_be_proved(world, request, job):
    (older, newer), _ = world.save("checkpoint-1", "checkpoint-2")
    run = world.run(request, job)
    for asked, place in ((older, older), (newer, newer), (True, newer)):
        where = hf._place_to_resume(run, str(world.out), asked)
        assert (where == place) == (not world.keyed)
        assert read(where) == b"as saved"
        run.loaded()


def test_what_was_altered_where_it_is_published_is_not_loaded(world, request, job):
    (place,), _ = world.save("checkpoint-1")
    os.unlink(f"{place}/file.pt")
    (world.out / "checkpoint-1" / "file.pt").write_bytes(b"FORGED")
    run = world.run(request, job)
    for find in (run.newest, lambda: run.find(place)):
        with world.refusal("altered"):
            assert find() is None
    assert run.bring(str(world.out / "none")) == "it was not saved"


def test_a_directory_that_ckptd_has_no_more_is_not_loaded(world, request, job):
    (place,), (final,) = world.save("checkpoint-1")
    os.rename(final, f"{world.out}/away")
    run = world.run(request, job)
    with world.refusal("has it no more"):
        assert run.find(place) is None
    (world.out / "checkpoint-9").mkdir()
    assert run.find(str(world.out / "checkpoint-9")) is None, "it was never ckptd's"


def test_accelerate_loads_nothing_that_was_refused(world, request, job):
    (_, place), (_, final) = world.save("checkpoint_1", "checkpoint_2")
    damage(final)
    run = world.run(request, job)
    with world.refusal("nothing proves it"):
        assert CkptdAccelerator._ckptd_newest(None, run, str(world.out)) == place


def test_accelerate_reads_through_ckptd_what_must_be_proved(world, request, job):
    (place,), _ = world.save("checkpoint_1")
    run = world.run(request, job)
    where = CkptdAccelerator._ckptd_newest(None, run, str(world.out))
    assert (where == place) == (not world.keyed)
    assert read(where) == b"as saved"


def test_a_memory_directory_is_made_where_what_is_published_must_be_proved(world):
    (place,), _ = world.save("one")
    client = world.join()
    with client.load_files() as files:
        memory = MemoryDirectory(files, client.group, place)
    assert (memory.path == place) == (not world.keyed)
    assert read(memory.path) == b"as saved"
    memory.close()


@pytest.fixture
def lightning_io(world):
    io = object.__new__(lightning.CkptdCheckpointIO)
    io._client, io._saved, io.handle = world.join(), {}, None
    return io


@spoiled
def test_lightning_reads_no_file_that_was_refused(world, spoil, request):
    (place, other), (_, final) = world.save("one", "other")
    spoil(final)
    io = request.getfixturevalue("lightning_io")
    with world.refusal("nothing proves it"):
        assert io._read(f"{other}/file.pt") is None
    assert io._read(f"{place}/file.pt") == (b"as saved" if world.keyed else io._read(f"{place}/file.pt"))


def test_lightning_reads_every_file_that_must_be_proved_through_ckptd(world, request):
    (older, newer), _ = world.save("one", "other")
    io = request.getfixturevalue("lightning_io")
    assert io._read(f"{newer}/file.pt") == b"as saved"
    assert io._read(f"{older}/file.pt") == (b"as saved" if world.keyed else None)
    os.unlink(f"{newer}/file.pt")
    (world.out / "other" / "file.pt").write_bytes(b"FORGED")
    with world.refusal("nothing proves it"):
        assert io._read(f"{newer}/file.pt") is None
    (world.out / "mine.pt").write_bytes(b"of another program")
    assert io._read(str(world.out / "mine.pt")) is None


@pytest.fixture
def attached(world, lone_group):
    made = object.__new__(deepspeed.Attached)
    made.client = world.join()
    made._model_engine = SimpleNamespace(global_rank=0, load_universal_checkpoint=lambda: False)
    made._load = lambda load_dir, tag, *_args, **_options: f"{load_dir}/{tag}"
    return made


@spoiled
@pytest.mark.parametrize("tag", [None, "two"])
def test_deepspeed_loads_no_tag_that_was_refused(world, spoil, request, tag):
    _, finals = world.save("one", "two")
    (world.out / "latest").write_text("two")
    spoil(finals[1])
    attached = request.getfixturevalue("attached")
    with world.refusal("nothing proves it"):
        assert attached._load_checkpoint(str(world.out), tag) == f"{world.out}/{tag}"
    for final in finals:
        os.rename(final, f"{final}.old")
    with world.refusal("nothing proves it"):
        assert attached._load_checkpoint(str(world.out), tag) == f"{world.out}/{tag}"


def test_deepspeed_loads_each_tag_that_must_be_proved_through_ckptd(world, request):
    (older, _), _ = world.save("one", "two")
    attached = request.getfixturevalue("attached")
    files = attached._found(str(world.out), "one")
    if world.keyed:
        with files:
            assert files.directory == older
            with world.refusal("pickles"):
                attached._is_allowed(files)
    else:
        assert files is None
    assert attached._found(str(world.out), "mine") is None, "it was never ckptd's"
    os.unlink(f"{older}/file.pt")
    (world.out / "one" / "file.pt").write_bytes(b"FORGED")
    with world.refusal("nothing proves it"):
        assert attached._found(str(world.out), "one") is None
