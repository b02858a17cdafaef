"""Checkpoints that DeepSpeed wrote, exported without it: golden ones of each stage, held against its living engine."""

import contextlib
import os
import shutil
import struct
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from ckptd import cli
from ckptd.checkpoint.export.crc import Crcs, Stretch, combined
from ckptd.checkpoint.export.deepspeed.archives import Archive
from ckptd.checkpoint.export.names import Choice
from ckptd.checkpoint.export.run import Order, export
from ckptd.shared.base.errors import CkptdError, DamagedError, UsageError
from ckptd.shared.format.digest import BLOCK_NBYTES
from ckptd_client.files import TorchFile
from tests.flips import flip

GOLDEN = Path(__file__).parents[2] / "golden" / "zero"
STAGES = ("stage1", "stage2", "stage3")
TAGS = {**dict.fromkeys(STAGES, "global_step3"), "pipeline": "global_step2"}
TAG = "global_step3"
WEIGHTS = Choice(only=("model",), strip="model")


def exported(source, out, choice=WEIGHTS):
    export(Order(source=str(source), out=str(out), choice=choice))
    return load_file(out / "model.safetensors")


def assert_equal(found, wanted):
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(found[name], tensor), name


def expected(stage):
    return load_file(GOLDEN / stage / "expected.safetensors")


@pytest.fixture
def copy(tmp_path):
    """A checkpoint that a test may harm."""
    return lambda stage: Path(shutil.copytree(GOLDEN / stage, tmp_path / stage))


# -- what comes out


@pytest.mark.parametrize("stage", TAGS)
def test_every_tensor_is_what_the_engine_held(stage, tmp_path):
    found = exported(GOLDEN / stage, tmp_path / "out", Choice())
    assert_equal(found, expected(stage))


@pytest.mark.parametrize("stage", STAGES)
def test_torch_load_opens_it_and_ties_hold(stage, tmp_path):
    export(Order(source=str(GOLDEN / stage), out=str(tmp_path / "out.pt"), format="torch", choice=WEIGHTS))
    state = torch.load(tmp_path / "out.pt", weights_only=True)
    wanted = expected(stage)
    assert_equal({f"model.{name}": t for name, t in state.items()}, {n: wanted[n] for n in wanted if n[0] == "m"})
    assert state["head.weight"].data_ptr() == state["embed.weight"].data_ptr()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("stage", STAGES)
def test_dcp_load_opens_it_with_the_optimizers_settings(stage, tmp_path):
    out = tmp_path / "out"
    export(Order(source=str(GOLDEN / stage), out=str(out), format="dcp"))
    wanted = expected(stage)
    state = {name: torch.full_like(tensor, 7) for name, tensor in wanted.items()}
    state |= {f"optimizer.param_groups.1.{key}": None for key in ("lr", "betas", "weight_decay", "params")}
    dcp.load(state, checkpoint_id=out)
    assert_equal({name: state[name] for name in wanted}, wanted)
    settings = [state[f"optimizer.param_groups.1.{key}"] for key in ("lr", "betas", "weight_decay", "params")]
    assert settings[:3] == [0.004, (0.9, 0.999), 0.0]
    assert set(settings[3]) == {"scale", "first.bias", "norm.weight", "norm.bias"}


def test_dcp_boxes_are_whole_rows(monkeypatch, tmp_path):
    monkeypatch.setattr("ckptd.checkpoint.export.dcp_out._ROWS_NBYTES", 50)
    out = tmp_path / "out"
    export(Order(source=str(GOLDEN / "stage3"), out=str(out), format="dcp"))
    chunks = dcp.FileSystemReader(out).read_metadata().state_dict_metadata["model.embed.weight"].chunks
    assert [tuple(chunk.sizes) for chunk in chunks] == [(2, 6)] * 6 + [(1, 6)]
    state = {"model.embed.weight": torch.zeros(13, 6)}
    with pytest.warns(UserWarning, match="disabled"):
        dcp.load(state, checkpoint_id=out)
    assert_equal(state, {n: t for n, t in expected("stage3").items() if n in state})


def test_a_file_that_ckptd_laid_out_is_read_like_torchs(copy, tmp_path):
    file = copy("stage2") / TAG / "mp_rank_00_model_states.pt"
    laid = TorchFile(torch.load(file, weights_only=False)).lay_out()
    data = bytearray(laid.nbytes)
    for at, known in laid.known:
        data[at : at + len(known)] = known
    for at, flat in laid.copies:
        data[at : at + flat.numel()] = bytes(flat.numpy())
    file.write_bytes(data)
    assert_equal(exported(tmp_path / "stage2", tmp_path / "out", Choice()), expected("stage2"))


def test_half_precision_as_save_16bit_model_writes_it(tmp_path):
    found = exported(GOLDEN / "stage2", tmp_path / "out", Choice(only=("model",), strip="model", dtype="BF16"))
    module = torch.load(GOLDEN / "stage2" / TAG / "mp_rank_00_model_states.pt", weights_only=False)["module"]
    assert_equal(found, {name: tensor.bfloat16() if name == "mean" else tensor for name, tensor in module.items()})


def test_the_command_takes_the_directory_above_and_the_tags_own(tmp_path, capsys):
    for source, name in ((GOLDEN / "stage1", "a"), (GOLDEN / "stage1" / TAG, "b")):
        assert cli.invoke(["export", str(source), str(tmp_path / name), "--only", "model"]) == 0
        assert "step 3: 12 tensors" in capsys.readouterr().out
    assert_equal(*(load_file(tmp_path / name / "model.safetensors") for name in "ab"))


@pytest.mark.process
def test_it_runs_without_torch_numpy_and_an_unpickler(tmp_path):
    code = """
import pickle, sys
sys.modules.update(torch=None, numpy=None, deepspeed=None)
pickle.load = pickle.loads = pickle.Unpickler = pickle._Unpickler = None
from ckptd.cli import main
main()
"""
    for form in ("safetensors", "torch", "dcp"):
        args = ["export", str(GOLDEN / "stage3"), str(tmp_path / form), "--format", form]
        done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert_equal(load_file(tmp_path / "safetensors/model.safetensors"), expected("stage3"))


# -- what is damaged


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("form", ["safetensors", "dcp", "torch"])
def test_a_flipped_bit_of_a_tensor_is_found_by_its_crc(stage, form, copy, tmp_path):
    """Which torch.load and DeepSpeed read past."""
    file = copy(stage) / TAG / OPTIMIZER
    archive = Archive(str(file), 0)
    key = "fp32_flat_groups" if stage == "stage3" else "single_partition_of_fp32_groups"
    flip(file, archive.range_of(archive.field("optimizer_state_dict", key)[0], "").start + 5)
    order = Order(source=str(tmp_path / stage), out=str(tmp_path / "out"), format=form, choice=WEIGHTS)
    with pytest.raises(DamagedError, match=rf"{OPTIMIZER}: .*/data/\d+ \(bytes .*CRC-32"):
        export(order)
    assert not (tmp_path / "out").exists()


def test_a_file_without_crcs_is_read(copy, tmp_path):
    """As torch writes it when it is told not to take them, and ckptd for tensors."""
    for file in (copy("stage2") / TAG).iterdir():
        with zipfile.ZipFile(file) as zipped:
            for info in zipped.infolist():
                info.CRC = 0
            entries, start = zipped.infolist(), zipped.start_dir
        raw = file.read_bytes()[:start]
        with zipfile.ZipFile(file, "w") as zipped:
            zipped.fp.write(raw)
            zipped.filelist, zipped.start_dir, zipped._didModify = entries, start, True
    found = exported(tmp_path / "stage2", tmp_path / "out", Choice())
    assert_equal(found, expected("stage2"))


@given(pieces=st.lists(st.binary(max_size=70), min_size=1, max_size=5))
def test_crcs_of_pieces_are_put_together(pieces):
    crc, whole = 0, b""
    for piece in pieces:
        crc, whole = combined(crc, zlib.crc32(piece), len(piece)), whole + piece
    assert crc == zlib.crc32(whole)


def test_a_crc_over_blocks_that_come_in_any_order():
    whole = bytes(range(251)) * 150_000
    parts = [(i, whole[i * BLOCK_NBYTES : (i + 1) * BLOCK_NBYTES]) for i in range(3)]
    for start, stop, wrong in ((10, len(whole), 0), (10, len(whole), 1), (BLOCK_NBYTES - 1, BLOCK_NBYTES + 1, 1)):
        crcs = Crcs("file", [Stretch("part", start, stop - start, zlib.crc32(whole[start:stop]) ^ wrong)])
        for index, block in reversed(parts):
            crcs.check()  # before all have come there is nothing to say
            crcs.see(index, memoryview(block))
        with pytest.raises(DamagedError, match="file: part") if wrong else contextlib.nullcontext():
            crcs.check()


# -- what cannot be exported


def remove(*names):
    return lambda path: [(path / TAGS[path.name] / name).unlink() for name in names]


def cut(name, nbytes):
    return lambda path: os.truncate(path / TAG / name, nbytes)


def add(name, source=None):
    """An empty file, or a copy of one that is there."""
    return lambda path: (path / TAG / name).write_bytes((path / TAG / source).read_bytes() if source else b"")


def latest(text):
    return lambda path: (path / "latest").write_text(text)


OPTIMIZER, MODEL = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", "mp_rank_00_model_states.pt"
WRONG = {
    "a rank is missing": ("stage1", remove(OPTIMIZER), DamagedError, f"{OPTIMIZER}: missing, of 3 ranks"),
    "the last rank is missing": ("stage2", remove(OPTIMIZER), DamagedError, f"{OPTIMIZER}: missing, of 2 ranks"),
    "the model is missing": ("stage2", remove(MODEL), DamagedError, f"{MODEL}: missing"),
    "a rank's model is missing": (
        "stage3", remove(f"zero_pp_rank_1_{MODEL}"), DamagedError, f"zero_pp_rank_1_{MODEL}: missing, of 3 ranks",
    ),
    "all of the optimizer is missing": (
        "stage3",
        lambda path: [file.unlink() for file in (path / TAG).glob("*optim*")],
        DamagedError,
        "no file of the optimizer's",
    ),
    "a file is cut off": ("stage2", cut(OPTIMIZER, 4000), DamagedError, f"{OPTIMIZER} is cut off or damaged"),
    "a file is nearly whole": ("stage2", cut(OPTIMIZER, 6500), DamagedError, f"{OPTIMIZER} is cut off or damaged"),
    "a file is empty": ("stage2", cut(OPTIMIZER, 0), DamagedError, f"{OPTIMIZER} is no file of torch.save's"),
    "more ranks than saved": (
        "stage2", add(OPTIMIZER.replace("_1_", "_2_"), OPTIMIZER), DamagedError, "2 ranks saved.*files of 3",
    ),
    "two kinds of saves": ("stage2", add(OPTIMIZER.removeprefix("bf16_")), DamagedError, "of several saves"),
    "a stage is missing": (
        "pipeline",
        remove(*(f"zero_pp_rank_{rank}_mp_rank_01_optim_states.pt" for rank in (0, 1)), "mp_rank_01_model_states.pt"),
        DamagedError,
        "cut into 2 stages, of 1 there are files",
    ),
    "a stage's rank is missing": (
        "pipeline",
        remove("zero_pp_rank_1_mp_rank_01_optim_states.pt"),
        DamagedError,
        "zero_pp_rank_1_mp_rank_01_optim_states.pt: missing, of 2 ranks",
    ),
    "a stage's model is missing": (
        "pipeline", remove("mp_rank_01_model_states.pt"), DamagedError, "mp_rank_01_model_states.pt: missing",
    ),
    "a layer is missing": (
        "pipeline", remove("layer_03-model_states.pt"), DamagedError, "the layer that has 3.bias is missing",
    ),
    "tensor parallel": ("stage1", add("mp_rank_01_model_states.pt"), UsageError, r"tensor.*\n.*ds_to_universal"),
    "tensor and pipeline": ("stage1", add("layer_00-model_01-model_states.pt"), UsageError, "of tensor parallelism"),
    "experts": ("stage2", add("layer_0_expert_1_mp_rank_00_model_states.pt"), UsageError, "of experts"),
    "no latest": ("stage2", lambda path: (path / "latest").unlink(), UsageError, f"(?s)no `latest`.*/{TAG} OUT"),
    "latest that is not there": ("stage2", latest("global_step9"), UsageError, "names 'global_step9', which is no"),
    "latest out of the directory": ("stage2", latest("../stage2/" + TAG), UsageError, "which is no checkpoint there"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_said_and_where_and_nothing_is_left(case, copy, tmp_path):
    stage, harm, kind, words = WRONG[case]
    harm(copy(stage))
    with pytest.raises(kind, match=words) as raised:
        export(Order(source=str(tmp_path / stage), out=str(tmp_path / "out")))
    assert str(tmp_path / stage) in str(raised.value)
    assert raised.value.hint
    assert not (tmp_path / "out").exists()


def test_an_optimizer_of_another_save_is_found_by_its_steps(copy, tmp_path):
    file = copy("stage3") / TAG / OPTIMIZER
    archive = Archive(str(file), 0)
    state = archive.field("optimizer_state_dict", "optimizer_state_dict", "state")[0]
    with file.open("r+b") as opened:
        opened.seek(archive.range_of(state["step"], "").start)
        opened.write(struct.pack("<f", 9))
    with pytest.raises(DamagedError, match=f"(?s){OPTIMIZER}.*different saves"):
        exported(tmp_path / "stage3", tmp_path / "out")


def test_another_directory_is_none_of_deepspeeds(tmp_path):
    (tmp_path / "step").mkdir()
    (tmp_path / "latest").write_text("step")
    with pytest.raises(CkptdError, match="nothing to export in"):
        exported(tmp_path, tmp_path / "out")
