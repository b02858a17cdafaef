"""The committed checkpoints: read to the bit by today's readers, and made again, byte for byte, by today's writer.

If the last fails, the format has changed. If that is meant: a new version in docs/format.md, CHANGELOG.md, and then
``make golden``.
"""

import os
import re
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

from ckptd.checkpoint.verify import verify_path
from ckptd.shared.format.committed_record import decode_committed
from ckptd.shared.format.dtypes import DTYPES
from ckptd.shared.format.manifest import STOCK_OBJECTS, decode_manifest
from ckptd_client._load.rounds import read_checkpoint
from ckptd_client._local.rank import Group
from ckptd_client._state.tensors import DTYPE_OF
from tests import pythons
from tests.cluster import ROOT
from tests.golden import make
from tests.runs import manifest_in
from tests.unit.client.same import bits, difference

FILES = Path(__file__).parent / "files"
TORCH = (FILES / "torch").read_text().strip()
HERE = torch.__version__.split("+")[0]
LACKING = sorted(set(DTYPES) - set(DTYPE_OF))  # dtypes that an older torch does not know
WHOLE = {"even": (6, 4), "odd": (5, 6), "one": (1, 5)}  # of the sharded model's weights


def directory(name):
    return FILES / "golden" / make.SAVES[name].dirname


def blank(value):
    """The same nesting, other values."""
    if isinstance(value, dict):
        return type(value)((key, blank(item)) for key, item in value.items())
    if isinstance(value, list | tuple) and any(isinstance(item, torch.Tensor | dict) for item in value):
        return type(value)(map(blank, value))
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else None


def load(name, state, rank=0, ranks=1):
    fitted, _, notes = read_checkpoint(str(directory(name)), state, group=Group(rank, ranks, "golden"))
    fitted.finish(state)
    assert notes == ()
    return state


def known(name):
    """Skips the checkpoint of all dtypes where torch has not all of them."""
    if name == "dtypes" and LACKING:
        pytest.skip(f"torch {HERE} has no {', '.join(LACKING)}")


def test_verify():
    report = verify_path(str(FILES))
    assert report.ok, report.problems
    assert len(report.checked) == len(make.SAVES)


@pytest.mark.parametrize("name", ["plain", "dtypes"])
def test_our_reader(name):
    known(name)
    state = {"plain": make.plain, "dtypes": make.dtypes}[name]()
    assert not difference(load(name, blank(state)), state)


def test_what_was_said_of_a_save():
    path = manifest_in(directory("said"))
    manifest = decode_manifest(path.read_bytes(), where="golden")
    committed = decode_committed((directory("said") / "COMMITTED").read_bytes(), where="golden")
    assert manifest.metadata == committed.metadata == make.SAID
    assert not difference(load("said", {"weight": torch.zeros(2, 3)}), {"weight": make.filled(2, 3)})


def whole_of(name):
    shape = WHOLE[name.split(".")[-2]] if name.endswith("weight") else (WHOLE[name.split(".")[-2]][0],)
    return make.filled(*shape)


def plain_model():
    shapes = {f"{part}.weight": shape for part, shape in WHOLE.items()}
    shapes |= {f"{part}.bias": shape[:1] for part, shape in WHOLE.items()}
    return {name: torch.full(shape, -1.0) for name, shape in shapes.items()}


@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (2, 3)])
def test_our_reader_puts_shards_together(rank, ranks):
    state = {"model": plain_model() | {"count": torch.tensor(0)}, "exp_avg": plain_model(), "rank": -1, "lr": -1}
    load("fsdp2", state, rank, ranks)
    for name, tensor in state["model"].items():
        assert bits(tensor) == (bits(torch.tensor(5)) if name == "count" else bits(whole_of(name))), name
    assert all((tensor == 0.25).all() for tensor in state["exp_avg"].values())
    assert (state["rank"], state["lr"]) == (0, 0.5)


def test_safetensors():
    known("dtypes")
    found = safetensors.torch.load_file(directory("dtypes") / "r00000-p00.safetensors")
    for code, tensors in make.dtypes().items():
        for kind, tensor in tensors.items():
            got, made = bits(found[f"{code}.{kind}"]), bits(tensor)
            assert got[2] == made[2]
            assert DTYPES[code].view or got == made, "safetensors has no code for the others: they lie there as views"


@pytest.mark.parametrize("reader", ["plain dcp.load", "HuggingFace reader"])
@pytest.mark.filterwarnings("ignore")
def test_stock_readers_of_torch(reader):
    if reader == "HuggingFace reader" and not hasattr(dcp, "HuggingFaceStorageReader"):
        pytest.skip(f"torch {HERE} has no HuggingFaceStorageReader")
    state = {f"model.{name}": tensor for name, tensor in plain_model().items()}
    if reader == "plain dcp.load":
        state = {"model": plain_model(), "lr": -1.0}
        dcp.load(state, checkpoint_id=str(directory("fsdp2")))
        assert state["lr"] == 0.5
        state = {f"model.{name}": tensor for name, tensor in state["model"].items()}
    else:
        dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(directory("fsdp2"))), no_dist=True)
    for name, tensor in state.items():
        assert bits(tensor) == bits(whole_of(name)), name


def made_again(folder):
    done = pythons.run(
        [sys.executable, "-W", "ignore", "-m", "tests.golden.make", str(folder)],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/client"},
        capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def without_digests(files):
    """By names in which no digest stands."""
    return {re.sub(r"\.[0-9a-f]{16}\.(vote|manifest)$", r".\1", name): data for name, data in files.items()}


@pytest.mark.timeout(300)
def test_the_writer_makes_the_same_bytes(tmp_path):
    """With another torch all but objects.pt, which its torch.save makes, and what pins that.

    One that lacks a dtype makes everything but the checkpoint of all dtypes.
    """
    found = made_again(tmp_path / "files")
    golden = {str(path.relative_to(FILES)): path.read_bytes() for path in sorted(FILES.rglob("*")) if path.is_file()}
    if HERE == TORCH:
        assert list(found) == list(golden)
        assert [name for name in golden if found[name] != golden[name]] == []
        return
    found, golden = without_digests(found), without_digests(golden)
    assert list(found) == list(golden)
    same = [name for name in golden if not (LACKING and make.SAVES["dtypes"].dirname in name)]
    assert [name for name in same if name.endswith(".safetensors") and found[name] != golden[name]] == []
    for name in [name for name in same if name.endswith("manifest")]:
        ours, theirs = (decode_manifest(files[name], where=name) for files in (found, golden))
        assert (ours.files, ours.nbytes) == (theirs.files, theirs.nbytes)
        assert [s.name for s in ours.stock] == [s.name for s in theirs.stock]


def test_one_other_bit_would_be_noticed(tmp_path):
    """That the comparison above compares."""
    raw = manifest_in(directory("plain")).read_bytes()
    manifest = decode_manifest(raw, where="golden")
    assert [ref.ranks for ref in manifest.votes]
    assert any(stock.name == STOCK_OBJECTS for stock in manifest.stock)
