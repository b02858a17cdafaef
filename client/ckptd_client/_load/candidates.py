"""Which ranks can hold what a state wants, by the layout of one of them: so that a large job reads few layouts."""

from typing import Any

from ckptd.shared.format.holders import Holders
from ckptd.shared.format.layout import Layout, Leaves
from ckptd.shared.format.layout_meshes import lying
from ckptd.shared.format.packed_layout import Known, Parts
from ckptd_client._load.fit import boxes_wanted
from ckptd_client._state.reshard import Box, intersection
from ckptd_client._state.tensors import is_tensor
from ckptd_client._state.tree import flatten, within


def candidates(state: Any, seed: Layout, leaves: Leaves, parts: Parts, where: str) -> set[int] | None:
    """Ranks that together can hold all that the state wants, seed's among them. Blocks for nothing.

    seed: the layout of the rank that is preferred, and its leaves; parts: the same layout, encoded. What this rank has
    of a tensor is taken from it. None where the layout does not say: then any rank may hold something. What a rank
    named here has is shown by its own layout alone. Raises DamagedError for a layout that cannot be.
    """
    said = lying(parts, where=where, known=Known())
    holders, flat = Holders(said, where), flatten(state, is_tensor)
    here = dict(zip(flat.names, flat.values, strict=True))
    own: dict[str, list[Box]] = {}
    for entry in seed.tensors:
        own.setdefault(entry.name, []).append(Box(entry.offsets, entry.sizes))
    wanted = {name for name, value in here.items() if is_tensor(value)}
    wanted |= {name for name, path in seed.paths.items() if any(within(path, prefix) for prefix, _ in flat.statefuls)}
    found = {seed.rank}
    for name in wanted - leaves.leaves.keys():
        owner = seed.aliases.get(name, name)
        if owner not in said.tensors or name not in seed.paths:
            return None
        for box in boxes_wanted(here.get(name), said.tensors[owner], seed.paths[name], flat):
            if box.empty or any(intersection(one, box) == box for one in own.get(owner, ())):
                continue
            there = holders.of(owner, *box)
            if there is None:
                return None
            found.update(one.rank for one in there)
    return found
