import io

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load

from ckptd.shared.base.ids import SaveId
from ckptd.shared.format.dtypes import DTYPES
from ckptd.shared.format.packed_layout import decode_layout, encode_layout
from ckptd.shared.torchfile.image import ALIGN, Box, make_image, make_layout, wrap
from ckptd_client._state.tensors import DTYPE_OF
from tests.runs import RUN

SAVE = SaveId(3, 17, 100, RUN)
VIEWED = {code for code, dtype in DTYPES.items() if dtype.view}
READABLE = sorted(set(DTYPE_OF) - {"F8_E8M0"} - VIEWED)  # safetensors writes the code but has no torch dtype for it
SHAPES = st.lists(st.integers(0, 9), max_size=4).map(tuple)


def random_tensor(code, shape, seed=0):
    """Any bytes that are a value of the dtype."""
    generator = torch.Generator().manual_seed(seed)
    dtype = DTYPE_OF[code]
    top = 2 if code == "BOOL" else 100
    if code == "float4_e2m1fn_x2":
        return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8).view(dtype)
    return torch.randint(0, top, shape, generator=generator).to(dtype)


def raw(tensor):
    """The tensor's bytes."""
    return bytes(tensor.reshape(-1).view(torch.uint8).tolist()) if tensor.numel() else b""


def equal(a, b):
    """Same dtype, shape and bytes."""
    return (a.dtype, a.shape, raw(a)) == (b.dtype, b.shape, raw(b))


def dual_file(tensors, rank=0):
    """(layout, file bytes) of a dual image with these tensors."""
    codes = {dtype: code for code, dtype in DTYPE_OF.items()}
    boxes = [Box(n, codes[t.dtype], tuple(t.shape), tuple(t.shape), (0,) * t.dim()) for n, t in tensors.items()]
    image = make_image(boxes, rank=rank, world_size=rank + 1)
    data = bytearray(image.image_nbytes)
    data[: image.header_nbytes] = dict(image.patched_headers(SAVE))[0]
    for start, filler in image.fillers:
        data[start : start + len(filler)] = filler
    for offset, tensor in zip(image.data_offsets, tensors.values(), strict=True):
        bytes_ = raw(tensor)
        data[offset : offset + len(bytes_)] = bytes_
    layout = decode_layout(
        encode_layout(make_layout(image, paths={n: (("k", n),) for n in tensors}, aliases={})), where="test"
    )
    return layout, bytes(data)


@pytest.mark.parametrize("code", sorted(DTYPE_OF))
@pytest.mark.parametrize("shape", [(), (0, 4), (3,), (5, 7), (2, 1, 300)])
def test_head_payload_and_tail_are_what_torch_loads(code, shape):
    tensor = random_tensor(code, shape)
    around = wrap(code, shape, tensor.nbytes, start=1000, align=64)
    assert (1000 + len(around.head)) % 64 == 0
    archive = around.head + raw(tensor) + around.tail
    assert equal(torch.load(io.BytesIO(archive), weights_only=True), tensor)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(READABLE), SHAPES), max_size=6))
def test_one_file_two_readers(specs):
    tensors = {f"t{i}": random_tensor(code, shape, i) for i, (code, shape) in enumerate(specs)}
    layout, data = dual_file(tensors)
    by_safetensors = load(data)
    for entry in layout.tensors:
        assert entry.data_offset % ALIGN == 0
        archive = data[entry.slice_offset : entry.slice_offset + entry.slice_nbytes]
        assert equal(torch.load(io.BytesIO(archive), weights_only=True), tensors[entry.name])
        assert equal(by_safetensors[entry.name], tensors[entry.name])


@pytest.mark.parametrize("code", sorted(VIEWED & set(DTYPE_OF)))
def test_a_dtype_without_a_code_is_itself_to_torch_and_numbers_with_one_more_dimension_to_safetensors(code):
    tensor = random_tensor(code, (3, 5))
    layout, data = dual_file({"t": tensor})
    (entry,) = layout.tensors
    archive = data[entry.slice_offset : entry.slice_offset + entry.slice_nbytes]
    assert equal(torch.load(io.BytesIO(archive), weights_only=True), tensor)
    found = load(data)["t"]
    assert found.shape == (3, 5, DTYPES[code].view[1])
    assert raw(found) == raw(tensor)


def test_fillers_of_two_ranks_never_share_a_name():
    names = [set(load(dual_file({"t": torch.ones(3)}, rank)[1])) for rank in (0, 1)]
    assert names[0] & names[1] == {"t"}


@pytest.mark.parametrize("nbytes", [(1 << 32) - 4, 1 << 32, 5 << 30])
def test_large_payloads_use_zip64(nbytes):
    """The archive of a sparse file of that size loads; nothing of that size is written or read."""
    sizes = (nbytes,)
    around = wrap("U8", sizes, nbytes, start=0, align=64)
    small = wrap("U8", (16,), 16, start=0, align=64)
    big = nbytes >= 0xFFFFFFFF
    assert (len(around.head) > len(small.head)) == big or not big
    assert (b"PK\x06\x06" in around.tail) == big or nbytes + len(around.head) >= 0xFFFFFFFF


def test_a_sparse_archive_of_five_gigabytes_is_mapped_by_torch(tmp_path):
    nbytes = 5 << 30
    around = wrap("U8", (nbytes,), nbytes, start=0, align=64)
    path = tmp_path / "big.pt"
    with path.open("wb") as file:
        file.write(around.head)
        file.seek(len(around.head) + nbytes - 1)
        file.write(b"\7")
        file.write(around.tail)
    tensor = torch.load(path, mmap=True, weights_only=True)
    assert tensor.shape == (nbytes,)
    assert tensor[-1] == 7


def test_the_size_of_llama_8b_over_64_ranks_grows_by_less_than_a_thousandth():
    boxes = []
    for part, code in (("model", "BF16"), ("master", "F32"), ("exp_avg", "F32"), ("exp_avg_sq", "F32")):
        shapes = [("q", (64, 4096)), ("k", (16, 4096)), ("v", (16, 4096)), ("o", (64, 4096)), ("norm", (64,))]
        shapes += [("w1", (224, 4096)), ("w2", (64, 14336)), ("w3", (224, 4096)), ("norm2", (64,))]
        boxes += [
            Box(f"{part}.layers.{i}.{n}.weight", code, shape, shape, (0,) * len(shape))
            for i in range(32)
            for n, shape in shapes
        ]
    plain = make_image(boxes, rank=3, world_size=64, dual=False)
    dual = make_image(boxes, rank=3, world_size=64)
    assert dual.image_nbytes <= plain.image_nbytes * 1.001
