"""The sharded leaves of a state: the ranks and boxes of each, and the parts that this rank holds."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from ckptd.shared.base.errors import UsageError
from ckptd.shared.format.digest import digest
from ckptd_client._gather._cuts import Box, Shape, placed
from ckptd_client._state.sharded import is_dtensor, is_sharded_tensor
from ckptd_client._state.strided import distributed, is_interleaving
from ckptd_client._state.tensors import PLAIN_TYPES, copyable, describe, shard_of
from ckptd_client._state.tree import Flat, format_path

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_SHORT = 64  # ranks of a mesh that an error can list
Boxes = tuple[tuple[Box, ...], ...]


@dataclass(frozen=True, slots=True, eq=False)
class FlatPart:
    """This rank's part of a tensor that the ranks of the job divide into flat ranges, as ZeRO does. For `gather` only.

    Attributes:
        local: Elements `start`, `start + 1`, ... of the flattened tensor, in any shape, contiguous; not copied.
            Elements beyond the end of the tensor are padding. The parts of all ranks hold each element once; a rank
            without any has an empty tensor.
        shape: Shape of the whole tensor.
        start: Index of the first element.
    """

    local: torch.Tensor
    shape: Sequence[int]
    start: int


class Place(NamedTuple):
    """The placement of a tensor. members: ranks that together hold it once."""

    members: tuple[int, ...]  # ascending
    reach: frozenset[int]  # members and their replicas
    text: str  # what all members must agree on
    boxes: Boxes | None  # of each member; None: each member must announce its own


@dataclass(slots=True, eq=False)
class Leaf:
    """One sharded tensor. own: its boxes on this rank, one for each of chunks, which are the state's own memory."""

    index: int  # among the values of the state
    name: str
    where: str
    shape: Shape
    box_shape: Shape  # to which boxes refer: shape, or that of the flattened tensor
    dtype: torch.dtype
    device: torch.device
    place: Place
    own: tuple[Box, ...]
    chunks: list[torch.Tensor]
    identity: Any  # equal for leaves that are one tensor on this rank
    tied: "Leaf | None" = None  # the leaf of the same tensor, once all members agree

    @property
    def line(self) -> str:
        """What all members must agree on."""
        return f"{list(self.shape)} {self.dtype} on {self.device.type}, {self.place.text}"


def is_sharded(value: Any) -> bool:
    """Whether value is a part of a tensor of which other ranks may hold other parts."""
    if isinstance(value, FlatPart) or is_dtensor(value) or is_sharded_tensor(value):
        return True
    return (
        type(value) not in PLAIN_TYPES and isinstance(value, torch.Tensor) and hasattr(value, "__create_chunk_list__")
    )


class Finder:
    """Finds the sharded leaves of one state; computes common placements once."""

    def __init__(self, rank: int, world: int) -> None:
        self._rank = rank
        self._all = tuple(range(world))
        self._places: dict[Any, Place] = {}

    def leaves(self, flat: Flat) -> list[Leaf]:
        """The sharded leaves, in the order of the state. Raises UsageError for a leaf that cannot be gathered."""
        return [
            self._leaf(index, flat.names[index], value, format_path(flat.paths[index]))
            for index, value in enumerate(flat.values)
            if is_sharded(value)
        ]

    def _leaf(self, index: int, name: str, value: Any, where: str) -> Leaf:
        if isinstance(value, FlatPart):
            return self._of_part(index, name, value, where)
        shape = tuple(value.shape)
        place = self._place(value, where)
        own, chunks = self._own(value, place, where)
        first = chunks[0] if chunks else getattr(value, "_local_tensor", None)
        identity = None if first is None else _identity(first, place.members, place.text)
        device = value.device if first is None else first.device
        chunks = [copyable(chunk.detach()) for chunk in chunks]
        return Leaf(index, name, where, shape, shape, value.dtype, device, place, own, chunks, identity)

    def _own(self, value: Any, place: Place, where: str) -> tuple[tuple[Box, ...], list[torch.Tensor]]:
        """The boxes of this rank, and their elements."""
        if place.boxes is None or is_interleaving(value):
            chunks = shard_of(value, where).chunks
            return tuple(Box(chunk.offsets, chunk.sizes) for chunk in chunks), [chunk.local for chunk in chunks]
        local = value._local_tensor  # noqa: SLF001 - to_local() costs 20 us
        describe(local, where)
        own = place.boxes[place.members.index(self._rank)]
        if local.shape != own[0].sizes and (local.numel() or 0 not in own[0].sizes):
            text = f"{where} has a local tensor of {list(local.shape)}; its placements give {list(own[0].sizes)}"
            raise UsageError(text, hint="make it with distribute_tensor()")
        return own, [local]

    def _of_part(self, index: int, name: str, part: FlatPart, where: str) -> Leaf:
        local, shape = part.local, tuple(part.shape)
        describe(local, where)
        total = math.prod(shape)
        if not 0 <= part.start <= total + local.numel() or not local.is_contiguous():
            text = f"{where} is a FlatPart that begins at {part.start} of {total} elements, or is not contiguous"
            raise UsageError(text, hint="give a contiguous range of the flattened tensor")
        count = max(0, min(local.numel(), total - part.start))
        own = (Box((part.start,), (count,)),) if count else ()
        chunks = [copyable(local.detach().view(-1)[:count])] if count else []
        place = Place(self._all, frozenset(self._all), "FlatPart", None)
        identity = _identity(local, self._all, "FlatPart")
        return Leaf(index, name, where, shape, (total,), local.dtype, local.device, place, own, chunks, identity)

    def _place(self, value: Any, where: str) -> Place:
        if not is_dtensor(value):
            members = self._all
            if is_sharded_tensor(value):
                members = tuple(sorted(dist.get_process_group_ranks(value._process_group)))  # noqa: SLF001
            return Place(members, frozenset(members), "in boxes", None)
        if value.device_mesh.get_coordinate() is None:
            text = f"{where} is a DTensor on a mesh without rank {self._rank}"
            raise UsageError(text, hint="leave it out of the state on ranks that have nothing of it")
        if any(placement.is_partial() for placement in value.placements):
            raise UsageError(f"{where} is a DTensor with a partial placement", hint="redistribute() it first")
        plain = type(value._local_tensor) in PLAIN_TYPES  # noqa: SLF001 - as above
        key = (value.shape, value.device_mesh, value.placements, plain)
        if key not in self._places:
            self._places[key] = _place_on_mesh(value, plain)
        return self._places[key]


def _identity(local: torch.Tensor, *more: Any) -> Any:
    storage = local.untyped_storage()._cdata  # noqa: SLF001 - also for one without memory, which has no address
    return (storage, local.storage_offset(), local.shape, local.stride(), *more)


def _place_on_mesh(value: "DTensor", plain: bool) -> Place:
    mesh, placements = value.device_mesh, value.placements
    ranks, coordinate = mesh.mesh, mesh.get_coordinate()
    assert coordinate is not None  # noqa: S101 - _place has checked it
    dims = [getattr(placement, "dim", None) for placement in placements]
    here = tuple(c if dim is None else slice(None) for c, dim in zip(coordinate, dims, strict=True))
    members = ranks[here].flatten().tolist()
    places = torch.arange(ranks.numel()).view(ranks.shape)[here].flatten().tolist()
    boxes = _boxes_on_mesh(value, dims) if plain else None
    order = sorted(range(len(members)), key=members.__getitem__)
    listed = ranks.tolist() if ranks.numel() <= _SHORT else digest(str(ranks.tolist()).encode()).hex()
    return Place(
        tuple(members[i] for i in order),
        frozenset(ranks.flatten().tolist()),
        f"{placements} on the mesh {listed}",
        None if boxes is None else tuple(boxes[places[i]] for i in order),
    )


def _boxes_on_mesh(value: "DTensor", dims: list[int | None]) -> list[tuple[Box, ...]] | None:
    """The boxes at each coordinate of the mesh; None if they do not follow from the placements alone."""
    shape, mesh = tuple(value.shape), tuple(value.device_mesh.shape)
    if not is_interleaving(value):
        return [(box,) for box in placed(shape, mesh, dims)]
    cuts = [math.prod(n for n, d in zip(mesh, dims, strict=True) if d == dim) for dim in range(len(shape))]
    if 0 in shape or any(size % parts for size, parts in zip(shape, cuts, strict=True)):
        return None  # the number of rows of each rank is ambiguous
    local = tuple(size // parts for size, parts in zip(shape, cuts, strict=True))
    found = [distributed(shape, mesh, place, value.placements, local) for place in itertools.product(*map(range, mesh))]
    if any(len(ways) != 1 for ways in found):
        return None
    return [tuple(Box(box.offsets, box.sizes) for box in ways[0]) for ways in found]
