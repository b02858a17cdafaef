"""Digests of what replicas share: of values, shape and dtype, however the tensor lies in memory."""

import subprocess
import sys

import pytest
import torch

from ckptd_client._state.replica_digests import BLOCK_NBYTES, WholeDigest

MIB = 1 << 20


def digest(tensor):
    return WholeDigest(["t"], [tensor], [1]).digest()


def numbers(*shape, dtype=torch.int16):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(-30_000, 30_000, shape, dtype=torch.int16, generator=generator).to(dtype)


LYING = {
    "transposed": lambda t: t.transpose(0, -1).contiguous().transpose(0, -1),
    "every second one": lambda t: torch.stack([t, t + 1], -1)[..., 0],
    "a part of a row": lambda t: torch.cat([t, t], -1)[..., : t.shape[-1]],
}
# More than a block, in rows that do not fill one: short ones, such as are longer than a block, rows of such, and one.
SHAPES = [(3001, 3001), (3, 5 * MIB + 3), (2, 3, 2 * MIB + 1), (9 * MIB + 5,), (1, 1, 9 * MIB, 1), (5, 1700, 1, 999)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("lying", LYING)
def test_the_digest_does_not_depend_on_strides(shape, lying):
    tensor = numbers(*shape)
    other = LYING[lying](tensor)
    assert tensor.nbytes > BLOCK_NBYTES
    assert torch.equal(tensor, other)
    expected = digest(tensor)
    assert digest(other) == expected
    other[(-1,) * other.dim()] += 1
    assert digest(other) != expected


def test_channels_last_conjugates_and_negatives_are_the_values_that_they_show():
    image = numbers(7, 3, 600, 601)
    assert digest(image.to(memory_format=torch.channels_last)) == digest(image)
    wave = torch.complex(numbers(1100, 1201).float(), numbers(1100, 1201).float() + 1)
    for one in (wave.conj(), wave.conj().imag, wave.t(), wave.mH):
        assert digest(one) == digest(one.resolve_conj().resolve_neg().contiguous())


def test_a_parameter_that_wants_a_gradient_is_read_too():
    weight = torch.nn.Parameter(numbers(2001, 3001, dtype=torch.float32).t())
    assert digest(weight) == digest(weight.detach().contiguous())


MEASURE = """
import torch
from ckptd_client._state.replica_digests import WholeDigest

def resident():
    with open("/proc/self/status") as file:
        fields = dict(line.split(":") for line in file)
    return [int(fields[name].split()[0]) << 10 for name in ("VmRSS", "VmHWM")]

def read(tensor):
    WholeDigest(["t"], [tensor], [1]).digest()

turned = torch.ones(24 << 20, 8, dtype=torch.uint8).t()
read(turned[:, : 5 << 20])  # what threads and libraries need
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the most starts anew
before = resident()[0]
read(turned)
print(resident()[1] - before)
"""


def test_what_lies_otherwise_is_read_a_block_at_a_time():
    """192 MiB. In a process of its own, which has no memory that others have left."""
    done = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, timeout=120, check=True)
    assert int(done.stdout) < 96 * MIB
