"""Where tensors lie on meshes of ranks, as their DTensors say: a short form of their boxes for the layout."""

import sys
from collections.abc import Iterable
from typing import Any

from ckptd.shared.format.placement import REPLICATED, Mesh, Placed
from ckptd_client._state.sharded import is_dtensor

_ALONE = Mesh((1,), (0,))  # of what a rank holds whole


def placements_of(tensors: Iterable[tuple[str, Any]]) -> tuple[list[Mesh], dict[str, Placed]]:
    """The meshes, and the placement of each name; none for what is cut in another way.

    The layout takes one only where it reproduces the box that is saved.
    """
    meshes: dict[Mesh, int] = {}
    found = {}
    for name, tensor in tensors:
        at = _at(tensor)
        if at is not None:
            found[name] = Placed(meshes.setdefault(at[0], len(meshes)), at[1])
    return list(meshes), found


def _at(tensor: Any) -> tuple[Mesh, tuple[int, ...]] | None:
    if not is_dtensor(tensor):
        return _ALONE, (REPLICATED,)
    place = tensor.device_mesh.get_coordinate()
    cuts = [_cut(placement) for placement in tensor.placements]
    if place is None or None in cuts:
        return None
    return Mesh(tuple(tensor.device_mesh.shape), tuple(place)), tuple(cut for cut in cuts if cut is not None)


def _cut(placement: Any) -> int | None:
    kinds = sys.modules["torch.distributed.tensor"]  # else there were no placement
    if type(placement) is kinds.Shard:
        return int(placement.dim)
    return REPLICATED if type(placement) is kinds.Replicate else None
