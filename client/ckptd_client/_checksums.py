"""A position-dependent checksum of tensors, computed where they lie, in the order of what the thread queues there.

Words of 64 bits, each times an odd number of its own, summed modulo 2^64: a changed word changes the sum, as an odd
number has an inverse; words that trade places change it too. It finds accidents, and not a person.
"""

from collections.abc import Iterator, Sequence

import torch

from ckptd_client._copy_engines import engine_of, flat_bytes

_WORDS = 4 << 20  # summed at once: 32 MiB, and as much memory of the device for the products
_ODD = -7046029254386353131  # 0x9E3779B97F4A7C15, the golden ratio's
_weights: dict[torch.device, torch.Tensor] = {}


class Checksums:
    """Of these tensors as they are when this is made, for what the current stream orders. Queues, and waits for none.

    Takes one read of the tensors, and 96 MiB of a device's memory.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        with torch.no_grad():
            sums = [checksum(tensor) for tensor in tensors]
        self._sums = [_to_host(one) for one in sums]

    def differing(self, views: Sequence[torch.Tensor]) -> list[int]:
        """Positions of views of the host whose bytes are others than those that the tensors had. Reads every byte.

        Only once the device is done with what was queued before.
        """
        with torch.no_grad():
            return [i for i, (one, view) in enumerate(zip(self._sums, views, strict=True)) if _differ(one, view)]


def _differ(one: torch.Tensor, view: torch.Tensor) -> bool:
    return int(one) != int(checksum(view))


def _to_host(one: torch.Tensor) -> torch.Tensor:
    engine = engine_of(one.device)
    if engine is None:
        return one
    place = engine.scratch(8).view(torch.int64)
    place.copy_(one.view(1), non_blocking=True)
    return place


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Of the bytes in their order, one int64 on the tensor's device. What lies strided is copied first."""
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for k, words in enumerate(_blocks(flat_bytes(tensor))):
        weights = _weights_of(tensor.device)[: len(words)]
        total += (words * weights).sum() * (2 * k + 1)
    return total


def _blocks(flat: torch.Tensor) -> Iterator[torch.Tensor]:
    """The bytes as words; the last word is filled up with zeros. Those that begin at no word's address are copied."""
    whole = len(flat) // 8 * 8
    for start in range(0, whole, 8 * _WORDS):
        part = flat[start : min(whole, start + 8 * _WORDS)]
        yield (part if part.data_ptr() % 8 == 0 else part.clone()).view(torch.int64)
    if whole < len(flat):
        last = torch.zeros(8, dtype=torch.uint8, device=flat.device)
        last[: len(flat) - whole] = flat[whole:]
        yield last.view(torch.int64)


def _weights_of(device: torch.device) -> torch.Tensor:
    if device not in _weights:
        _weights[device] = torch.arange(1, 2 * _WORDS, 2, dtype=torch.int64, device=device) * _ODD
    return _weights[device]
