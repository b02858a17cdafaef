"""Where tensors lie on meshes of ranks, as their DTensors say: a short form of their boxes for the layout."""

import sys
from collections.abc import Iterable, Mapping, Sequence
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
    known: dict[Any, Mesh | None] = {}  # by device mesh and order: it may have thousands of ranks, a state of tensors
    alike: dict[tuple[int, ...], Mesh] = {}
    numbers: dict[int, int] = {}  # by the identity of a mesh in one of these
    found = {}
    for name, tensor in tensors:
        if is_dtensor(tensor):
            order = _order_of(tensor.placements)
            if (tensor.device_mesh, order) not in known:
                known[tensor.device_mesh, order] = _mesh_of(tensor.device_mesh, order)
            mesh, cuts = known[tensor.device_mesh, order], [_cut(tensor.placements[dim]) for dim in order]
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


def _order_of(placements: Sequence[Any]) -> tuple[int, ...]:
    """The dimensions of a mesh in the order in which they cut: strided ones last, from the right.

    As after FSDP2 over tensor parallelism, which shards what the inner mesh has cut (see strided.py). Where rows that
    do not divide evenly are meant otherwise, the layout does not take the placement.
    """
    dims = range(len(placements))
    strided = [dim for dim in dims if hasattr(placements[dim], "split_factor")]
    return (*(dim for dim in dims if dim not in strided), *reversed(strided))


def _mesh_of(device_mesh: Any, order: tuple[int, ...]) -> Mesh | None:
    """The mesh with its dimensions in this order."""
    place = device_mesh.get_coordinate()
    if place is None:
        return None
    turned = device_mesh.mesh.permute(order)
    return Mesh(tuple(turned.shape), tuple(place[dim] for dim in order), tuple(turned.flatten().tolist()))


def _cut(placement: Any) -> int | None:
    """The dimension of the tensor that it cuts; None for what is no cut."""
    kinds = sys.modules["torch.distributed.tensor"]  # else there were no placement
    if type(placement) is kinds.Shard or hasattr(placement, "split_factor"):
        return int(placement.dim)
    return REPLICATED if type(placement) is kinds.Replicate else None
