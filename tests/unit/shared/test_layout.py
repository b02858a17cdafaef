"""Layouts and leaves: believed only when they are consistent."""

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.shared.base.errors import DamagedError
from ckptd.shared.base.ids import SaveId
from ckptd.shared.format import layout as lay
from ckptd.shared.format.dtypes import itemsize
from ckptd.shared.format.packed_layout import decode_layout, encode_layout
from ckptd.shared.format.placement import MAX_DIMS
from tests.runs import RUN
from tests.slots import build_image, some_tensors

LAYOUT = build_image(SaveId(1, 1, 1, RUN), some_tensors())[1]
RAW = encode_layout(LAYOUT)


def changed(**words):
    return encode_layout(msgspec.structs.replace(LAYOUT, **words))


def entry(**words):
    first, *rest = LAYOUT.tensors
    return changed(tensors=[msgspec.structs.replace(first, **words), *rest])


def test_a_layout_comes_back():
    assert decode_layout(RAW, where="x") == LAYOUT


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (changed(version=9), "version 9"),
        (entry(data_offset=LAYOUT.header_nbytes - 1), "outside its image"),
        (entry(data_offset=LAYOUT.image_nbytes), "outside its image"),
        (entry(data_offset=LAYOUT.header_nbytes + 1), "over another"),
        (changed(image_nbytes=LAYOUT.image_nbytes - 1), "outside its image"),
        (entry(dtype="F31"), "unknown dtype"),
        (entry(offsets=(1,)), "a box outside its tensor"),
        (entry(offsets=()), "a column of"),
        (entry(sizes=()), "fewer sizes|a column of|more sizes"),
        (changed(rank=-1), "not readable"),
        (b"", "not readable"),
        (RAW[:-1], "not readable"),
        (b"\xff" * 50, "not readable"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_with_its_place(raw, words):
    with pytest.raises(DamagedError, match=words) as caught:
        decode_layout(raw, where="slot 7")
    assert caught.value.message.startswith("slot 7")


def a_raw_layout(sizes=(5000, 0, 7), **words):
    names = [f"file{number}" for number in range(len(sizes))]
    starts = [4096 + 4096 * at for at in (0, 2, 3)]
    entries = [lay.TensorEntry(n, "U8", (s,), (0,), (s,), at, s) for n, s, at in zip(names, sizes, starts, strict=True)]
    fields = {
        "version": lay.VERSION, "file": "r00000-p00.safetensors", "rank": 0, "world_size": 1, "header_nbytes": 4096,
        "image_nbytes": starts[-1] + sizes[-1], "plan_id": "p", "tensors": entries,
        "paths": {name: (("k", name),) for name in names}, "aliases": {}, "names": names,
        "parts": [lay.LayoutPart(4096, 4096), *(lay.LayoutPart(size, 0) for size in sizes)],
    }  # fmt: skip
    return lay.Layout(**fields | words)


def renamed(name):
    raw = a_raw_layout()
    tensors = [msgspec.structs.replace(raw.tensors[0], name=name), *raw.tensors[1:]]
    paths = {name: (("k", name),)} | {n: raw.paths[n] for n in raw.names[1:]}
    return a_raw_layout(names=[name, *raw.names[1:]], tensors=tensors, paths=paths)


def test_a_raw_layout_comes_back():
    """The second file is empty, and has a page to itself."""
    raw = a_raw_layout()
    assert decode_layout(encode_layout(raw), where="x") == raw
    assert [tuple(extent) for extent in raw.extents()] == [
        ("r00000-p00.safetensors", 0, 4096), ("r00000-p01.bin", 4096, 5000), ("r00000-p02.bin", 12288, 0),
        ("r00000-p03.bin", 16384, 7),
    ]  # fmt: skip
    assert [len(own.tensors) for _, own in lay.file_layouts(raw)] == [0, 1, 1, 1]


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (a_raw_layout(names=["file0", "file1"]), "2 names of 4 files"),
        (a_raw_layout(names=["file0", "file1", "file1"]), "3 names of 4 files"),
        (a_raw_layout(names=["file0", "file1", "file7"]), "its files are not its tensors"),
        (a_raw_layout(tensors=a_raw_layout().tensors[:2]), "its files are not its tensors"),
        (a_raw_layout(image_nbytes=99999), "do not add up"),
        (a_raw_layout(parts=[lay.LayoutPart(4096, 4096)] * 4), "do not add up"),
        (a_raw_layout(parts=[*a_raw_layout().parts[:3], lay.LayoutPart(7, 7)]), "a header of 7 bytes"),
        (a_raw_layout(names=[]), "do not add up|a header of 0 bytes"),
        (renamed("../out"), "leads elsewhere"),
        (renamed("/etc/passwd"), "leads elsewhere"),
        (renamed("a/./b"), "leads elsewhere"),
        (renamed("a\nb"), "leads elsewhere"),
        (a_raw_layout(saved_for=lay.SavedFor("relative", True)), "not readable"),
        (a_raw_layout(saved_for=lay.SavedFor("/run/..", True)), "no plain path"),
        (a_raw_layout(saved_for=lay.SavedFor("/run", True, "/run/../latest")), "no plain path"),
        (a_raw_layout(saved_for=lay.SavedFor("/", True)), "no plain path"),
    ],
)
def test_a_raw_layout_that_cannot_be_is_refused(layout, words):
    with pytest.raises(DamagedError, match=words):
        decode_layout(encode_layout(layout), where="x")


def test_one_dimension_too_many():
    shape = (1,) * (MAX_DIMS + 1)
    with pytest.raises(DamagedError):
        decode_layout(entry(global_shape=shape, offsets=shape, sizes=shape), where="x")


@given(at=st.integers(0, len(RAW) - 1), bit=st.integers(0, 7))
def test_flipped_bits_never_escape_as_another_error(at, bit):
    broken = bytearray(RAW)
    broken[at] ^= 1 << bit
    try:
        found = decode_layout(bytes(broken), where="x")
    except DamagedError:
        return
    ends = sorted((e.data_offset, e.data_offset + e.nbytes) for e in found.tensors)
    assert all(start >= found.header_nbytes and stop <= found.image_nbytes for start, stop in ends)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(ends))


def test_leaves_come_back_and_other_versions_do_not():
    leaves = lay.Leaves(lay.VERSION, {"a": lay.Leaf("int", b"1")})
    assert lay.decode_leaves(lay.encode_leaves(leaves), where="x") == leaves
    for raw in (lay.encode_leaves(lay.Leaves(9, {})), b"", b"\x92\x01", b"\x92\x01\x81\xa1\xff\x92\xa1a\xc4\x00"):
        with pytest.raises(DamagedError, match=r"^x"):
            lay.decode_leaves(raw, where="x")


def test_sizes_of_boxes():
    assert lay.box_nbytes("BF16", (3, 5)) == 30
    assert lay.box_nbytes("C64", ()) == 8
    assert lay.box_nbytes("U8", (7, 0)) == 0
    with pytest.raises(DamagedError):
        itemsize("F4")
