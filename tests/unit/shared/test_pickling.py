"""What our own opcodes say is what the standard library and torch read, and nothing else is ever named."""

import pickle
import pickletools
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptd.shared.format.dtypes import DTYPES
from ckptd.shared.torchfile.pickling import ALLOWED, Call, Global, Items, New, dumps

SIZE = Global("torch", "Size")
CHUNK = Global("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata")

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]))
    | st.binary(max_size=600),
    lambda inner: (
        st.lists(inner, max_size=6)
        | st.lists(inner, max_size=6).map(tuple)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])) | st.integers(), inner, max_size=6)
    ),
    max_leaves=40,
)


def read(data):
    return pickle.loads(data)  # noqa: S301  # our own


def same(left, right):
    """Equal, also in type and in the sign of zero."""
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return same(list(left.items()), list(right.items()))
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return struct.pack("d", left) == struct.pack("d", right) if isinstance(left, float) else left == right


@given(plain)
def test_plain_values_come_back(value):
    assert same(read(dumps(value)), value)


@pytest.mark.parametrize("bits", [7, 8, 15, 16, 31, 32, 63, 64, 2030, 2040, 2047, 2048, 5000])
def test_ints_at_every_boundary(bits):
    values = [sign * ((1 << bits) + more) for sign in (1, -1) for more in (-1, 0, 1)]
    assert read(dumps(values)) == values


def test_special_floats_and_long_texts():
    text = "é" * 300
    assert read(dumps([float("inf"), text, text, b"x" * 300, "\0\n"])) == [
        float("inf"), text, text, b"x" * 300, "\0\n",
    ]  # fmt: skip
    assert read(dumps(float("nan"))) != 0.0


def test_equal_strings_and_one_call_are_written_once():
    size = Call(SIZE, ((3, 4),))
    data = dumps([size, size, "a name", "a name", *map(str, range(300)), *map(str, range(300))])
    found = read(data)
    assert found[0] is found[1]
    assert type(found[0]) is torch.Size
    assert data.count(b"a name") == 1
    assert found[4:304] == found[304:]


def test_items_are_taken_one_at_a_time():
    alive = []

    def pairs():
        for number in range(3):
            alive.append(number)
            yield number, [number]

    assert read(dumps(Items(pairs()))) == {0: [0], 1: [1], 2: [2]}
    assert read(dumps(Items(()))) == {}


def test_an_instance_gets_its_state():
    chunk = read(dumps(New(CHUNK, {"offsets": Call(SIZE, ((),)), "sizes": None})))
    assert type(chunk).__name__ == "ChunkStorageMetadata"
    assert (chunk.offsets, chunk.sizes) == (torch.Size([]), None)


@pytest.mark.parametrize("name", [("os", "system"), ("builtins", "eval"), ("torch", "load"), ("torch", "")])
def test_only_allowed_names_can_be_said(name):
    with pytest.raises(ValueError, match="not allowed"):
        Global(*name)


@pytest.mark.parametrize("name", sorted(ALLOWED))
def test_allowed_names_exist_in_torch(name):
    assert read(dumps(Global(*name))) is getattr(__import__(name[0], fromlist=["x"]), name[1])


class Text(str):
    __slots__ = ()


@pytest.mark.parametrize("value", [{1, 2}, 1j, Text("x"), bytearray(b"x"), torch.Size([1]), object()])
def test_other_types_are_refused(value):
    with pytest.raises(TypeError, match=type(value).__name__):
        dumps([value])


def test_protocol_is_two_unless_there_are_bytes():
    for value, protocol in (({"a": (1, 2.0, None)}, 2), ([b""], 3)):
        data = dumps(value)
        assert data[:2] == bytes([0x80, protocol])
        assert max(opcode.proto for opcode, _, _ in pickletools.genops(data)) <= protocol


def test_the_dtype_table_is_torchs():
    for code, (name, *_) in DTYPES.items():
        assert isinstance(getattr(torch, name), torch.dtype), code
