"""Layouts and leaves: believed only when they are consistent."""

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.protocol import layout as lay
from ckptd.protocol.errors import DamagedError
from ckptd.protocol.ids import SaveId
from tests.slots import build_image, some_tensors

LAYOUT = build_image(SaveId(1, 1, 1), some_tensors())[1]
RAW = lay.encode(LAYOUT)


def changed(**words):
    return lay.encode(msgspec.structs.replace(LAYOUT, **words))


def entry(**words):
    first, *rest = LAYOUT.tensors
    return changed(tensors=[msgspec.structs.replace(first, **words), *rest])


def test_a_layout_comes_back():
    assert lay.decode_layout(RAW, where="x") == LAYOUT


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (changed(version=2), "version 2"),
        (entry(data_offset=LAYOUT.header_nbytes - 1), "outside its image"),
        (entry(data_offset=LAYOUT.image_nbytes), "outside its image"),
        (entry(data_offset=LAYOUT.header_nbytes + 1), "over another"),
        (changed(image_nbytes=LAYOUT.image_nbytes - 1), "outside its image"),
        (entry(nbytes=4), "do not fit its shape"),
        (entry(dtype="F31"), "unknown dtype"),
        (entry(offsets=(1,)), "a box outside its tensor"),
        (entry(offsets=()), "differ in length"),
        (changed(file="../../etc/passwd"), "not readable"),
        (changed(file="r00000-p00.safetensors\n"), "not readable"),
        (changed(rank=-1), "not readable"),
        (b"", "not readable"),
        (RAW[:-1], "not readable"),
        (b"\xff" * 50, "not readable"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_with_its_place(raw, words):
    with pytest.raises(DamagedError, match=words) as caught:
        lay.decode_layout(raw, where="slot 7")
    assert caught.value.message.startswith("slot 7")


def test_one_dimension_too_many():
    shape = (1,) * (lay.MAX_DIMS + 1)
    with pytest.raises(DamagedError):
        lay.decode_layout(entry(global_shape=shape, offsets=shape, sizes=shape), where="x")


@given(at=st.integers(0, len(RAW) - 1), bit=st.integers(0, 7))
def test_flipped_bits_never_escape_as_another_error(at, bit):
    broken = bytearray(RAW)
    broken[at] ^= 1 << bit
    try:
        found = lay.decode_layout(bytes(broken), where="x")
    except DamagedError:
        return
    ends = sorted((e.data_offset, e.data_offset + e.nbytes) for e in found.tensors)
    assert all(start >= found.header_nbytes and stop <= found.image_nbytes for start, stop in ends)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(ends))


def test_leaves_come_back_and_other_versions_do_not():
    leaves = lay.Leaves(lay.VERSION, {"a": lay.Leaf("int", b"1")})
    assert lay.decode_leaves(lay.encode(leaves), where="x") == leaves
    for raw in (lay.encode(lay.Leaves(9, {})), b"", b"\x92\x01", b"\x92\x01\x81\xa1\xff\x92\xa1a\xc4\x00"):
        with pytest.raises(DamagedError, match=r"^x"):
            lay.decode_leaves(raw, where="x")


def test_sizes_of_boxes():
    assert lay.box_nbytes("BF16", (3, 5)) == 30
    assert lay.box_nbytes("C64", ()) == 8
    assert lay.box_nbytes("U8", (7, 0)) == 0
    with pytest.raises(DamagedError):
        lay.itemsize("F4")
