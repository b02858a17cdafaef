"""Checksums of all bytes of tensors, computed on their devices, in the order of the thread's work there.

The sum of a block is that of its 32-bit words, each times a pseudorandom odd 64-bit number of its position. A change of
one word always changes the sum; exchanged words, or equal changes of many words, change it but in one of 2^32 cases. It
detects accidents, not attacks.
"""

from collections.abc import Iterator, Sequence

import torch

from ckptd_client._local.copy_engines import by_engine, engine_of, flat_bytes, parts_of

BLOCK_NBYTES = 8 << 20  # summed at a time
_WEIGHTS_SEED = 0x5C6B_7074_6401_0001
_weights: dict[torch.device, torch.Tensor] = {}


class Checksums:
    """The checksums of tensors at the time of the constructor, in the order of the current stream. Does not block.

    Reads the tensors once, and uses less than 100 MiB of a device's memory.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._sums: list[tuple[list[int], torch.Tensor, list[int]]] = []  # positions, sums, sums per tensor
        there = by_engine(tensors)
        far = {i for positions in there.values() for i in positions}
        near = [i for i in range(len(tensors)) if i not in far]
        with torch.no_grad():
            for positions in [*there.values(), near]:
                if positions:
                    sums, counts = block_sums([tensors[i] for i in positions])
                    self._sums.append((positions, _to_host(sums), counts))

    def differing(self, views: Sequence[torch.Tensor]) -> list[int]:
        """Positions of views of the host whose bytes differ from those of the tensors. Reads every byte.

        Call it only after the device has completed the work queued before.
        """
        found: list[int] = []
        with torch.no_grad():
            for positions, sums, counts in self._sums:
                now = block_sums([views[i] for i in positions])[0]
                differ = (sums != now).tolist()
                at = 0
                for i, count in zip(positions, counts, strict=True):
                    found += [i] if any(differ[at : at + count]) else []
                    at += count
        return found


def _to_host(sums: torch.Tensor) -> torch.Tensor:
    """Starts a copy to the host without waiting for it."""
    engine = engine_of(sums.device)
    if engine is None:
        return sums
    place = engine.scratch(sums.nbytes).view(torch.int64)
    place.copy_(sums, non_blocking=True)
    return place


def blocks_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Boxes of the tensor, in order, of at most 8 MiB; equal for all tensors of one shape and dtype."""
    return (part for part, _ in parts_of(tensor, tensor, BLOCK_NBYTES))


def block_sums(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[int]]:
    """The sums of all blocks of tensors of one device, queued there, and the number of blocks of each tensor.

    A sum is that of all 32-bit words, each times an odd 64-bit number of its position: so any other word changes the
    sum, and two differences cancel each other in one of 2^32 cases.
    """
    weights = _weights_on(tensors[0].device)
    sums: list[torch.Tensor] = []
    counts = []
    for tensor in tensors:
        before = len(sums)
        for block in blocks_of(tensor):
            words = _words(block)
            sums.append((words * weights[: len(words)]).sum())
        counts.append(len(sums) - before)
    return torch.stack(sums), counts


def _words(block: torch.Tensor) -> torch.Tensor:
    """The block's bytes as 32-bit words, padded with zeros; a copy if they are not contiguous and aligned."""
    flat = flat_bytes(block)
    if len(flat) % 4 or flat.data_ptr() % 4 or flat.storage_offset() % 4:
        padded = torch.zeros(-(-len(flat) // 4) * 4, dtype=torch.uint8, device=flat.device)
        padded[: len(flat)] = flat
        flat = padded
    return flat.view(torch.int32)


def _weights_on(device: torch.device) -> torch.Tensor:
    """An odd number for each word of a block, equal on all devices: steps of splitmix64, computed once per device."""
    if device not in _weights:
        x = torch.arange(1, BLOCK_NBYTES // 4 + 1, dtype=torch.int64, device=device) * _signed(0x9E37_79B9_7F4A_7C15)
        x = (x + _signed(_WEIGHTS_SEED)) ^ (x >> 30)
        x = x * _signed(0xBF58_476D_1CE4_E5B9)
        x = (x ^ (x >> 27)) * _signed(0x94D0_49BB_1331_11EB)
        _weights[device] = (x ^ (x >> 31)) | 1
    return _weights[device]


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
