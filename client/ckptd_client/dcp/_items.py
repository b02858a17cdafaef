"""A segment laid out from the items of a DCP save plan: what the planner decided that this rank writes."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

from ckptd.shared.base.errors import UsageError
from ckptd.shared.base.ids import MAX_PARTS
from ckptd.shared.format.digest import digest
from ckptd.shared.format.integrity import XXH3, Integrity, Purpose
from ckptd.shared.format.layout import Path, Planned
from ckptd.shared.format.packed_layout import Spread, encode_layout
from ckptd.shared.torchfile.image import Box, make_image, make_layout
from ckptd_client._image.mesh_places import placements_of
from ckptd_client._image.segment_plan import SegmentPlan
from ckptd_client._state.tensors import CODE_OF, copyable, describe, is_tensor
from ckptd_client.dcp._leaves import writes_its_state

Spec = tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...], torch.dtype]  # name, sizes, offsets, whole, dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemPlan(SegmentPlan):
    """Constant while the items, and the names of the state, stay what they are. Its boxes are in the items' order."""

    specs: list[Spec]


class ItemPlans:
    """Makes the plan of a save, or hands out the last one again. One per client."""

    def __init__(self) -> None:
        self._of: tuple[frozenset[str], Spread] | None = None
        self._plan: ItemPlan | None = None

    def plan(  # noqa: PLR0913 - keyword-only
        self, specs: list[Spec], paths: Mapping[str, Path], spread: Spread, *, rank: int, world_size: int,
        integrity: Integrity = XXH3,
    ) -> ItemPlan:  # fmt: skip
        """The plan of these boxes. paths: of every name of this rank, also those that other ranks write.

        spread: how the state is spread over the ranks, as spread_of says. Raises UsageError for what the format cannot
        hold.
        """
        of = frozenset(paths), spread
        if self._plan is None or self._plan.specs != specs or self._of != of:
            self._plan, self._of = _make(specs, paths, spread, rank, world_size, integrity), of
        return self._plan


def spread_of(planner: SavePlanner, specs: Iterable[Spec], rank: int) -> Spread:
    """How the planner's state is spread over the ranks, so that one layout tells a reader who holds what.

    Nothing of a planner that writes something else than its state.
    """
    state = getattr(planner, "state_dict", None)
    if not isinstance(state, dict) or not writes_its_state(planner):
        return Spread()
    here = {name for name, *_ in specs}
    tensors = {name: value for name, value in state.items() if is_tensor(value) and value.dtype in CODE_OF}
    absent = [Planned(n, CODE_OF[v.dtype], tuple(v.size())) for n, v in tensors.items() if n not in here]
    return Spread(absent, *placements_of(tensors.items(), {}, rank))


def _make(  # noqa: PLR0913, PLR0917
    specs: list[Spec], paths: Mapping[str, Path], spread: Spread, rank: int, world_size: int, integrity: Integrity
) -> ItemPlan:
    parts: Counter[str] = Counter()  # box k of a tensor lies in file k of the image
    boxes = []
    for name, sizes, offsets, whole, dtype in specs:
        if parts[name] == MAX_PARTS:
            text = f"{name!r} has more than {MAX_PARTS} separate boxes on this rank"
            raise UsageError(text, hint="redistribute() it to placements without strides")
        boxes.append(Box(name, CODE_OF[dtype], sizes, whole, offsets, parts[name]))
        parts[name] += 1
    image = make_image(boxes, rank=rank, world_size=world_size)
    layout = encode_layout(make_layout(image, paths=dict(paths), aliases={}), spread)
    proved = integrity.digest(layout, Purpose.LAYOUT)
    return ItemPlan(specs=specs, image=image, layout=layout, layout_digest=proved, plan_id=digest(layout).hex())


def resolved(items: Sequence[WriteItem], tensors: Iterable[torch.Tensor]) -> tuple[list[Spec], list[torch.Tensor]]:
    """Specs and tensors of the items that have elements, or whose whole tensor has none. Raises UsageError."""
    specs: list[Spec] = []
    kept: list[torch.Tensor] = []
    for item, given in zip(items, tensors, strict=True):
        tensor, data = given.detach(), item.tensor_data
        if data is None:
            raise UsageError(f"the planner describes no tensor for {item.index.fqn!r}", hint="fill in tensor_data")
        sizes, whole = tuple(data.chunk.sizes), tuple(data.size)
        if tuple(tensor.shape) != sizes:
            text = f"the planner promised {list(sizes)} of {item.index.fqn!r} and gives {list(tensor.shape)}"
            raise UsageError(text, hint="resolve_data must return what create_local_plan announced")
        if 0 in sizes and 0 not in whole:
            continue  # an empty shard: other ranks hold the tensor
        describe(tensor, f"{item.index.fqn!r}")
        specs.append((item.index.fqn, sizes, tuple(data.chunk.offsets), whole, tensor.dtype))
        kept.append(copyable(tensor))
    return specs, kept


def paths_of(names: Iterable[str], mappings: Mapping[str, tuple[Any, ...]] | None) -> dict[str, Path]:
    """Where each name belongs in the nesting, as DCP's planner says; at the top when it says nothing."""
    mappings = mappings or {}
    return {name: tuple(_step(key) for key in mappings.get(name, (name,))) for name in names}


def _step(key: object) -> Any:
    return ("l", key) if type(key) is int else ("k", str(key))
