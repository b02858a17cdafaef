"""Destinations of checked bytes of a checkpoint: addresses of the host, or devices through copy engines."""

import ctypes
from collections.abc import Iterable, Sequence

import torch

from ckptd_client._local.copy_engines import CopyEngine, engine_of

Place = int | torch.Tensor  # address in the host's memory, or contiguous bytes on a device
Destination = tuple[int, Place, int]  # offset in a block, place, bytes


def deliver(pieces: Iterable[Destination], base: int) -> None:
    """Copies parts of the block at address base to their destinations. Blocks; the block is free afterwards.

    Copies without the GIL. Copies to a device are slow if the block is not pinned.
    """
    sent: dict[torch.device, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for offset, place, nbytes in pieces:
        if isinstance(place, int):
            ctypes.memmove(place, base + offset, nbytes)
        else:
            places, parts = sent.setdefault(place.device, ([], []))
            places.append(place)
            parts.append(_memory_at(base + offset, nbytes))
    for device, (places, parts) in sent.items():
        engine = engine_of(device)
        assert engine is not None  # noqa: S101 - bytes_of has checked
        engine.send(places, parts)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The bytes of a contiguous tensor on a device, as a place; None if no copy engine can write them."""
    if tensor.is_cpu and engine_of(tensor.device) is None:
        return None  # the usual case
    straight = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
    return tensor.reshape(-1).view(torch.uint8) if straight and engine_of(tensor.device) is not None else None


def engines_of(places: Iterable[Place]) -> Sequence[CopyEngine]:
    """The copy engines of the places."""
    devices = dict.fromkeys(place.device for place in places if not isinstance(place, int))
    return [engine for engine in map(engine_of, devices) if engine is not None]


def _memory_at(address: int, nbytes: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_ubyte * nbytes).from_address(address), dtype=torch.uint8)
