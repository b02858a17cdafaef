"""The mean of a job's last checkpoints, however each is cut, against what torch makes of them."""

import json
import os

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

from ckptd import cli
from ckptd.checkpoint.export.names import Choice
from ckptd.checkpoint.export.run import Order, export
from ckptd.shared.base.errors import DamagedError, UsageError
from ckptd.shared.base.ids import SaveId
from tests import checkpoints
from tests.boxes import Whole, write_checkpoint
from tests.runs import RUN

KINDS = {"F32": torch.float32, "F64": torch.float64, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64}
SHAPES = {
    "model.rows": ("F32", (10, 7)), "model.across": ("BF16", (6, 12, 5)), "model.half": ("F16", (9, 3)),
    "model.wide": ("F64", (4, 3)), "model.scale": ("F32", ()), "model.big": ("BF16", (6000, 500)),
    "model.none": ("F32", (0, 4)), "model.ids": ("I64", (5,)),
}  # fmt: skip


def state_of(step):
    torch.manual_seed(step)
    made = {name: torch.randn(shape, dtype=torch.float64) * 10 for name, (_, shape) in SHAPES.items()}
    return {name: made[name].to(KINDS[SHAPES[name][0]]) for name in SHAPES}


def whole(tensor, dtype):
    flat = tensor.contiguous().reshape(-1)
    return Whole(dtype, tuple(tensor.shape), flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")


def put(store, step, ranks, cut="rows", **changed):
    """A checkpoint of a state, cut by rows or by columns over so many ranks, or whole on the first."""
    boxes = [{} for _ in range(ranks)]
    for name, tensor in (state_of(step) | changed).items():
        one = whole(tensor, SHAPES[name][0])
        dim = 0 if cut == "rows" or len(one.shape) < 2 else 1
        if not one.shape or one.shape[dim] < ranks or cut == "whole":
            boxes[0][name] = (one, (0,) * len(one.shape), one.shape)
            continue
        size = one.shape[dim]
        for rank in range(ranks):
            first, last = size * rank // ranks, size * (rank + 1) // ranks
            offsets = tuple(first if d == dim else 0 for d in range(len(one.shape)))
            sizes = tuple(last - first if d == dim else n for d, n in enumerate(one.shape))
            boxes[rank][name] = (one, offsets, sizes)
    return write_checkpoint(store, boxes, save=SaveId(1, step // 10, step, RUN), aliases={"model.tied": "model.rows"})


@pytest.fixture
def store(tmp_path):
    store = tmp_path / "store"
    store.mkdir()
    put(store, 10, 2)
    put(store, 20, 3, "columns")
    put(store, 30, 1)
    put(store, 40, 3)
    return store


def mean_of(*steps, dtype=None):
    """By torch: added in F32, or F64, the oldest first."""
    states = [state_of(step) for step in steps]
    made = {}
    for name, newest in states[-1].items():
        if not newest.dtype.is_floating_point:
            made[name] = newest
            continue
        total = torch.zeros(newest.shape, dtype=torch.float64 if newest.dtype == torch.float64 else torch.float32)
        for state in states:
            total += state[name]
        made[name] = (total / len(states)).to(dtype if dtype and newest.shape else newest.dtype)
    return made | {"model.tied": made["model.rows"]}


def assert_equal(found, expected):
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def test_the_mean_of_checkpoints_that_are_cut_in_three_ways(store, tmp_path):
    summary = export(Order(source=str(store / "demo"), out=str(tmp_path / "out"), average=3))
    assert_equal(safetensors.torch.load_file(tmp_path / "out/model.safetensors"), mean_of(20, 30, 40))
    assert (summary.step, summary.averaged_steps) == (40, [40, 30, 20])


def test_up_to_a_checkpoint_and_cast(store, tmp_path):
    source, out = str(store / "demo/step-000000030.i0001"), str(tmp_path / "m.pt")
    export(Order(source=source, out=out, format="torch", average=3, choice=Choice(dtype="BF16")))
    assert_equal(torch.load(out, weights_only=True), mean_of(10, 20, 30, dtype=torch.bfloat16))


@pytest.mark.filterwarnings("ignore")
def test_a_directory_for_plain_dcp_load(store, tmp_path):
    export(Order(source=str(store / "demo"), out=str(tmp_path / "out"), format="dcp", average=2))
    expected = mean_of(30, 40)
    state = {name: torch.full_like(tensor, 3) for name, tensor in expected.items()}
    dcp.load(state, checkpoint_id=str(tmp_path / "out"))
    assert_equal(state, expected)


def test_what_is_not_alike_is_refused_and_can_be_left_out(store, tmp_path):
    put(store, 50, 2, **{"model.half": torch.zeros(9, 4, dtype=torch.float16)})
    with pytest.raises(UsageError, match=r"'model.half' is F16 \[9, 4\], and step 40 has F16 \[9, 3\] of that name"):
        export(Order(source=str(store / "demo"), out=str(tmp_path / "out"), average=2))
    assert not (tmp_path / "out").exists()


def test_dtypes_that_have_no_mean_are_named(tmp_path, capsys):
    for step in (10, 20):
        value = torch.full((4,), float(step))
        codes = {"quantized": value.to(torch.float8_e4m3fn), "phase": value.to(torch.complex64), "wide": value + 0j}
        codes["wide"] = codes["wide"].to(torch.complex128)
        state = {"model": {"w": value, "ids": value.long(), **codes}, "scale": value.to(torch.float8_e5m2)}
        checkpoints.write_checkpoint(tmp_path / "store", [state], save=SaveId(1, step // 10, step, RUN))
    source = str(tmp_path / "store/demo")
    summary = export(Order(source=source, out=str(tmp_path / "out"), average=2))
    (note,) = summary.notes
    assert note.startswith(
        "of step 20 alone, because their dtypes are not averaged (C64, F8_E4M3, F8_E5M2, complex128)"
    )
    assert note.endswith(": model.phase, model.quantized, model.wide, scale")
    assert cli.invoke(["export", source, str(tmp_path / "m.pt"), "--format", "torch", "--average", "2"]) == 0
    assert "note: of step 20 alone" in capsys.readouterr().out
    assert torch.equal(torch.load(tmp_path / "m.pt")["scale"].float(), torch.full((4,), 20.0))
    only = Choice(only=("model.w", "model.ids"))
    assert export(Order(source=source, out=str(tmp_path / "some"), average=2, choice=only)).notes == []


def test_fewer_checkpoints_than_are_asked_for(store, tmp_path):
    with pytest.raises(UsageError, match=r"job demo has 4 committed checkpoints up to step-000000040.i0001, not 5"):
        export(Order(source=str(store / "demo"), out=str(tmp_path / "out"), average=5))


def test_damage_of_an_older_one_is_named_and_nothing_is_left(store, tmp_path):
    path = store / "demo/step-000000020.i0001/r00001-p00.safetensors"
    with open(path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(DamagedError, match=r"step-000000020.i0001/r00001-p00.safetensors: block"):
        export(Order(source=str(store / "demo"), out=str(tmp_path / "out"), average=3))
    assert not (tmp_path / "out").exists()
    export(Order(source=str(store / "demo"), out=str(tmp_path / "out"), average=2))


def test_the_command(store, tmp_path, capsys):
    assert cli.invoke(["export", str(store / "demo"), str(tmp_path / "out"), "--average", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["averaged_steps"] == [40, 30]
    assert cli.invoke(["export", str(store / "demo"), str(tmp_path / "again"), "--average", "2"]) == 0
    assert "mean of steps 40, 30" in capsys.readouterr().out
    assert cli.invoke(["export", str(store / "demo"), str(tmp_path / "one"), "--average", "1"]) == 2
