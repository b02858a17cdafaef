"""The plan of one rank's saves: its boxes and their places in the image; kept while the state keeps its structure."""

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, eq
from typing import Any, NamedTuple

import torch

from ckptd.shared.base.errors import DamagedError, UsageError
from ckptd.shared.format.digest import digest
from ckptd.shared.format.integrity import XXH3, Integrity, Purpose
from ckptd.shared.format.layout import VERSION, Layout, Leaves, Planned, TensorEntry, encode_leaves
from ckptd.shared.format.packed_layout import Spread, decode_layout, encode_layout
from ckptd.shared.format.replica_attestations import NOT_COMPARED, Attestation
from ckptd.shared.format.save_metadata import Scalar
from ckptd.shared.torchfile.image import Box, Image, make_image, make_layout
from ckptd_client._image.mesh_places import placements_of
from ckptd_client._image.segment_plan import Plain, SegmentPlan
from ckptd_client._image.stock_objects import StockLeaves
from ckptd_client._local.rank import Group
from ckptd_client._state.pickle import NO_PICKLE, PickleKeys
from ckptd_client._state.pickle import encode as encode_plain
from ckptd_client._state.replica_choice import held_as
from ckptd_client._state.replica_digests import WholeDigest
from ckptd_client._state.replica_slices import (
    Rows,
    Stream,
    as_not_binding,
    attestation_of,
    attestation_of_digests,
    digests_of,
    slices_of,
    streams_of,
)
from ckptd_client._state.replicas import Ground, Replicas, replicas_of
from ckptd_client._state.sampling import Sample
from ckptd_client._state.sharded import is_dtensor
from ckptd_client._state.tensors import (
    PLAIN_TYPES,
    Shard,
    alias_key,
    copied_as,
    copyable,
    is_tensor,
    local_of,
    locals_of,
    shard_of,
)
from ckptd_client._state.tree import Flat, Structure, collect, flatten, format_path

log = logging.getLogger("ckptd_client")


_DESCRIBED = attrgetter("__class__", "shape", "dtype", "device")  # in one call, for each tensor of each save


class Spec(NamedTuple):
    """Properties of a sharded tensor on which the plan depends."""

    local_shape: torch.Size
    mesh: Any
    placements: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(SegmentPlan):
    """A rank's layout, and the positions of its values. Its boxes are those of ``stored``, then those of ``cut``."""

    structure: Structure
    names: list[str]
    wheres: list[str]  # each value's place in Python notation
    tensors: list[int]  # positions among the values
    leaves: list[int]
    stored: list[int]  # positions of tensors that are written as one box; the others are tied to one of these
    cuts: list[tuple[int, Rows]]  # (index in stored, rows of it): replicas write the other rows
    streams: tuple[Stream, ...]  # of replicated tensors
    balanced: bool  # whether this rank saves only its slice of those
    unseen: bool  # whether some of them are in no stream
    grounds: tuple[Ground, ...]  # DDP modules on which they depend
    cut: list[int]  # positions of tensors whose boxes are written one by one
    of_boxes: list[int]  # position of the tensor of each box
    ties: list[tuple[int, int]]  # (position of a tied tensor, position of the one that is stored, here or by a replica)
    described: list[Any]  # class, shape, dtype and device of each tensor
    sharded: list[tuple[int, Spec]]  # (index among the tensors, further properties)
    pickled: frozenset[int]  # positions of leaves that may be pickled

    def attest(self, of_streams: Callable[[], tuple[Attestation, ...]]) -> Callable[[], tuple[Attestation, ...]]:
        """This rank's complete attestation, from that of its streams. Computes nothing before the result is called."""

        def attest() -> tuple[Attestation, ...]:
            found = of_streams() if self.balanced else as_not_binding(of_streams())
            return (*found, NOT_COMPARED) if self.unseen else found

        return attest


@dataclass(frozen=True, slots=True)
class Values:
    """One save's values, gathered by a plan. Refers to the state's tensors; do not keep it."""

    tensors: list[torch.Tensor]  # the boxes, in the order of the plan
    counted: list[torch.Tensor]  # for each box the tensor of the state
    plain: Plain  # whose attestation may wait for a device
    digests: Sequence[WholeDigest] = ()  # needed by the attestation; take them before the tensors change


def gather(
    plan: Plan, state: Any, stock: StockLeaves | None = None, sample: Sample | None = None,
    metadata: dict[str, Scalar] = {},  # noqa: B006 - never changed
) -> Values | None:  # fmt: skip
    """The state's values if it still has the plan's structure, else None. The hot path: no names, no copies.

    sample: the bytes of replicated tensors to compare; None: no attestation. metadata: of the save, on rank 0.
    """
    values = collect(state, plan.structure)
    if values is None or not _fits(plan, values):
        return None
    pieces = _pieces(plan, values) if plan.cut else []
    if pieces is None:
        return None
    leaves = {
        plan.names[i]: encode_plain(values[i], plan.names[i], plan.wheres[i], allowed=i in plan.pickled)
        for i in plan.leaves
    }
    digests = digests_of(plan.streams, values) if sample is not None and sample.whole else []
    return Values(
        tensors=[*_stored(plan, values), *pieces],
        counted=[values[i] for i in plan.of_boxes],
        plain=Plain(
            leaves=encode_leaves(Leaves(VERSION, leaves, metadata)),
            objects=stock.encode(leaves) if stock is not None else b"",
            attest=_attestation(plan, values, sample, digests),
        ),
        digests=digests,
    )


def _attestation(
    plan: Plan, values: list[Any], sample: Sample | None, digests: Sequence[WholeDigest]
) -> Callable[[], tuple[Attestation, ...]]:
    """The attestation, computed when it is called; a device error then fails the save, not training."""
    if sample is None:
        return tuple
    if sample.whole:
        return plan.attest(attestation_of_digests(plan.streams, digests))
    try:
        return plan.attest(attestation_of(plan.streams, values, sample))
    except RuntimeError as error:
        problem = error

        def fail() -> tuple[Attestation, ...]:
            raise problem

        return fail


def _fits(plan: Plan, values: list[Any]) -> bool:
    """Whether every value fits the plan."""
    found = [values[position] for position in plan.tensors]
    try:
        # One tuple at a time: 10,000 kept at once would start a garbage collection of the whole heap.
        alike = len(found) == len(plan.described) and all(map(eq, map(_DESCRIBED, found), plan.described))
    except AttributeError:  # a value that is not a tensor
        return False
    if not alike or not all(_same_shard(found[i], spec) for i, spec in plan.sharded):
        return False
    tied = all(_alias(values[tied]) == _alias(values[stored]) for tied, stored in plan.ties)
    grounded = all(ground.holds() for ground in plan.grounds)
    return tied and grounded and not any(is_tensor(values[position]) for position in plan.leaves)


def _stored(plan: Plan, values: list[Any]) -> list[torch.Tensor]:
    """The boxes of the tensors that are written as one box."""
    found = locals_of([values[position] for position in plan.stored])
    for i, rows in plan.cuts:
        found[i] = rows.of(found[i])
    return found


def _pieces(plan: Plan, values: list[Any]) -> list[torch.Tensor] | None:
    """The boxes of the tensors that are cut; None if they do not fit the plan."""
    chunks = [chunk for i in plan.cut for chunk in shard_of(values[i], plan.wheres[i]).chunks]
    boxes = plan.image.boxes[len(plan.stored) :]
    if [(box.offsets, box.sizes) for box in boxes] != [chunk.box for chunk in chunks]:
        return None
    return [copyable(chunk.local) for chunk in chunks]


def _alias(tensor: torch.Tensor) -> Hashable:
    """A key that is equal for views of the same bytes in the same form."""
    local = local_of(tensor)
    return alias_key(local) if type(local) in PLAIN_TYPES else _aliases(shard_of(tensor, ""))


def _aliases(shard: Shard) -> tuple[Hashable | None, ...]:
    return tuple(alias_key(chunk.local) for chunk in shard.chunks)


def _same_shard(tensor: Any, spec: Spec) -> bool:
    if tensor.placements != spec.placements or tensor.device_mesh != spec.mesh:
        return False
    return bool(local_of(tensor).shape == spec.local_shape)


def _spec(tensor: Any) -> Spec:
    return Spec(local_of(tensor).shape, tensor.device_mesh, tensor.placements)


def make_plan(  # noqa: PLR0913 - keyword-only
    state: Any, *, rank: int, world_size: int, dual: bool = True, pickle_keys: PickleKeys = NO_PICKLE,
    replicated: Sequence[str] | None = None, balanced: bool = True, integrity: Integrity = XXH3,
    is_own: Callable[[str], bool] = lambda _name: False,
) -> Plan:  # fmt: skip
    """Plans the layout of a state; dual: for stock readers too. Raises UsageError with the key path of a bad value.

    replicated: the user's patterns of names that are equal on all ranks; None: do not look for replicas.
    balanced: False: every rank saves all that it holds, and replicas are only compared.
    is_own: whether each rank has its own value of a name, even if the value looks replicated.
    """
    if type(state) is not dict:
        raise UsageError(f"the state must be a dict, not {type(state).__name__}", hint='save({"model": model, ...})')
    flat = flatten(state, is_tensor)
    wheres = [format_path(path) for path in flat.paths]
    tensors = [i for i, value in enumerate(flat.values) if is_tensor(value)]
    shards = {i: shard_of(flat.values[i], wheres[i]) for i in tensors}
    ties = _ties(tensors, shards)
    tied = {i for i, _ in ties}
    whole = {i for i, shard in shards.items() if i in tied or not _is_one(shard)}
    replicas = Replicas({}, {}, ())
    if replicated is not None and world_size > 1:
        replicas = replicas_of(flat, replicated, Group(rank, world_size, ""), is_own)
    streams = streams_of(replicas.ranks, flat, skipped=whole)
    rows, others = slices_of(streams, rank) if balanced else ({}, set())
    stored, cut, boxes = _boxes(flat, [i for i in tensors if i not in tied | others], shards, rows)
    kept = {*stored, *cut}
    _warn(boxes, rank)
    image = make_image(boxes, rank=rank, world_size=world_size, dual=dual)
    aliases = {flat.names[tied]: flat.names[source] for tied, source in ties if source in kept}
    held_alike = _held_alike(flat, replicas.ranks, kept - set(rows), world_size)
    untied = {i: shard for i, shard in shards.items() if i not in tied}
    layout = _layout(image, flat, untied, replicas, aliases=aliases, held_alike=held_alike)
    return Plan(
        structure=flat.structure,
        names=flat.names,
        wheres=wheres,
        tensors=tensors,
        leaves=sorted(set(range(len(flat.values))) - set(tensors)),
        stored=stored,
        cuts=[(at, rows[i]) for at, i in enumerate(stored) if i in rows],
        streams=streams,
        balanced=balanced and replicated is not None,
        unseen=_unseen(flat, replicas.ranks, streams, dict(ties)),
        grounds=replicas.grounds,
        cut=cut,
        of_boxes=[*stored, *(i for i in cut for _ in shards[i].chunks)],
        ties=ties,
        described=[_DESCRIBED(flat.values[i]) for i in tensors],
        sharded=[(at, _spec(flat.values[i])) for at, i in enumerate(tensors) if is_dtensor(flat.values[i])],
        pickled=frozenset(i for i, name in enumerate(flat.names) if pickle_keys.allow(name)),
        image=image,
        layout=layout,
        layout_digest=integrity.digest(layout, Purpose.LAYOUT),
        plan_id=digest(layout).hex(),
    )


def _layout(image: Image, flat: Flat, shards: Mapping[int, Shard], replicas: Replicas, **more: Any) -> bytes:
    """The encoded layout. shards: of all tensors but tied ones. Raises UsageError if readers would refuse it."""
    paths = dict(zip(flat.names, flat.paths, strict=True))
    holders = {flat.names[i]: found for i, found in replicas.holders.items() if i in shards}
    made = make_layout(image, paths=paths, holders=holders, **more)
    layout = encode_layout(made, _spread(image, flat, shards, replicas.ranks))
    check_readable(layout, made.tensors)
    return layout


def _spread(image: Image, flat: Flat, shards: Mapping[int, Shard], replicas: Mapping[int, tuple[int, ...]]) -> Spread:
    """How the state is spread over the ranks. shards: of all tensors but tied ones; replicas: ranks by position."""
    here = {box.name for box in image.boxes}
    absent = [
        Planned(flat.names[i], shard.code, shard.global_shape)
        for i, shard in shards.items()
        if flat.names[i] not in here
    ]
    alike = {flat.names[i]: held for i, held in replicas.items()}
    return Spread(absent, *placements_of(((flat.names[i], flat.values[i]) for i in shards), alike, image.rank))


def _check_same(found: Layout, tensors: Sequence[TensorEntry]) -> None:
    if found.tensors != list(tensors):
        raise DamagedError("it comes back with other boxes")


def check_readable(layout: bytes, tensors: Sequence[TensorEntry]) -> None:
    """Raises UsageError for a layout that readers would refuse, or that gives them other boxes than these.

    Better no save than one that cannot be loaded.
    """
    try:
        _check_same(decode_layout(layout, where="the state"), tensors)
    except DamagedError as error:
        text = f"the state cannot be saved, since nothing could read its layout: {error.message}"
        raise UsageError(text, hint="rename or leave out what it names; if that is a plain tensor, report it") from None


def _unseen(flat: Flat, ranks: Mapping[int, Any], streams: Sequence[Stream], owners: Mapping[int, int]) -> bool:
    """Whether some replicated tensor is in no stream."""
    seen = {position for stream in streams for position in stream.positions}
    return any(owners.get(i, i) not in seen and local_of(flat.values[i]).numel() for i in ranks)


def _held_alike(flat: Flat, ranks: Mapping[int, Any], whole: set[int], world_size: int) -> dict[str, list[str]]:
    """Names of replicated tensors that this image has completely, by how the ranks hold them. whole: positions."""
    found: dict[str, list[str]] = {}
    for i in sorted(whole & ranks.keys()):
        found.setdefault(held_as(flat.values[i], world_size), []).append(flat.names[i])
    return found


def _warn(boxes: list[Box], rank: int) -> None:
    names = [box.name for box in boxes if box.dtype == "F8_E8M0"]
    if names and rank == 0:
        log.warning(
            "ckptd: %s is float8_e8m0fnu: torch's HuggingFaceStorageReader refuses every directory that has such a "
            "tensor; all other readers take it",
            names[0],
        )


def _ties(tensors: list[int], shards: dict[int, Shard]) -> list[tuple[int, int]]:
    """Pairs of a tensor and an earlier one of the same bytes."""
    ties: list[tuple[int, int]] = []
    owner: dict[Any, int] = {}
    for i in tensors:
        keys = _aliases(shards[i])
        if keys and None not in keys and owner.setdefault(keys, i) != i:
            ties.append((i, owner[keys]))
    return ties


def _is_one(shard: Shard) -> bool:
    """Whether it is one box of a dtype that torch can copy, so that it can be cut at rows."""
    return len(shard.chunks) == 1 and copied_as(shard.chunks[0].local.dtype) is shard.chunks[0].local.dtype


def _boxes(
    flat: Flat, tensors: list[int], shards: dict[int, Shard], rows: Mapping[int, Rows]
) -> tuple[list[int], list[int], list[Box]]:
    """The positions of tensors that are written as one box, of those that are cut, and the boxes of both."""
    stored: list[int] = []
    cut: list[int] = []
    whole: list[Box] = []
    pieces: list[Box] = []
    for i in tensors:
        value, shard = flat.values[i], shards[i]
        if shard.absent:
            continue  # other ranks hold it
        boxes = [
            Box(flat.names[i], shard.code, chunk.sizes, shard.global_shape, chunk.offsets, part)
            for part, chunk in enumerate(shard.chunks)
        ]
        if shard.chunks[0].local is local_of(value) and copied_as(value.dtype) is value.dtype:
            stored.append(i)
            whole += [_rows_of(boxes[0], rows[i])] if i in rows else boxes
        else:
            cut.append(i)
            pieces += boxes
    return stored, cut, whole + pieces


def _rows_of(box: Box, rows: Rows) -> Box:
    sizes, offsets = list(box.sizes), list(box.offsets)
    if sizes:
        sizes[rows.dim] = rows.stop - rows.first
        offsets[rows.dim] += rows.first
    return box._replace(sizes=tuple(sizes), offsets=tuple(offsets))
