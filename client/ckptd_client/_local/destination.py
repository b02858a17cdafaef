"""Where checked bytes of a checkpoint go: to an address of the host, or through a copy engine to a device."""

import ctypes
from collections.abc import Iterable, Sequence

import torch

from ckptd_client._local.copy_engines import CopyEngine, engine_of

Place = int | torch.Tensor  # address of memory of the host, or contiguous bytes on a device
Piece = tuple[int, Place, int]  # offset in a block, where it goes, bytes


def land(pieces: Iterable[Piece], base: int) -> None:
    """Copies the pieces of a block that lies at address base. Blocks until they are there; the block is free then.

    Without the GIL while it copies. From memory that is not pinned a device's pieces come slowly.
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
        assert engine is not None  # noqa: S101 - bytes_of looked
        engine.send(places, parts)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The bytes of a contiguous tensor on a device, as a place; None where no copy engine gets at them."""
    if tensor.is_cpu and engine_of(tensor.device) is None:
        return None  # by far the most
    straight = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
    return tensor.reshape(-1).view(torch.uint8) if straight and engine_of(tensor.device) is not None else None


def engines_of(places: Iterable[Place]) -> Sequence[CopyEngine]:
    """Those that the places need."""
    devices = dict.fromkeys(place.device for place in places if not isinstance(place, int))
    return [engine for engine in map(engine_of, devices) if engine is not None]


def _memory_at(address: int, nbytes: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_ubyte * nbytes).from_address(address), dtype=torch.uint8)
