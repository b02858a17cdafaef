"""Real checkpoints, exported, and opened by the real safetensors and torch."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ckptd import cli
from ckptd.checkpoint.export import casts, run, safetensors_out, torch_out
from ckptd.checkpoint.export.names import Choice
from ckptd.checkpoint.export.run import Order, export
from ckptd.shared.base.errors import CkptdError, DamagedError, UsageError
from ckptd.shared.base.ids import SaveId
from ckptd.shared.format.digest import BLOCK_NBYTES
from ckptd.shared.torchfile.zip_write import Archive
from tests.boxes import Whole, some_whole, write_checkpoint
from tests.flips import flip
from tests.runs import RUN, manifest_in

DTYPES = {
    "F32": torch.float32, "F64": torch.float64, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
WHOLES = {
    "model.w": some_whole("F32", (10, 7)),
    "model.across": some_whole("BF16", (6, 12, 5), 2),
    "model.norm": some_whole("F32", (9,), 3),
    "model.steps": some_whole("I64", (), 4),
    "model.none": some_whole("F32", (0, 4), 5),
    "model.big": some_whole("F32", (5000, 300), 6),
    **{f"kinds.{code}": some_whole(code, (5, 3), i) for i, code in enumerate(DTYPES)},
}


def cuts(world_size=3):
    """Rows over ranks; one tensor across; replicas on all; small things on the first rank alone."""
    ranks = [{} for _ in range(world_size)]
    for name, whole in WHOLES.items():
        for rank, cut in enumerate(ranks):
            if name == "model.across":
                cut[name] = (whole, (0, rank * 4, 0), (6, 4, 5))
            elif name in {"model.w", "model.big"} or name.startswith("kinds"):
                offsets, sizes = whole.rows(rank, world_size)
                if sizes[0]:
                    cut[name] = (whole, offsets, sizes)
            elif name == "model.norm" or rank == 0:
                cut[name] = (whole, (0,) * len(whole.shape), whole.shape)
    return ranks


@pytest.fixture
def checkpoint(tmp_path):
    return write_checkpoint(tmp_path / "store", cuts(), aliases={"model.tied": "model.w"})


@pytest.fixture(autouse=True)
def _store(tmp_path):
    (tmp_path / "store").mkdir()


def raw(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def assert_whole(state, wholes=WHOLES):
    assert set(wholes) <= set(state)
    for name, whole in wholes.items():
        assert (state[name].dtype, tuple(state[name].shape)) == (DTYPES[whole.dtype], whole.shape), name
        assert raw(state[name]) == whole.data, name


def loaded(out):
    """All tensors of an exported directory, through its index."""
    index = json.loads((out / safetensors_out.INDEX).read_text())
    state = {}
    for file in sorted(set(index["weight_map"].values())):
        with safetensors.safe_open(out / file, "pt") as opened:
            state |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    assert set(state) == set(index["weight_map"])
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in state.values())
    return state


# --- safetensors ---


def test_every_tensor_is_whole(checkpoint, tmp_path):
    told = []
    out = tmp_path / "out"
    summary = export(Order(source=str(checkpoint), out=str(out)), lambda done, total: told.append((done, total)))
    assert sorted(os.listdir(out)) == ["model.safetensors", safetensors_out.INDEX]
    state = loaded(out)
    assert_whole(state)
    assert torch.equal(state["model.tied"], state["model.w"])
    assert (summary.tensors, summary.step, summary.leaves_left_out) == (len(WHOLES) + 1, 30, 3)
    assert told[-1][0] == told[-1][1] == sum(len(w.data) for w in WHOLES.values()) + len(WHOLES["model.w"].data)


def test_shards_stay_below_their_size(checkpoint, tmp_path):
    out = tmp_path / "out"
    summary = export(Order(source=str(checkpoint), out=str(out), max_shard_nbytes=1000))
    assert_whole(loaded(out))
    assert len(summary.files) > 3
    assert summary.files[0] == f"model-00001-of-{len(summary.files) - 1:05d}.safetensors"
    for file in summary.files[:-1]:
        tensors = safetensors.torch.load_file(out / file)
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= 1000


def test_a_job_exports_its_newest(checkpoint, tmp_path):
    newer = write_checkpoint(
        tmp_path / "store", [{"x": (some_whole("F32", (3,)), (0,), (3,))}], save=SaveId(1, 3, 31, RUN)
    )
    for source in (newer.parent, newer, newer.parent / "latest"):
        summary = export(Order(source=str(source), out=str(tmp_path / "out"), force=True))
        assert (summary.step, summary.source) == (31, str(newer))
    assert_whole(loaded(tmp_path / "out"), {"x": some_whole("F32", (3,))})
    (newer / "COMMITTED").write_text("{")
    summary = export(Order(source=str(newer.parent), out=str(tmp_path / "out"), force=True))
    assert summary.step == 30
    assert str(newer) in summary.notes[0]


def test_names(checkpoint, tmp_path):
    out = tmp_path / "out"
    choice = Choice(only=("model", "kinds.F3"), strip="model.", renames={"model.w": "weight"})
    export(Order(source=str(checkpoint), out=str(out), choice=choice))
    assert set(loaded(out)) == {"weight", "tied", "across", "norm", "steps", "none", "big"}
    export(Order(source=str(checkpoint), out=str(out), choice=Choice(only=("model.tied",)), force=True))
    assert_whole(loaded(out), {"model.tied": WHOLES["model.w"]})


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        (Choice(only=("modle",)), "no tensor begins with modle\n  hint: it has kinds, model"),
        (Choice(renames={"model.x": "y"}), "--map names what is not there: model.x"),
        (Choice(renames={"model.w": "model.big"}), "would both be called 'model.big'"),
        (Choice(renames={"model.w": "__metadata__"}), "cannot be called"),
    ],
)
def test_names_that_cannot_be(checkpoint, tmp_path, choice, words):
    with pytest.raises(UsageError) as caught:
        export(Order(source=str(checkpoint), out=str(tmp_path / "out"), choice=choice))
    assert words in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_force_replaces_an_earlier_export_and_nothing_else(checkpoint, tmp_path):
    out = tmp_path / "out"
    export(Order(source=str(checkpoint), out=str(out), max_shard_nbytes=1000))
    (out / "config.json").write_text("{}")
    (out / ".model-00001-of-00009.safetensors.tmp-0123456789ab").write_text("of a killed one")
    with pytest.raises(UsageError, match=r"there already\n  hint: replace it: ckptd export .* --force"):
        export(Order(source=str(checkpoint), out=str(out)))
    export(Order(source=str(checkpoint), out=str(out), force=True))
    assert sorted(os.listdir(out)) == ["config.json", "model.safetensors", safetensors_out.INDEX]
    assert_whole(loaded(out))


def test_no_force_replaces_a_checkpoint(checkpoint, tmp_path):
    (tmp_path / "other").mkdir()
    other = write_checkpoint(tmp_path / "other", [{"w": (some_whole("U8", (4, 4)), (0, 0), (4, 4))}])
    before = sorted(os.listdir(other))
    for kind in ("safetensors", "dcp"):
        with pytest.raises(UsageError, match="is a checkpoint itself"):
            export(Order(source=str(checkpoint), out=str(other), format=kind, force=True))
    assert sorted(os.listdir(other)) == before


def test_columns_larger_than_blocks(tmp_path):
    whole = some_whole("U8", (4096, 10_000))
    ranks = [{"w": (whole, (0, at), (4096, 5000))} for at in (0, 5000)]
    assert BLOCK_NBYTES < 4096 * 5000
    source = write_checkpoint(tmp_path / "store", ranks)
    export(Order(source=str(source), out=str(tmp_path / "out")))
    assert raw(loaded(tmp_path / "out")["w"]) == whole.data


# --- torch ---


def test_torch_load_opens_it(checkpoint, tmp_path):
    out = tmp_path / "model.pt"
    summary = export(Order(source=str(checkpoint), out=str(out), format="torch"))
    assert summary.files == ["model.pt"]
    for mmap in (False, True):
        state = torch.load(out, weights_only=True, mmap=mmap)
        assert_whole(state)
        assert next(iter(state)) == "model.w"
        assert state["model.tied"].data_ptr() == state["model.w"].data_ptr()


def test_torch_nested_as_saved(tmp_path):
    wholes = {"model.1.0": WHOLES["model.w"], "opt.7.exp.avg": WHOLES["model.norm"]}
    paths = {
        "model.1.0": (("k", "model"), ("l", 1), ("t", 0)),
        "opt.7.exp.avg": (("k", "opt"), ("i", 7), ("k", "exp.avg")),
    }
    cut = {name: (whole, (0,) * len(whole.shape), whole.shape) for name, whole in wholes.items()}
    source = write_checkpoint(tmp_path / "store", [cut], paths=paths, aliases={"tied": "model.1.0"})
    out = tmp_path / "model.pt"
    export(Order(source=str(source), out=str(out), format="torch", nested=True))
    state = torch.load(out, weights_only=True)
    assert raw(state["model"][1][0]) == WHOLES["model.w"].data
    assert state["model"][0] is None
    assert isinstance(state["model"][1], tuple)
    assert raw(state["opt"][7]["exp.avg"]) == WHOLES["model.norm"].data
    assert state["tied"].data_ptr() == state["model"][1][0].data_ptr()


def test_a_list_that_claims_to_be_endless_stays_a_dict():
    assert torch_out.nest({"a": "ref"}, {"a": (("l", 1 << 40),)}) == {1 << 40: "ref"}


def test_zip64(monkeypatch, checkpoint, tmp_path):
    """As for files of more than 4 GiB, by a lower limit: the fields say "see the wide ones"."""
    plan = torch_out.plan_file("x", [])
    assert plan.nbytes == sum(len(blob) for _, blob in plan.blobs)
    size = Archive()
    start = size.reserve("data/0", 5 << 30)
    size.add("version", b"3\n")
    size.close()
    path = tmp_path / "sparse.zip"
    with open(path, "wb") as file:
        for offset, blob in size.blobs:
            file.seek(offset)
            file.write(blob)
    import zipfile  # noqa: PLC0415

    with zipfile.ZipFile(path) as opened:
        infos = {info.filename: info for info in opened.infolist()}
        assert infos["archive/data/0"].file_size == 5 << 30
        assert opened.read("archive/version") == b"3\n"
        assert infos["archive/version"].header_offset == start + (5 << 30)
    assert start % 4096 == 0


# --- dcp ---


def read_by_dcp(out):
    """Every tensor of the directory, by torch's reader."""
    metadata = dcp.FileSystemReader(out).read_metadata()
    found = {
        name: torch.full(entry.size, 1, dtype=torch.uint8).to(entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(found, checkpoint_id=str(out), no_dist=True)
    return found


ALONE = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@ALONE
def test_dcp_load_opens_it(checkpoint, tmp_path):
    out = tmp_path / "out"
    summary = export(Order(source=str(checkpoint), out=str(out), format="dcp"))
    assert sorted(summary.files) == [".metadata", "__0_0.distcp", "__1_0.distcp", "__2_0.distcp"]
    assert sorted(os.listdir(out)) == sorted(summary.files)
    state = read_by_dcp(out)
    assert_whole(state)
    assert raw(state["model.tied"]) == WHOLES["model.w"].data
    stored = dcp.FileSystemReader(out).read_metadata().storage_data
    assert len({(place.relative_path, place.offset) for index, place in stored.items() if "model.w" in index.fqn}) == 3


@ALONE
def test_dcp_files_stay_below_their_size_and_are_replaced_whole(checkpoint, tmp_path):
    out = tmp_path / "out"
    summary = export(Order(source=str(checkpoint), out=str(out), format="dcp", max_shard_nbytes=100_000))
    assert "__0_1.distcp" in summary.files
    choice = Choice(only=("model",), strip="model", dtype="BF16", renames={"model.w": "weight"})
    again = Order(source=str(checkpoint), out=str(out), format="dcp", choice=choice, force=True)
    assert sorted(export(again).files) == sorted(os.listdir(out))
    assert sorted(os.listdir(out)) == [".metadata", "__0_0.distcp", "__1_0.distcp", "__2_0.distcp"]
    state = read_by_dcp(out)
    assert set(state) == {"weight", "tied", "across", "norm", "steps", "none", "big"}
    assert state["weight"].dtype == torch.bfloat16
    assert raw(state["across"]) == WHOLES["model.across"].data


def test_dcp_of_a_damaged_block_leaves_nothing(checkpoint, tmp_path):
    flip(checkpoint / "r00001-p00.safetensors", -1 % os.path.getsize(checkpoint / "r00001-p00.safetensors"))
    with pytest.raises(DamagedError, match="block 0"):
        export(Order(source=str(checkpoint), out=str(tmp_path / "out"), format="dcp"))
    assert not (tmp_path / "out").exists()


# --- casts ---

SPECIAL = [0.0, -0.0, 1.0, 65504.0, 65520.0, 65519.99, 1e-8, 6e-8, 5.9e-8, 3.4e38, 3.5e38, 1e300, 1e-46, 1e-320,
           float("inf"), float("-inf"), float("nan"), -float("nan"), 1.00390625, 1.01171875, 1.0039062500001,
           1.0 + 2**-8 + 2**-40, 1.0 + 2**-8 + 2**-8 - 2**-50, 2.0**128 - 2.0**103, 2.0**128 - 2.0**119]  # fmt: skip


@pytest.mark.parametrize("wanted", casts.TARGETS)
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32", "F64"])
def test_casts_equal_torch_for_every_kind_of_number(dtype, wanted):
    generator = torch.Generator().manual_seed(1)
    if dtype in {"BF16", "F16"}:
        source = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(DTYPES[dtype])
    else:
        bits = torch.randint(-(1 << 31), 1 << 31, (1 << 17,), generator=generator, dtype=torch.int64)
        source = bits.to(torch.int32).view(torch.float32)
        source = torch.cat([source.to(torch.float64), torch.tensor(SPECIAL, dtype=torch.float64)]).to(DTYPES[dtype])
    out = bytearray(source.numel() * DTYPES[wanted].itemsize)
    casts.cast(memoryview(raw(source)), dtype, memoryview(out), wanted)
    found = torch.frombuffer(out, dtype=DTYPES[wanted])
    expected = nearest_bf16(source) if (dtype, wanted) == ("F64", "BF16") else source.to(DTYPES[wanted])
    assert torch.equal(found.isnan(), expected.isnan())
    whole = ~expected.isnan()
    assert raw(found[whole]) == raw(expected[whole])
    assert torch.equal(found.isnan(), source.isnan())


def nearest_bf16(source):
    """The nearest of the two neighbours, ties to even; torch itself rounds twice here."""
    below = (source.to(torch.float32).view(torch.int32) & ~0xFFFF).view(torch.float32)  # towards zero, or exact
    truncated = source.abs() < below.double().abs()
    below = torch.where(truncated, (below.view(torch.int32) - 0x10000).view(torch.float32), below)
    above = (below.view(torch.int32) + 0x10000).view(torch.float32)
    beyond = torch.where(above.isinf(), torch.full_like(source, 2.0**128), above.double().abs())
    low, high = source.abs() - below.double().abs(), beyond - source.abs()
    odd = (below.view(torch.int32) >> 16) & 1 == 1
    up = (high < low) | ((high == low) & odd)
    result = torch.where(up, above, below)
    result = torch.where(source.isinf() | source.isnan(), source.to(torch.float32), result)
    return result.to(torch.bfloat16)


def test_a_double_is_rounded_once():
    source = np.array([1.0 + 2**-8 + 2**-40], dtype="<f8")  # twice: down to the tie, then to even, 1.0
    out = bytearray(2)
    casts.cast(memoryview(source.tobytes()), "F64", memoryview(out), "BF16")
    assert torch.frombuffer(out, dtype=torch.bfloat16).item() == 1.0 + 2**-7


@pytest.mark.parametrize("form", ["safetensors", "torch"])
def test_cast_on_the_way(checkpoint, tmp_path, form):
    out = tmp_path / "out"
    for dtype in casts.TARGETS:
        export(Order(source=str(checkpoint), out=str(out), format=form, choice=Choice(dtype=dtype), force=True))
        state = loaded(out) if form == "safetensors" else torch.load(out, weights_only=True)
        for name, whole in WHOLES.items():
            source = torch.frombuffer(bytearray(whole.data or b"\0" * 16), dtype=DTYPES[whole.dtype])
            is_cast = whole.dtype in casts.FLOATS
            expected = source.to(DTYPES[dtype]) if is_cast else source
            assert state[name].dtype == expected.dtype
            if whole.data and not is_cast:
                assert raw(state[name]) == whole.data, name
            elif whole.data and whole.dtype != "F64":  # that one torch rounds twice
                torch.testing.assert_close(state[name].reshape(-1), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("form", ["safetensors", "torch", "dcp"])
def test_a_cast_leaves_a_count_of_steps_as_it_is(tmp_path, form):
    """In BF16 step 257 would be 256, and the optimizer would go on from there."""
    step = Whole("F32", (), np.float32(257).tobytes())
    ranks = [{"o.step": (step, (), ()), "o.avg": (some_whole("F32", (3,)), (0,), (3,))}]
    source, out = write_checkpoint(tmp_path / "store", ranks), tmp_path / "out"
    export(Order(source=str(source), out=str(out), format=form, choice=Choice(dtype="BF16")))
    found = {"o.step": torch.zeros(()), "o.avg": torch.zeros(3, dtype=torch.bfloat16)}
    if form == "dcp":
        dcp.load(found, checkpoint_id=out)
    else:
        found = loaded(out) if form == "safetensors" else torch.load(out, weights_only=True)
    assert (found["o.step"].dtype, found["o.step"].item(), found["o.avg"].dtype) == (torch.float32, 257, torch.bfloat16)


def test_without_numpy_a_cast_says_what_to_install(monkeypatch, checkpoint, tmp_path):
    monkeypatch.setitem(sys.modules, "numpy", None)
    with pytest.raises(UsageError, match=r"pip install 'ckptd\[torch\]'"):
        export(Order(source=str(checkpoint), out=str(tmp_path / "out"), choice=Choice(dtype="F16")))


# --- damage ---


@pytest.mark.parametrize("form", ["safetensors", "torch"])
def test_a_damaged_block_is_refused_and_nothing_is_left(tmp_path, form):
    whole = some_whole("U8", (3 * BLOCK_NBYTES,))
    cut = {"w": (whole, (0,), whole.shape)}
    source = write_checkpoint(tmp_path / "store", [cut])
    file = source / "r00000-p00.safetensors"
    flip(file, BLOCK_NBYTES + 77)
    out = tmp_path / "out"
    with pytest.raises(DamagedError, match=rf"(?s){file}: block 1 \(bytes {BLOCK_NBYTES} to .*hint: .*ckptd verify"):
        export(Order(source=str(source), out=str(out), format=form))
    assert sorted(os.listdir(tmp_path)) == ["store"]
    flip(file, BLOCK_NBYTES + 77)
    export(Order(source=str(source), out=str(out), format=form))
    state = loaded(out) if form == "safetensors" else torch.load(out, weights_only=True)
    assert raw(state["w"]) == whole.data


def test_damage_keeps_the_earlier_export(checkpoint, tmp_path):
    out = tmp_path / "out"
    export(Order(source=str(checkpoint), out=str(out)))
    before = (out / "model.safetensors").read_bytes()
    flip(checkpoint / "r00001-p00.safetensors", -1 % os.path.getsize(checkpoint / "r00001-p00.safetensors"))
    with pytest.raises(DamagedError):
        export(Order(source=str(checkpoint), out=str(out), force=True))
    assert sorted(os.listdir(out)) == ["model.safetensors", safetensors_out.INDEX]
    assert (out / "model.safetensors").read_bytes() == before


def test_what_is_missing_or_short_or_another_manifest_is_named(checkpoint, tmp_path):
    order = Order(source=str(checkpoint), out=str(tmp_path / "out"))
    file = checkpoint / "r00002-p00.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    with pytest.raises(DamagedError, match=f"{file}: {len(whole) - 1} bytes, should be {len(whole)}"):
        export(order)
    file.unlink()
    with pytest.raises(DamagedError, match=f"{file}: missing"):
        export(order)
    flip(manifest_in(checkpoint), 50)
    with pytest.raises(DamagedError, match=r"ckptd\..*manifest: digest does not match"):
        export(order)


def test_a_gap_is_refused_unless_it_is_left_out(tmp_path):
    ranks = cuts()
    del ranks[1]["model.w"]
    source = write_checkpoint(tmp_path / "store", ranks)
    with pytest.raises(DamagedError, match=r"'model.w' \[10, 7\]: 28 of 70 elements are in no file"):
        export(Order(source=str(source), out=str(tmp_path / "out")))
    export(Order(source=str(source), out=str(tmp_path / "out"), choice=Choice(only=("kinds",))))


def test_a_full_disk_is_reported_before_anything_is_written(monkeypatch, checkpoint, tmp_path):
    monkeypatch.setattr(run.FileLayer, "space", lambda _self, _path: (100, 1000))
    with pytest.raises(CkptdError, match="needed, 100 B free"):
        export(Order(source=str(checkpoint), out=str(tmp_path / "out")))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("source", "out", "form", "words"),
    [
        ("empty", "out", "safetensors", "nothing to export"),
        (".", "out", "safetensors", "nothing to export"),
        ("store", "out", "safetensors", "(?s)is a store, with the jobs demo.*hint: ckptd export .*store/demo OUT"),
        (
            "misspelt",
            "out",
            "safetensors",
            "(?s)misspelt does not exist.*hint: (give the directory of a checkpoint|ckptd list)",
        ),
        ("file", "out", "safetensors", "(?s)is a file.*hint: give its directory"),
        ("stock", "out", "torch", "(?s)is a directory of DCP's, not ckptd's.*load_from"),
        (f"store/demo/{SaveId(1, 2, 30, RUN).partial_dirname}", "out", "torch", "unfinished"),
        ("store/demo", "store", "torch", "is a directory"),
        ("store/demo", "file", "safetensors", "is a file"),
        ("store/demo", "store/demo/step-000000030.i0001/out", "safetensors", "in the checkpoint itself"),
        ("store/demo", "no/where", "safetensors", "(?s)no, where OUT should be made, is no directory.*mkdir -p .*no"),
        ("store/demo", "no/where.pt", "torch", "(?s)is no directory.*mkdir -p .*no"),
    ],
)
def test_wrong_places(checkpoint, tmp_path, source, out, form, words):  # noqa: PLR0917
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "stock").mkdir()
    (tmp_path / "stock" / ".metadata").touch()
    with pytest.raises(CkptdError, match=words):
        export(Order(source=str(tmp_path / source), out=str(tmp_path / out), format=form, force=True))


# --- the command ---


def test_the_command(checkpoint, tmp_path, capsys):
    names = tmp_path / "names.json"
    names.write_text('{"w": "weight", "model.w": "weight"}')
    assert cli.invoke(["export", str(checkpoint), str(tmp_path / "a"), "--map", str(names)]) == 2
    assert "names what is not there: w" in capsys.readouterr().err
    names.write_text('{"model.w": "weight"}')
    args = ["export", str(checkpoint.parent), str(tmp_path / "a"), "--only", "model", "--strip", "model"]
    assert cli.invoke([*args, "--map", str(names), "--dtype", "BF16", "--max-shard-size", "100M", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["schema"], summary["tensors"], summary["format"]) == (1, 7, "safetensors")
    assert loaded(tmp_path / "a")["weight"].dtype == torch.bfloat16
    assert cli.invoke(args) == 2
    assert cli.invoke([*args, "--force"]) == 0
    assert "7 tensors" in capsys.readouterr().out
    assert cli.invoke([*args, "--force", "--nested"]) == 2
    assert cli.invoke([*args, "--force", "--max-shard-size", "much"]) == 2
    flip(checkpoint / "r00000-p00.safetensors", 5)
    assert cli.invoke([*args, "--force"]) == 1
    assert "block 0" in capsys.readouterr().err


@pytest.mark.process
def test_it_runs_without_torch_and_numpy(checkpoint, tmp_path):
    code = """
import pickle, sys
sys.modules.update(torch=None, numpy=None)
pickle.load = pickle.loads = pickle.Unpickler = None
from ckptd.cli import main
main()
"""
    for form in ("safetensors", "torch", "dcp"):
        args = [sys.executable, "-c", code, "export", str(checkpoint), str(tmp_path / form), "--format", form]
        done = subprocess.run(args, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
