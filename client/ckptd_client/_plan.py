"""What one rank saves and where it lies in the image: made once, kept while the structure of the state stays."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ckptd.protocol.digest import digest
from ckptd.protocol.errors import UsageError
from ckptd.protocol.layout import VERSION, Leaf, Leaves, encode
from ckptd.protocol.slot import slot_capacity
from ckptd_client._image import Box, Image, make_image, make_layout
from ckptd_client._leaves import encode_leaf
from ckptd_client._tensors import alias_key, describe, is_tensor
from ckptd_client._tree import Flat, Structure, collect, flatten, format_path

_LEAVES_ROOM = 64 << 10  # at least so many bytes are kept for leaves, which change size from save to save


@dataclass(frozen=True, slots=True)
class Spec:
    """What a tensor must still be for the plan to hold."""

    kind: type[torch.Tensor]
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class Plan:
    """A rank's layout and how to gather its values. Holds no tensor of the state."""

    structure: Structure
    names: list[str]
    wheres: list[str]  # each value's place in Python notation
    tensors: list[int]  # positions among the values
    leaves: list[int]
    stored: list[int]  # positions of tensors whose bytes are written; the others are tied to one of these
    ties: list[tuple[int, int]]  # (position of a tied tensor, position of the one that is stored)
    specs: list[Spec]  # of tensors
    image: Image
    layout: bytes
    layout_digest: bytes
    plan_id: str

    @property
    def nbytes(self) -> int:
        """Bytes of the image."""
        return self.image.image_nbytes

    def capacity(self, leaves_nbytes: int) -> int:
        """Bytes of a slot that holds this plan and leaves of twice the size."""
        return slot_capacity(self.nbytes, len(self.layout), max(_LEAVES_ROOM, 2 * leaves_nbytes))

    def exact_capacity(self, leaves_nbytes: int) -> int:
        """Bytes of the smallest slot that holds this plan and so many bytes of leaves."""
        return slot_capacity(self.nbytes, len(self.layout), leaves_nbytes)

    def views(self, slot: torch.Tensor) -> list[torch.Tensor]:
        """Where each stored tensor goes in a slot, as tensors over its bytes, in the order of ``stored``."""
        spec_at = dict(zip(self.tensors, self.specs, strict=True))
        views = []
        for position, offset in zip(self.stored, self.image.data_offsets, strict=True):
            spec = spec_at[position]
            nbytes = spec.shape.numel() * spec.dtype.itemsize
            if nbytes:
                views.append(slot[offset : offset + nbytes].view(spec.dtype).view(spec.shape))
            else:  # they come last in the image, where nothing is aligned
                views.append(slot.new_empty(spec.shape, dtype=spec.dtype))
        return views


@dataclass(frozen=True, slots=True)
class Values:
    """One save's values, gathered by a plan. Refers to the state's tensors; not to be kept."""

    tensors: list[torch.Tensor]  # the stored ones
    leaves: bytes


def gather(plan: Plan, state: Any) -> Values | None:
    """The state's values if it still has the plan's structure, else None. The hot path: no names, no copies."""
    values = collect(state, plan.structure)
    if values is None:
        return None
    for position, spec in zip(plan.tensors, plan.specs, strict=True):
        value = values[position]
        if value.__class__ is not spec.kind or value.shape != spec.shape:
            return None
        if value.dtype is not spec.dtype or value.device != spec.device:
            return None
    for tied, stored in plan.ties:
        if alias_key(values[tied]) != alias_key(values[stored]):
            return None
    if any(is_tensor(values[position]) for position in plan.leaves):
        return None
    return Values([values[position] for position in plan.stored], _encode_leaves(plan.names, plan, values))


def _encode_leaves(names: list[str], plan: Plan, values: Sequence[Any]) -> bytes:
    leaves: dict[str, Leaf] = {}
    for position in plan.leaves:
        leaves[names[position]] = encode_leaf(values[position], plan.wheres[position])
    return encode(Leaves(VERSION, leaves))


def make_plan(state: Any, *, rank: int, world_size: int) -> Plan:
    """Lays the state out. Raises UsageError, with the key path, for a leaf that cannot be saved."""
    if type(state) is not dict:
        raise UsageError(f"the state must be a dict, not {type(state).__name__}", hint='save({"model": model, ...})')
    flat = flatten(state, is_tensor)
    wheres = [format_path(path) for path in flat.paths]
    tensors = [i for i, value in enumerate(flat.values) if is_tensor(value)]
    stored, ties, boxes = _boxes(flat, tensors, wheres)
    image = make_image(boxes, rank=rank, world_size=world_size)
    aliases = {flat.names[tied]: flat.names[source] for tied, source in ties}
    layout = encode(make_layout(image, paths=dict(zip(flat.names, flat.paths, strict=True)), aliases=aliases))
    specs = [Spec(type(v), v.shape, v.dtype, v.device) for v in (flat.values[i] for i in tensors)]
    return Plan(
        structure=flat.structure,
        names=flat.names,
        wheres=wheres,
        tensors=tensors,
        leaves=sorted(set(range(len(flat.values))) - set(tensors)),
        stored=stored,
        ties=ties,
        specs=specs,
        image=image,
        layout=layout,
        layout_digest=digest(layout),
        plan_id=digest(layout).hex(),
    )


def _boxes(flat: Flat, tensors: list[int], wheres: list[str]) -> tuple[list[int], list[tuple[int, int]], list[Box]]:
    """Which tensors are stored, which are tied to those, and the stored ones' boxes."""
    stored: list[int] = []
    ties: list[tuple[int, int]] = []
    boxes: list[Box] = []
    owner: dict[Any, int] = {}
    for i in tensors:
        code, sizes = describe(flat.values[i], wheres[i])
        key = alias_key(flat.values[i])
        if key is not None and key in owner:
            ties.append((i, owner[key]))
            continue
        if key is not None:
            owner[key] = i
        stored.append(i)
        boxes.append(Box(flat.names[i], code, sizes, sizes, (0,) * len(sizes)))
    return stored, ties, boxes
