"""Where tensors lie on meshes of ranks, as their DTensors say: a short form of their boxes for the layout."""

import sys
from collections.abc import Iterable, Mapping
from typing import Any

from ckptd.shared.format.placement import REPLICATED, Mesh, Placed
from ckptd_client._state.sharded import is_dtensor

_ALONE = Mesh((1,), (0,))  # of what a rank holds whole


def placements_of(
    tensors: Iterable[tuple[str, Any]], replicas: Mapping[str, tuple[int, ...]], rank: int
) -> tuple[list[Mesh], dict[str, Placed]]:
    """The meshes, and the placement of each name; none for what is cut in another way.

    replicas: the ranks that hold a plain tensor as this one does. The layout takes a placement for a box only where it
    reproduces what is saved.
    """
    meshes: dict[Mesh, int] = {}
    known: dict[Any, Mesh | None] = {}  # by device mesh: it may have thousands of ranks, and a state as many tensors
    alike: dict[tuple[int, ...], Mesh] = {}
    numbers: dict[int, int] = {}  # by the identity of a mesh in one of these
    found = {}
    for name, tensor in tensors:
        if is_dtensor(tensor):
            device_mesh = tensor.device_mesh
            if device_mesh not in known:
                known[device_mesh] = _mesh_of(device_mesh)
            mesh, cuts = known[device_mesh], [_cut(placement) for placement in tensor.placements]
        elif ranks := replicas.get(name):
            mesh, cuts = alike.setdefault(ranks, Mesh((len(ranks),), (ranks.index(rank),), ranks)), [REPLICATED]
        else:
            mesh, cuts = _ALONE, [REPLICATED]
        if mesh is None or None in cuts:
            continue
        if id(mesh) not in numbers:
            numbers[id(mesh)] = meshes.setdefault(mesh, len(meshes))
        found[name] = Placed(numbers[id(mesh)], tuple(cut for cut in cuts if cut is not None))
    return list(meshes), found


def _mesh_of(device_mesh: Any) -> Mesh | None:
    place = device_mesh.get_coordinate()
    if place is None:
        return None
    return Mesh(tuple(device_mesh.shape), tuple(place), tuple(device_mesh.mesh.flatten().tolist()))


def _cut(placement: Any) -> int | None:
    kinds = sys.modules["torch.distributed.tensor"]  # else there were no placement
    if type(placement) is kinds.Shard:
        return int(placement.dim)
    return REPLICATED if type(placement) is kinds.Replicate else None
