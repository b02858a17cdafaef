"""Sums of all bytes of tensors, computed where they lie, in the order of what the thread queues there.

Of each block its 32-bit words, each times an odd 64-bit number of its place that has no pattern: a word that is another
one makes it another sum, and so do, but in one of 2^32 cases, words that trade places, or that all change alike. It
finds accidents, and not a person.
"""

from collections.abc import Iterator, Sequence

import torch

from ckptd_client._local.copy_engines import divided, engine_of, flat_bytes, parts_of

BLOCK_NBYTES = 8 << 20  # summed at a time
_WEIGHTS_SEED = 0x5C6B_7074_6401_0001
_weights: dict[torch.device, torch.Tensor] = {}


class Checksums:
    """Of these tensors as they are when this is made, for what the current stream orders. Queues, and waits for none.

    Takes one read of the tensors, and less than 100 MiB of a device's memory.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._sums: list[tuple[list[int], torch.Tensor, list[int]]] = []  # positions, sums, how many each tensor has
        there = divided(tensors)
        far = {i for positions in there.values() for i in positions}
        near = [i for i in range(len(tensors)) if i not in far]
        with torch.no_grad():
            for positions in [*there.values(), near]:
                if positions:
                    sums, counts = block_sums([tensors[i] for i in positions])
                    self._sums.append((positions, _to_host(sums), counts))

    def differing(self, views: Sequence[torch.Tensor]) -> list[int]:
        """Positions of views of the host whose bytes are others than those that the tensors had. Reads every byte.

        Only once the device is done with what was queued before.
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
    """Sent without waiting."""
    engine = engine_of(sums.device)
    if engine is None:
        return sums
    place = engine.scratch(sums.nbytes).view(torch.int64)
    place.copy_(sums, non_blocking=True)
    return place


def blocks_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Boxes of it, in order, of at most 8 MiB; the same of all tensors of one shape and dtype."""
    return (part for part, _ in parts_of(tensor, tensor, BLOCK_NBYTES))


def block_sums(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[int]]:
    """The sums of all blocks of tensors of one device, queued there; and how many each tensor has.

    A sum is that of all 32-bit words, each times an odd 64-bit number of its place: so any word that is another one
    makes it another one, and two differences make up for each other in one of 2^32 cases.
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
    """Its bytes as 32-bit words, filled up with zeros; a copy where they do not lie so."""
    flat = flat_bytes(block)
    if len(flat) % 4 or flat.data_ptr() % 4 or flat.storage_offset() % 4:
        padded = torch.zeros(-(-len(flat) // 4) * 4, dtype=torch.uint8, device=flat.device)
        padded[: len(flat)] = flat
        flat = padded
    return flat.view(torch.int32)


def _weights_on(device: torch.device) -> torch.Tensor:
    """An odd number for each word of a block, the same everywhere: steps of splitmix64, made there once."""
    if device not in _weights:
        x = torch.arange(1, BLOCK_NBYTES // 4 + 1, dtype=torch.int64, device=device) * _signed(0x9E37_79B9_7F4A_7C15)
        x = (x + _signed(_WEIGHTS_SEED)) ^ (x >> 30)
        x = x * _signed(0xBF58_476D_1CE4_E5B9)
        x = (x ^ (x >> 27)) * _signed(0x94D0_49BB_1331_11EB)
        _weights[device] = (x ^ (x >> 31)) | 1
    return _weights[device]


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
