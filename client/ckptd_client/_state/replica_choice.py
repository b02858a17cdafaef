"""Whose bytes a reader takes of what replicas saved in full, each its own: nobody gets a blend of two.

How all ranks hold a tensor is one short text, the same on all of them, so each decides alike without a word: where the
state holds everything as it was saved, each rank gets its own bytes back; else each takes those of the lowest rank.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import xxhash

from ckptd.shared.format.layout import Layout
from ckptd.shared.format.replica_shares import Compared, Share, compared, doubt
from ckptd_client._state.naming import listed, ranks_of
from ckptd_client._state.reshard import Saved
from ckptd_client._state.sharded import is_dtensor
from ckptd_client._state.tensors import PLAIN_TYPES

EVERYWHERE = ""  # every rank holds all of it
_OTHERWISE = "?"  # in a way that is not known here, or that ranks tell differently


Taken = dict[tuple[int, ...], list[str]]  # by the ranks whose bytes were taken: places, in Python notation


def held_as(tensor: torch.Tensor, world_size: int) -> str:
    """How the ranks hold a tensor: equal where each rank holds the same boxes. Of DTensors and plain tensors only."""
    if type(tensor) in PLAIN_TYPES:
        return EVERYWHERE
    if not is_dtensor(tensor):
        return _OTHERWISE
    mesh, placements = tensor.device_mesh.mesh, tensor.placements
    cuts = [(size, _text(placed)) for size, placed in zip(mesh.shape, placements, strict=True) if size > 1]
    if mesh.numel() == world_size and all(text == "r" for _, text in cuts):
        return EVERYWHERE
    return xxhash.xxh3_64_hexdigest(repr((mesh.flatten().tolist(), cuts)).encode())


def held_alike(layouts: Iterable[Layout], world_size: int) -> dict[str, str]:
    """How those tensors were held of which replicas saved all, by name, for a job of world_size. Tied ones too."""
    found: dict[str, str] = {}
    for layout in layouts:
        own = {name: text for text, names in layout.held_alike.items() for name in names}
        own |= {name: own[owner] for name, owner in layout.aliases.items() if owner in own}
        for name, text in own.items():
            known = text if layout.world_size == world_size else _OTHERWISE
            found[name] = known if found.get(name, known) == known else _OTHERWISE
    return found


def of_the_lowest(alike: Mapping[str, str], state: Mapping[str, Any], world_size: int) -> set[str]:
    """Names of the state of which every rank takes the bytes of the lowest rank: all of alike, or none.

    alike: as from held_alike. state: tensors by name; of others nothing is taken.
    """
    names = alike.keys() & state.keys()
    as_saved = all(alike[name] != _OTHERWISE and held_as(state[name], world_size) == alike[name] for name in names)
    return set() if as_saved else names


def taken_of(names: Iterable[str], boxes: Mapping[str, Iterable[Saved]], places: Mapping[str, str]) -> Taken:
    """Whose bytes those of these names are, when each box is of the lowest rank that has it."""
    taken: Taken = {}
    for name in sorted(names):
        lowest: dict[object, int] = {}
        for saved in sorted(boxes[name], key=lambda one: one.rank):
            lowest.setdefault(saved.box, saved.rank)
        taken.setdefault(tuple(sorted(set(lowest.values()))), []).append(places[name])
    return taken


def notes_of(taken: Taken, shares: Mapping[int, Sequence[Share]]) -> list[str]:
    """What to say of that, where replicas differed. shares: of all ranks that saved; of too few nothing is said."""
    if compared(shares) is not Compared.APART:
        return []
    told = "were taken, on every rank; those of other ranks differed"
    return [f"{listed(found)}: the bytes of {ranks_of(ranks)} {told}" for ranks, found in sorted(taken.items())]


def doubt_of(shares: Mapping[int, Sequence[Share]]) -> list[str]:
    """What to say of a checkpoint with these shares, whoever reads it."""
    return list(filter(None, [doubt(compared(shares))]))


def _text(placement: Any) -> str:
    if placement.is_replicate():
        return "r"
    return f"{getattr(placement, 'dim', _OTHERWISE)}/{getattr(placement, 'split_factor', 1)}"
