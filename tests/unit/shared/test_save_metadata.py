"""What a training may say of a save, how it is stored, and what is refused at once."""

import math

import msgspec
import numpy as np
import pytest
import torch

from ckptd.shared.base.errors import UsageError
from ckptd.shared.format import layout as lay
from ckptd.shared.format.save_metadata import MAX_NBYTES, checked_metadata, metadata_in


def test_plain_values_are_stored_as_they_are():
    said = {"loss": 1.25, "epoch": 3, "best": True, "run": "a é", "least": -(2**63), "most": 2**63 - 1}
    assert checked_metadata(said) == said
    assert [type(value) for value in checked_metadata(said).values()] == [float, int, bool, str, int, int]
    assert checked_metadata(None) == checked_metadata({}) == {}


def test_a_subclass_is_stored_as_what_it_is_and_no_finite_number_as_none():
    class Text(str):
        __slots__ = ()

    found = checked_metadata({Text("loss"): np.float64(0.5), "nan": math.nan, "inf": -math.inf, "text": Text("a")})
    assert found == {"loss": 0.5, "nan": None, "inf": None, "text": "a"}
    assert {type(one) for one in [*found, found["text"]]} == {str}
    assert type(found["loss"]) is float


@pytest.mark.parametrize(
    ("given", "told", "hint"),
    [
        ([("loss", 1)], "metadata must be a dict, not list", "metadata={"),
        ({1: 2}, "has the key 1;", "metadata={"),
        ({"": 2}, "has the key ''", "metadata={"),
        ({"k" * 129: 2}, "1 to 128 characters", "metadata={"),
        ({"\ud800": 2}, "has the key", "metadata={"),
        ({"loss": torch.tensor(1.0)}, r"metadata['loss'] is tensor(1.) (Tensor)", "metadata={'loss': float(value)}"),
        ({"loss": np.float32(1)}, "must be an int, float, str or bool", "metadata={'loss': float(value)}"),
        ({"loss": None}, "metadata['loss'] is None (NoneType)", "metadata={"),
        ({"a": {"b": 1}}, "metadata['a'] is {'b': 1} (dict)", "metadata={"),
        ({"a": [1]}, "metadata['a'] is [1] (list)", "metadata={"),
        ({"a": b"b"}, "metadata['a'] is b'b' (bytes)", "metadata={"),
        ({"a": 2**63}, "metadata['a'] is 9223372036854775808 (int)", "float(value)"),
        ({"a": "\ud800"}, "metadata['a'] is", "metadata={"),
        ({f"k{i}": i for i in range(65)}, "metadata has 65 keys, at most 64", "metadata={"),
        ({"a": "x" * MAX_NBYTES}, f"metadata has {MAX_NBYTES + 6} bytes, at most 4096", "goes into the state"),
    ],
    ids=repr,
)
def test_what_is_refused(given, told, hint):
    with pytest.raises(UsageError) as caught:
        checked_metadata(given)
    assert told in caught.value.message
    assert hint in caught.value.hint


def test_it_lies_in_the_leaves_and_leaves_without_it_keep_their_bytes():
    leaves = {"a": lay.Leaf("safe/1", b"\x01")}
    bare = lay.encode_leaves(lay.Leaves(lay.VERSION, leaves))
    assert bare == msgspec.msgpack.encode([lay.VERSION, leaves])
    said = {"loss": 0.5, "nan": None, "best": True}
    raw = lay.encode_leaves(lay.Leaves(lay.VERSION, leaves, said))
    assert (metadata_in(raw), metadata_in(bare)) == (said, {})
    assert lay.decode_leaves(raw, where="x") == lay.Leaves(lay.VERSION, leaves, said)


@pytest.mark.parametrize("raw", [b"", b"\x92\x03", b"\x93\x03\x80\xc0", b"\x93\x03\x80\x81\xa1a\x90"])
def test_leaves_that_cannot_be_read_say_nothing(raw):
    """A reader of the leaves reports them; a commit goes on."""
    assert metadata_in(raw) == {}
