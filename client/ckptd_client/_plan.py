"""What one rank saves and where it lies in the image: made once, kept while the structure of the state stays."""

from dataclasses import dataclass
from typing import Any

import torch

from ckptd.protocol.digest import digest
from ckptd.protocol.errors import UsageError
from ckptd.protocol.layout import VERSION, Leaves, encode
from ckptd.protocol.slot import slot_capacity
from ckptd_client._image import Box, Image, make_image, make_layout
from ckptd_client._pickle import NO_PICKLE, PickleKeys
from ckptd_client._pickle import encode as encode_plain
from ckptd_client._stock import StockLeaves
from ckptd_client._tensors import alias_key, is_tensor, local_of, shard_of
from ckptd_client._tree import Flat, Structure, collect, flatten, format_path

_PLAIN_ROOM = 64 << 10  # at least so many bytes are kept for plain values, which change size from save to save


@dataclass(frozen=True, slots=True)
class Spec:
    """What a tensor must still be for the plan to hold."""

    kind: type[torch.Tensor]
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    local_shape: torch.Size
    mesh: Any  # of a DTensor, with its placements; None for a plain tensor
    placements: Any


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
    pickled: frozenset[int]  # positions of leaves that may be pickled
    image: Image
    layout: bytes
    layout_digest: bytes
    plan_id: str

    @property
    def nbytes(self) -> int:
        """Bytes of the image."""
        return self.image.image_nbytes

    def capacity(self, plain_nbytes: int) -> int:
        """Bytes of a slot that holds this plan and plain values of twice the size."""
        return slot_capacity(self.nbytes, len(self.layout), max(_PLAIN_ROOM, 2 * plain_nbytes))

    def exact_capacity(self, plain_nbytes: int) -> int:
        """Bytes of the smallest slot that holds this plan and so many bytes of plain values."""
        return slot_capacity(self.nbytes, len(self.layout), plain_nbytes)

    def views(self, slot: torch.Tensor) -> list[torch.Tensor]:
        """Where each stored tensor goes in a slot, as tensors over its bytes, in the order of ``stored``."""
        spec_at = dict(zip(self.tensors, self.specs, strict=True))
        views = []
        for position, offset in zip(self.stored, self.image.data_offsets, strict=True):
            spec = spec_at[position]
            nbytes = spec.local_shape.numel() * spec.dtype.itemsize
            if nbytes:
                views.append(slot[offset : offset + nbytes].view(spec.dtype).view(spec.local_shape))
            else:  # of a plain image they come last, where nothing is aligned
                views.append(slot.new_empty(spec.local_shape, dtype=spec.dtype))
        return views


@dataclass(frozen=True, slots=True)
class Values:
    """One save's values, gathered by a plan. Refers to the state's tensors; not to be kept."""

    tensors: list[torch.Tensor]  # the stored ones
    leaves: bytes
    objects: bytes  # the leaves once more, for stock readers; rank 0 makes them

    @property
    def plain_nbytes(self) -> int:
        """Bytes of all that is no tensor."""
        return len(self.leaves) + len(self.objects)


def gather(plan: Plan, state: Any, stock: StockLeaves | None = None) -> Values | None:
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
        if spec.mesh is not None and not _same_shard(value, spec):
            return None
    for tied, stored in plan.ties:
        if alias_key(local_of(values[tied])) != alias_key(local_of(values[stored])):
            return None
    if any(is_tensor(values[position]) for position in plan.leaves):
        return None
    leaves = {
        plan.names[i]: encode_plain(values[i], plan.names[i], plan.wheres[i], allowed=i in plan.pickled)
        for i in plan.leaves
    }
    return Values(
        tensors=[local_of(values[position]) for position in plan.stored],
        leaves=encode(Leaves(VERSION, leaves)),
        objects=stock.encode(leaves) if stock is not None else b"",
    )


def _same_shard(tensor: Any, spec: Spec) -> bool:
    if tensor.placements != spec.placements or tensor.device_mesh != spec.mesh:
        return False
    return bool(local_of(tensor).shape == spec.local_shape)


def _spec(tensor: torch.Tensor) -> Spec:
    return Spec(
        kind=type(tensor),
        shape=tensor.shape,
        dtype=tensor.dtype,
        device=tensor.device,
        local_shape=local_of(tensor).shape,
        mesh=getattr(tensor, "device_mesh", None),
        placements=getattr(tensor, "placements", None),
    )


def make_plan(state: Any, *, rank: int, world_size: int, pickle_keys: PickleKeys = NO_PICKLE) -> Plan:
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
    specs = [_spec(flat.values[i]) for i in tensors]
    return Plan(
        structure=flat.structure,
        names=flat.names,
        wheres=wheres,
        tensors=tensors,
        leaves=sorted(set(range(len(flat.values))) - set(tensors)),
        stored=stored,
        ties=ties,
        specs=specs,
        pickled=frozenset(i for i, name in enumerate(flat.names) if pickle_keys.allow(name)),
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
        shard = shard_of(flat.values[i], wheres[i])
        if shard.absent:
            continue  # other ranks hold it
        key = alias_key(shard.local)
        if key is not None and key in owner:
            ties.append((i, owner[key]))
            continue
        if key is not None:
            owner[key] = i
        stored.append(i)
        boxes.append(Box(flat.names[i], shard.code, shard.sizes, shard.global_shape, shard.offsets))
    return stored, ties, boxes
