"""A checkpoint that loses its optimizer: all readers have the model to the bit, whatever process dies meanwhile."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader

from ckptd.checkpoint.reduce import Whole, _copy
from ckptd.checkpoint.reduced_image import reduced
from ckptd.checkpoint.verify import verify_path
from ckptd.shared.base.errors import MismatchError, UsageError
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.format.committed import open_records
from ckptd.shared.format.integrity import XXH3
from ckptd.shared.format.manifest import LINKED, UNPUBLISHED, make_manifest
from ckptd.shared.format.packed_layout import Known
from ckptd.shared.stores.kinds import open_files
from ckptd.store.opening import open_store
from ckptd.store.posix.removal import LESS_PREFIX, WHOLE_PREFIX
from ckptd.system import failpoints
from ckptd_client._load.rounds import read_checkpoint
from ckptd_client._local.rank import Group
from tests import pythons
from tests.checkpoints import write_checkpoint, write_files
from tests.golden import make
from tests.runs import RUN
from tests.unit.client.same import difference
from tests.unit.verbs import in_process

GOLDEN = Path(make.__file__).parent / "files" / "golden"
RANKS, HIDDEN = 2, (LESS_PREFIX, WHOLE_PREFIX)


def state_of(rank):
    generator = torch.Generator().manual_seed(rank)
    model = {"w": torch.randn(300, 7, generator=generator), "b": torch.randn(5, generator=generator).bfloat16()}
    moments = {key: {"exp_avg": torch.randn(value.shape, generator=generator)} for key, value in model.items()}
    return {
        "model": model,
        "optimizer": {"state": moments, "param_groups": [{"lr": 0.1, "params": ["w", "b"]}]},
        "optimizer_steps": 7,
        "step": rank,
    }


def kept_of(rank):
    return {key: value for key, value in state_of(rank).items() if key != "optimizer"}


def written(store, steps=(10, 20, 30), **options):
    """A checkpoint of each step; their directories."""
    states = [state_of(rank) for rank in range(RANKS)]
    saves = [SaveId(1, counter, step, RUN) for counter, step in enumerate(steps, 1)]
    said = {"metadata": {"loss": 0.5}}
    return [str(write_checkpoint(store, states, job="job", save=save, **said | options)) for save in saves]


def blank(value):
    if isinstance(value, dict):
        return {key: blank(item) for key, item in value.items()}
    if isinstance(value, list):
        return [blank(item) for item in value]
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else None


def loaded(path, state, rank=0, **options):
    fitted, _, _ = read_checkpoint(path, state, group=Group(rank, RANKS, "test"), **options)
    fitted.finish(state)
    return state


@pytest.fixture
def ckptd(capsys, monkeypatch, tmp_path):
    return in_process(capsys, monkeypatch, tmp_path)


class Written:
    """A file that is written into memory."""

    def __init__(self, nbytes):
        self.data = bytearray(nbytes)

    def write(self, data, offset):
        self.data[offset : offset + len(data)] = data


@pytest.mark.parametrize("name", sorted(os.listdir(GOLDEN)))
def test_without_a_key_the_image_and_its_layout_are_those_that_the_client_made(name):
    """So is what is kept: whatever the client would have written of it."""
    from ckptd.checkpoint.export.read import SourceFile, VerifiedReader  # noqa: PLC0415

    files = open_files(str(GOLDEN / name), XXH3)
    records = open_records(files)
    for rank, record in enumerate(records):
        new = reduced(record, records.layout(rank), [], records.manifest.save, Known())
        assert (new.record.layout, new.record.parts) == (record.layout, record.parts)
        assert (new.record.leaves, new.record.nbytes) == (record.leaves, record.nbytes)
        source = SourceFile(record.name, record.nbytes, record.digests, record.extents(), stored=files)
        parts = [(extent, Written(extent.nbytes)) for extent in record.extents()]
        with VerifiedReader([source], 6) as reader:
            assert _copy(new, reader, parts, XXH3) == record.digests
        for extent, made in parts:
            assert bytes(made.data) == (GOLDEN / name / extent.name).read_bytes()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("dual", [True, False])
def test_all_readers_have_the_model_and_none_has_the_optimizer(tmp_path, ckptd, dual):
    old, _, newest = written(tmp_path, dual=dual)
    before = os.stat(f"{old}/COMMITTED").st_mtime
    code, out, err = ckptd("prune", "--keep-last", "3", "--keep-whole", "2", "--drop", "optimizer", str(tmp_path))
    assert (code, err) == (0, "")
    assert out.startswith(f"dropped: optimizer of {old} (")
    assert verify_path(str(tmp_path)).problems == []
    for rank in range(RANKS):
        assert difference(loaded(old, blank(kept_of(rank)), rank), kept_of(rank)) == ""
        assert difference(loaded(newest, blank(state_of(rank)), rank), state_of(rank)) == ""
        found = safetensors.torch.load_file(f"{old}/r{rank:05d}-p00.safetensors")
        names = {name for name in found if not name.startswith("__ckptd_pad__")}
        assert names == {"model.w", "model.b"}
        assert torch.equal(found["model.w"], state_of(rank)["model"]["w"])
    if dual:
        stock = {"step": None, **{f"model.{key}": torch.zeros_like(one) for key, one in state_of(0)["model"].items()}}
        names = dcp.FileSystemReader(old).read_metadata().state_dict_metadata
        assert {"model.w", "model.b", "step", "optimizer_steps"} <= set(names)
        assert not [name for name in names if name.startswith("optimizer.")]
        dcp.load(stock, checkpoint_id=old)
        assert stock["step"] == 0
        flat = {"model.b": torch.zeros(5, dtype=torch.bfloat16)}
        dcp.load(flat, storage_reader=HuggingFaceStorageReader(old))
    assert os.stat(f"{old}/COMMITTED").st_mtime == pytest.approx(before, abs=1e-3)
    assert os.path.getsize(f"{old}/r00000-p00.safetensors") < os.path.getsize(f"{newest}/r00000-p00.safetensors")
    listed = json.loads(ckptd("list", str(tmp_path), "--json")[1])["jobs"][0]["checkpoints"]
    assert [(row["step"], row["dropped"], row["metadata"]) for row in listed] == [
        (30, [], {"loss": 0.5}), (20, [], {"loss": 0.5}), (10, ["optimizer"], {"loss": 0.5}),
    ]  # fmt: skip
    assert re.search(r" 10 .* without optimizer", ckptd("list", str(tmp_path))[1])
    assert ckptd("prune", "--keep-last", "3", "--keep-whole", "2", "--drop", "optimizer", str(tmp_path))[1] == (
        "nothing to remove\n"
    )


def test_the_error_of_a_load_names_what_was_dropped(tmp_path, ckptd):
    old, *_ = written(tmp_path)
    assert ckptd("prune", "--keep-whole", "1", "--drop", "optimizer", str(tmp_path))[0] == 0
    with pytest.raises(MismatchError, match="'optimizer' was dropped from this checkpoint") as error:
        loaded(old, blank(state_of(0)))
    assert "load a state without 'optimizer', or with strict=False" in error.value.hint
    state = blank(state_of(0))
    loaded(old, state, strict=False)
    assert difference(state["model"], state_of(0)["model"]) == ""
    assert not state["optimizer"]["state"]["w"]["exp_avg"].any()
    with pytest.raises(MismatchError) as other:
        loaded(old, {**blank(kept_of(0)), "scheduler": 1})
    assert "dropped" not in str(other.value)


def test_a_dry_run_changes_nothing_and_json_has_the_bytes(tmp_path, ckptd):
    old, *_ = written(tmp_path)
    args = ("prune", "--keep-whole", "2", "--drop", "optimizer", "--drop", "nothing", str(tmp_path))
    nbytes = RANKS * 4 * (300 * 7 + 5)
    code, out, _ = ckptd(*args, "--dry-run")
    assert (code, f"would be dropped: optimizer of {old} (16.4 KiB)" in out) == (0, True)
    assert os.path.exists(f"{old}/r00000-p00.safetensors")
    found = json.loads(ckptd(*args, "--dry-run", "--json")[1])
    assert found["reduced"] == [
        {"step": 10, "path": old, "keys": ["optimizer"], "nbytes": nbytes, "dropped": False, "why": ""}
    ]
    assert difference(loaded(old, blank(state_of(0))), state_of(0)) == ""
    found = json.loads(ckptd(*args, "--json")[1])
    assert (found["ok"], found["reduced"][0]["dropped"], found["checkpoints"]) == (True, True, [])


def test_the_newest_and_pinned_ones_stay_whole(tmp_path, ckptd):
    first, second, newest = written(tmp_path)
    assert ckptd("pin", first)[0] == 0
    assert ckptd("prune", "--keep-last", "1", "--keep-every", "10", "--drop", "optimizer", str(tmp_path))[0] == 0
    for path in (first, newest):
        assert difference(loaded(path, blank(state_of(1)), 1), state_of(1)) == ""
    assert difference(loaded(second, blank(kept_of(1)), 1), kept_of(1)) == ""


@pytest.mark.parametrize("mark", [LINKED, UNPUBLISHED])
def test_what_a_trainer_looks_for_stays_whole_and_says_so(tmp_path, ckptd, mark):
    old, *_ = written(tmp_path)
    Path(old, mark).mkdir() if mark == LINKED else Path(old, mark).touch()
    code, out, _ = ckptd("prune", "--keep-whole", "2", "--drop", "optimizer", str(tmp_path))
    assert (code, "not dropped: optimizer of" in out, "it stays whole" in out) == (1, True, True)
    assert os.path.getsize(f"{old}/r00000-p00.safetensors") > 16_000


def test_a_trainers_own_files_stay_whole(tmp_path, ckptd):
    key = JobKey(str(tmp_path), "job")
    for counter, step in enumerate((10, 20), 1):
        write_files(key, SaveId(1, counter, step, RUN), {"model.bin": b"x" * 100}, None)
    code, out, _ = ckptd("prune", "--keep-whole", "1", "--drop", "optimizer", str(tmp_path))
    assert (code, "a trainer's own files" in out) == (1, True)


def test_a_tensor_that_is_tied_to_a_dropped_one_keeps_the_checkpoint_whole(tmp_path):
    shared = torch.arange(4.0)
    states = [{"optimizer": {"w": shared}, "model": {"w": shared}}]
    path = write_checkpoint(tmp_path, states, job="job", save=SaveId(1, 1, 10, RUN))
    whole = Whole(open_store(str(tmp_path), XXH3), "job", SaveId(1, 1, 10, RUN))
    with pytest.raises(UsageError, match=r"'model\.w' is tied to 'optimizer\.w'"):
        whole.drop(["optimizer"], "test")
    assert [name for name in os.listdir(path.parent) if "partial" in name] == []
    assert verify_path(str(tmp_path)).problems == []


def test_a_damaged_byte_gets_no_new_digest(tmp_path, ckptd):
    old, *_ = written(tmp_path)
    with open(f"{old}/r00001-p00.safetensors", "r+b") as file:
        file.seek(-9000, os.SEEK_END)
        file.write(b"\xff\x00\xff")
    code, out, _ = ckptd("prune", "--keep-whole", "2", "--drop", "optimizer", str(tmp_path))
    assert (code, "digest does not match" in out) == (1, True)
    assert "digest does not match" in "\n".join(map(str, verify_path(old).problems))


@pytest.mark.parametrize("args", [["--keep-whole", "2"], ["--drop", ""], ["--drop", "x" * 513]])
def test_flags_that_say_nothing_are_refused(tmp_path, ckptd, args):
    written(tmp_path)
    assert ckptd("prune", str(tmp_path), *args)[0] == 2


COME_BY = (
    *(point for point in failpoints.POINTS if point.startswith(("drop.", "repair."))),
    "commit.vote-unsynced", "commit.before-manifest", "commit.index-unsynced", "commit.index-named",
    "commit.manifest-unsynced", "commit.before-committed", "commit.committed-unsynced", "remove.after-rename",
    "remove.after-committed",
)  # fmt: skip


def prune(store, *args, point=""):
    command = [sys.executable, "-P", "-m", "ckptd", "prune", str(store), "--keep-last", "3", *args]
    environ = os.environ | ({failpoints.VARIABLE: point} if point else {})
    return pythons.run(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)


@pytest.mark.process
@pytest.mark.parametrize("point", COME_BY)
def test_a_crash_at_any_step_leaves_the_whole_or_the_rest(tmp_path, point):
    old, *_ = written(tmp_path)
    done = prune(tmp_path, "--keep-whole", "2", "--drop", "optimizer", point=point)
    assert done.returncode == -9, done.stdout
    if point == "drop.after-aside":
        assert [name for name in os.listdir(tmp_path / "job") if name.startswith(WHOLE_PREFIX)]
    done = prune(tmp_path)  # sweeps, as a daemon of the job does
    assert done.returncode == 0, done.stdout
    assert not [name for name in os.listdir(tmp_path / "job") if name.startswith(WHOLE_PREFIX)]
    assert verify_path(str(tmp_path)).problems == []
    for rank in range(RANKS):
        assert difference(loaded(old, blank(kept_of(rank)), rank, strict=False), kept_of(rank)) == ""
    done = prune(tmp_path, "--keep-whole", "2", "--drop", "optimizer")
    assert done.returncode == 0, done.stdout
    for left in (tmp_path / "job").glob(f"{LESS_PREFIX}*"):
        os.utime(left, (0, 0))  # a day later
    assert prune(tmp_path).returncode == 0
    names = sorted(name for name in os.listdir(tmp_path / "job") if name.startswith("."))
    assert [name for name in names if "partial" in name or "trash" in name or name.startswith(HIDDEN)] == []
    assert difference(loaded(old, blank(kept_of(0))), kept_of(0)) == ""
    assert verify_path(str(tmp_path)).problems == []


def test_what_a_manifest_says_was_dropped_is_held_against_the_votes(tmp_path, monkeypatch):
    def other(votes, **options):
        return msgspec.structs.replace(make_manifest(votes, **options), dropped=("optimizer",))

    monkeypatch.setattr("ckptd.store.posix.commit.make_manifest", other)
    path = write_checkpoint(tmp_path, [state_of(0)], job="job", save=SaveId(1, 1, 10, RUN))
    assert "('optimizer',)" in "\n".join(map(str, verify_path(str(path)).problems))
