"""Sums of all bytes see whole writers: scales, signs, fills and exchanges, not random flips alone."""

import os

import pytest
import torch

from ckptd_client._local.checksums import Checksums

LONG = os.environ.get("FAULTS") == "long"
SHAPES = [(64, 64), (100, 100), (7,), (1024, 1024), *([(4096, 1024), (2048, 2048)] if LONG else [])]
WRITES = {
    "twice": lambda t: t.mul_(2), "half": lambda t: t.mul_(0.5), "loss scale": lambda t: t.mul_(65536),
    "negated": lambda t: t.neg_(), "ones": lambda t: t.fill_(1), "zeros": lambda t: t.zero_(),
    "odd signs": lambda t: t.view(-1)[1::2].neg_(), "one bit": lambda t: t.view(-1)[-1:].neg_(),
    "turned": lambda t: t.copy_(t.flip(0)), "moved": lambda t: t.copy_(t.roll(1)),
}  # fmt: skip


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_writer_of_the_whole_tensor_is_seen(dtype, shape, write):
    tensor = torch.arange(1, torch.Size(shape).numel() + 1, dtype=torch.float64).reshape(shape).to(dtype)
    if write in {"turned", "moved"} and dtype is torch.bfloat16 and shape != (7,):
        tensor = torch.randn(shape).to(dtype)
    before, sums = tensor.clone(), Checksums([tensor])
    assert sums.differing([before]) == []
    WRITES[write](tensor)
    assert sums.differing([tensor]) == ([] if torch.equal(tensor, before) else [0])


def test_conjugates_and_strides_are_what_they_say():
    tensor = torch.randn(65, 33, dtype=torch.complex64)
    sums = Checksums([tensor.t(), tensor.conj(), torch.empty(0)])
    assert sums.differing([tensor.t().contiguous(), tensor.conj().resolve_conj(), torch.empty(0)]) == []
    assert sums.differing([tensor.t().contiguous() * 1j, tensor, torch.empty(0)]) == [0, 1]
