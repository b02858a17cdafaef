import functools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.shared.base.errors import UsageError
from ckptd.shared.base.ids import NO_RUN, SaveId
from ckptd.shared.format.dtypes import itemsize
from ckptd.shared.format.layout import box_nbytes
from ckptd.shared.format.packed_layout import decode_layout, encode_layout
from ckptd.shared.torchfile.image import FILLER_PREFIX, MAX_HEADER_NBYTES, SAVE_ID_OFFSET, Box, make_layout
from ckptd.shared.torchfile.image import make_image as make_any_image
from tests.runs import RUN

make_image = functools.partial(make_any_image, dual=False)  # the dual image has tests of its own
CODES = ["BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "I16", "U16", "F16", "BF16", "I32", "F32", "I64", "F64", "C64"]
SAVE = SaveId(3, 17, 100, RUN)


def whole(name, dtype, sizes):
    return Box(name, dtype, sizes, sizes, (0,) * len(sizes))


def image_bytes(image, save=SAVE):
    """The file: every payload filled with its index among the boxes."""
    data = bytearray(image.image_nbytes)
    data[: image.header_nbytes] = dict(image.patched_headers(save))[0]
    for index, (box, start) in enumerate(zip(image.boxes, image.data_offsets, strict=True)):
        nbytes = box_nbytes(box.dtype, box.sizes)
        data[start : start + nbytes] = bytes([index % 2]) * nbytes
    return bytes(data)


def header_json(image):
    return json.loads(image.header[8:])


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30) | st.text('"\\./{}[]:\0\x7fé☃', max_size=8)
names = texts.filter(lambda name: not name.startswith("__"))
boxes_of = st.lists(
    st.builds(whole, names, st.sampled_from(CODES), st.lists(st.integers(0, 9), max_size=4).map(tuple)),
    max_size=12,
    unique_by=lambda box: box.name,
)


@given(boxes_of)
@settings(deadline=None)
def test_safetensors_reads_every_image(boxes):
    safetensors = pytest.importorskip("safetensors")
    image = make_image(boxes, rank=0, world_size=1)
    found = dict(safetensors.deserialize(image_bytes(image)))
    assert found.keys() == {box.name for box in boxes}
    for index, box in enumerate(boxes):
        entry = found[box.name]
        assert (entry["dtype"], tuple(entry["shape"])) == (box.dtype, box.sizes)
        assert set(entry["data"]) <= {index % 2}
        assert len(entry["data"]) == box_nbytes(box.dtype, box.sizes)


@given(boxes_of)
@settings(deadline=None)
def test_payloads_are_dense_and_aligned(boxes):
    image = make_image(boxes, rank=0, world_size=1)
    assert image.header_nbytes % 4096 == 0
    end = image.header_nbytes
    for start, box in sorted(zip(image.data_offsets, boxes, strict=True), key=lambda p: (p[0], box_nbytes(*p[1][1:3]))):
        nbytes = box_nbytes(box.dtype, box.sizes)
        assert start == end
        assert nbytes == 0 or start % min(nbytes & -nbytes, 4096) == 0
        assert nbytes == 0 or start % itemsize(box.dtype) == 0
        end = start + nbytes
    assert end == image.image_nbytes


def test_torch_loads_values(tmp_path):
    torch = pytest.importorskip("torch")
    load_file = pytest.importorskip("safetensors.torch").load_file
    tensors = {
        "w": torch.randn(3, 5),
        "half": torch.randn(7).bfloat16(),
        "mask": torch.tensor([True, False]),
        "step": torch.tensor(12.0),
        "none": torch.empty(0, 4),
        "fp8": torch.randn(9).to(torch.float8_e4m3fn),
        "big": torch.arange(2048),
    }
    codes = dict(zip(tensors, ["F32", "BF16", "BOOL", "F32", "F32", "F8_E4M3", "I64"], strict=True))
    image = make_image([whole(n, codes[n], tuple(t.shape)) for n, t in tensors.items()], rank=0, world_size=1)
    data = bytearray(image_bytes(image))
    for start, tensor in zip(image.data_offsets, tensors.values(), strict=True):
        raw = bytes(tensor.reshape(-1).view(torch.uint8).tolist())
        data[start : start + len(raw)] = raw
    (tmp_path / "x.safetensors").write_bytes(data)
    found = load_file(tmp_path / "x.safetensors")
    assert all(torch.equal(found[n].view(torch.uint8), t.view(torch.uint8)) for n, t in tensors.items() if t.dim())
    assert found["step"] == 12.0
    assert found["none"].shape == (0, 4)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_stock_reader_joins_the_rows_of_two_ranks(tmp_path):
    torch = pytest.importorskip("torch")
    hf = pytest.importorskip("torch.distributed.checkpoint.hf_storage")
    dcp = torch.distributed.checkpoint
    rows = torch.arange(20, dtype=torch.float32).reshape(5, 4)
    for rank, (start, stop) in enumerate([(0, 3), (3, 5)]):
        image = make_image([Box("w", "F32", (stop - start, 4), (5, 4), (start, 0))], rank=rank, world_size=2)
        layout = make_layout(image, paths={"w": (("k", "w"),)}, aliases={})
        payload = rows[start:stop].numpy().tobytes()
        (tmp_path / layout.file).write_bytes(dict(image.patched_headers(SAVE))[0] + payload)
    state = {"w": torch.zeros(5, 4)}
    dcp.load(state, storage_reader=hf.HuggingFaceStorageReader(str(tmp_path)), no_dist=True)
    assert torch.equal(state["w"], rows)


def test_metadata_says_whose_image_it_is():
    image = make_image([Box("w", "F32", (2, 4), (8, 4), (6, 0))], rank=3, world_size=4)
    metadata = json.loads(dict(image.patched_headers(SAVE))[0][8:])["__metadata__"]
    assert json.loads(metadata.pop("DCP_SHARDING_INFO")) == {"w": {"saved_offsets": [6, 0]}}
    assert metadata == {
        "format": "pt",
        "DCP_VERSION": "1.0",
        "ckptd.version": "1",
        "ckptd.save_id": SAVE.text,
        "ckptd.rank": "3",
        "ckptd.world_size": "4",
    }


def test_the_save_id_is_patched_in_place_whatever_the_names():
    boxes = [whole('"ckptd.save_id":"', "U8", (3,)), whole("__metadata", "U8", (1,))]
    image = make_image(boxes, rank=0, world_size=1)
    buffer = bytearray(image_bytes(image, SaveId(0, 0, 0, RUN)))
    for start, header in image.patched_headers(SAVE):
        buffer[start : start + len(header)] = header
    assert bytes(buffer) == image_bytes(image, SAVE)
    assert buffer[SAVE_ID_OFFSET:].startswith(SAVE.text.encode())
    assert header_json(image)["__metadata__"]["ckptd.save_id"] == SaveId(0, 0, 0, NO_RUN).text


def test_larger_alignment_first_then_the_order_of_input():
    boxes = [
        whole("odd", "U8", (3,)),
        whole("none", "F32", (0,)),
        whole("a", "F32", (1024,)),
        whole("b", "F32", (3072,)),
    ]
    image = make_image([*boxes, whole("c", "F32", (1,))], rank=0, world_size=1)
    order = sorted(zip(image.data_offsets, "onabc", strict=True), key=lambda p: (p[0], p[1] == "n"))
    assert [letter for _, letter in order] == ["a", "b", "c", "o", "n"]


def test_the_plan_id_covers_everything_constant():
    base = Box("w", "F32", (2, 4), (8, 4), (6, 0))
    variants = [
        base._replace(name="v"),
        base._replace(dtype="I32"),
        base._replace(sizes=(4, 2)),
        base._replace(global_shape=(9, 4)),
        base._replace(offsets=(5, 0)),
    ]
    ids = {make_image([box], rank=0, world_size=2).plan_id for box in [base, base, *variants]}
    ids |= {make_image([base], rank=1, world_size=2).plan_id, make_image([base], rank=0, world_size=3).plan_id}
    assert len(ids) == 8


def test_the_layout_passes_its_own_checks():
    boxes = [whole("b", "U8", (5,)), whole("a", "F64", (2, 3)), whole("none", "F32", (0, 7)), whole("s", "I64", ())]
    image = make_image(boxes, rank=2, world_size=3)
    layout = make_layout(image, paths={box.name: (("k", box.name),) for box in boxes}, aliases={})
    found = decode_layout(encode_layout(layout), where="test")
    assert found == layout
    assert [entry.name for entry in layout.tensors] == ["b", "a", "none", "s"]
    assert layout.file == "r00002-p00.safetensors"


def test_no_tensors_at_all():
    safetensors = pytest.importorskip("safetensors")
    image = make_image([], rank=0, world_size=1)
    assert image.image_nbytes == image.header_nbytes == 4096
    assert safetensors.deserialize(dict(image.patched_headers(SAVE))[0]) == []


def test_a_name_of_many_pages():
    safetensors = pytest.importorskip("safetensors")
    image = make_image([whole("n" * 50_000, "U8", (3,))], rank=0, world_size=1)
    assert image.header_nbytes > 100_000
    assert safetensors.deserialize(image_bytes(image))[0][0] == "n" * 50_000


@pytest.mark.parametrize(
    ("found", "match"),
    [
        (["__metadata__"], "reserved"),
        ([f"{FILLER_PREFIX}3"], "reserved"),
        (["a", "a"], "two tensors"),
        (["n" * (MAX_HEADER_NBYTES // 2)], "safetensors allows 100,000,000"),
    ],
)
def test_names_that_no_file_can_hold(found, match):
    with pytest.raises(UsageError, match=match):
        make_image([whole(name, "U8", (1,)) for name in found], rank=0, world_size=1)
