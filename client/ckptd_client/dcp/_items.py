"""A segment laid out from the items of a DCP save plan: what the planner decided that this rank writes."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.planner import WriteItem

from ckptd.shared.base.errors import UsageError
from ckptd.shared.base.ids import MAX_PARTS
from ckptd.shared.format.digest import digest
from ckptd.shared.format.integrity import XXH3, Integrity, Purpose
from ckptd.shared.format.layout import Path
from ckptd.shared.format.packed_layout import encode_layout
from ckptd_client._image.image import Box, make_image, make_layout
from ckptd_client._image.segment_plan import SegmentPlan
from ckptd_client._state.tensors import CODE_OF, copyable, describe

Spec = tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...], torch.dtype]  # name, sizes, offsets, whole, dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemPlan(SegmentPlan):
    """Constant while the items, and the names of the state, stay what they are. Its boxes are in the items' order."""

    specs: list[Spec]


class ItemPlans:
    """Makes the plan of a save, or hands out the last one again. One per client."""

    def __init__(self) -> None:
        self._names: frozenset[str] = frozenset()
        self._plan: ItemPlan | None = None

    def plan(
        self, specs: list[Spec], paths: Mapping[str, Path], *, rank: int, world_size: int, integrity: Integrity = XXH3
    ) -> ItemPlan:
        """The plan of these boxes. paths: of every name of this rank, also those that other ranks write.

        Raises UsageError for what the format cannot hold.
        """
        names = frozenset(paths)
        if self._plan is None or self._plan.specs != specs or self._names != names:
            self._plan, self._names = _make(specs, paths, rank, world_size, integrity), names
        return self._plan


def _make(specs: list[Spec], paths: Mapping[str, Path], rank: int, world_size: int, integrity: Integrity) -> ItemPlan:
    parts: Counter[str] = Counter()  # box k of a tensor lies in file k of the image
    boxes = []
    for name, sizes, offsets, whole, dtype in specs:
        if parts[name] == MAX_PARTS:
            text = f"{name!r} has more than {MAX_PARTS} separate boxes on this rank"
            raise UsageError(text, hint="redistribute() it to placements without strides")
        boxes.append(Box(name, CODE_OF[dtype], sizes, whole, offsets, parts[name]))
        parts[name] += 1
    image = make_image(boxes, rank=rank, world_size=world_size)
    layout = encode_layout(make_layout(image, paths=dict(paths), aliases={}))
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
