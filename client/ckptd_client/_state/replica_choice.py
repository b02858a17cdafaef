"""Chooses the replica from which a reader takes tensors that every replica saved: never a mix of two.

One short text describes how the ranks hold a tensor. It is equal on all ranks, so all make the same choice without a
message: if the state holds every tensor as it was saved, each rank gets its own bytes; else all take the lowest rank's.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import xxhash

from ckptd.shared.format.layout import Layout
from ckptd.shared.format.replica_attestations import Compared, doubt
from ckptd.shared.format.tensor_holders import FirstHolders
from ckptd_client._state.naming import listed, ranks_of
from ckptd_client._state.reshard import Saved
from ckptd_client._state.sharded import is_dtensor
from ckptd_client._state.tensors import PLAIN_TYPES

EVERYWHERE = ""  # every rank holds the complete tensor
_OTHERWISE = "?"  # unknown, or ranks disagree


Taken = dict[tuple[int, ...], list[str]]  # by the ranks whose bytes were taken: places in Python notation


def held_as(tensor: torch.Tensor, world_size: int) -> str:
    """A text for how the ranks hold a tensor: equal if each rank holds the same boxes. DTensors and plain ones only."""
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
    """By name, how ranks held each tensor that every replica saved, for a job of world_size. With tied tensors.

    Of tensors of one name that parts of the job hold, each its own, the first layout's counts.
    """
    found: dict[str, str] = {}
    first = FirstHolders()
    for layout in layouts:
        own = {name: text for text, names in layout.held_alike.items() for name in names}
        own |= {name: own[owner] for name, owner in layout.aliases.items() if owner in own}
        for name, text in own.items():
            if not first.takes(layout, name):
                continue
            known = text if layout.world_size == world_size else _OTHERWISE
            found[name] = known if found.get(name, known) == known else _OTHERWISE
    return found


def of_the_lowest(alike: Mapping[str, str], state: Mapping[str, Any], world_size: int) -> set[str]:
    """Names for which every rank takes the bytes of the lowest rank: all of alike, or none.

    alike: from held_alike. state: tensors by name; other names are not taken.
    """
    names = alike.keys() & state.keys()
    as_saved = all(alike[name] != _OTHERWISE and held_as(state[name], world_size) == alike[name] for name in names)
    return set() if as_saved else names


def taken_of(names: Iterable[str], boxes: Mapping[str, Iterable[Saved]], places: Mapping[str, str]) -> Taken:
    """The ranks whose bytes these names get when each box comes from the lowest rank that has it."""
    taken: Taken = {}
    for name in sorted(names):
        lowest: dict[object, int] = {}
        for saved in sorted(boxes[name], key=lambda one: one.rank):
            lowest.setdefault(saved.box, saved.rank)
        taken.setdefault(tuple(sorted(set(lowest.values()))), []).append(places[name])
    return taken


def notes_of(taken: Taken, found: Compared) -> list[str]:
    """Notes for the user if the replicas differed. found: of the attestations of all ranks that saved."""
    if found is not Compared.DIFFERING:
        return []
    told = "were taken, on every rank; those of other ranks differed"
    return [f"{listed(found)}: the bytes of {ranks_of(ranks)} {told}" for ranks, found in sorted(taken.items())]


def doubt_of(found: Compared) -> list[str]:
    """The note for every reader of a checkpoint of which this is known; empty: none."""
    return list(filter(None, [doubt(found)]))


def _text(placement: Any) -> str:
    if placement.is_replicate():
        return "r"
    return f"{getattr(placement, 'dim', _OTHERWISE)}/{getattr(placement, 'split_factor', 1)}"
