"""The boxes of a DTensor on this rank, for any placements: strided placements interleave the rows of several ranks.

torch itself gives one box at the first offset, which is wrong if a strided shard is not one run of rows.
"""

import functools
import itertools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ckptd.shared.base.errors import UsageError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class LocalBox(NamedTuple):
    """A box of the complete tensor, and its position in this rank's local tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    local: tuple[slice, ...]


class _Run(NamedTuple):
    """Rows that are consecutive in the complete tensor and in the local one."""

    start: int
    local: int
    nrows: int


def is_interleaving(tensor: "DTensor") -> bool:
    """Whether its rows may be distributed by strides, so that torch's one box may be wrong."""
    return any(_is_strided(placement) for placement in tensor.placements)


def boxes_of(tensor: "DTensor", local: torch.Tensor, where: str) -> list[LocalBox]:
    """The boxes of local, the local tensor of a DTensor. where is its place in the state.

    Raises UsageError if the local tensor does not fit the placements, or if the placements are ambiguous.
    """
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return []  # this rank is not in the mesh
    shape = tuple(local.shape)
    if not is_interleaving(tensor):
        chunks = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]  # a method of DCP's protocol
        return [LocalBox(tuple(c.offsets), shape, tuple(slice(0, size) for size in shape)) for c in chunks]
    if 0 in tensor.shape:
        return [LocalBox((0,) * len(shape), shape, tuple(slice(0, size) for size in shape))]
    mesh = tuple(tensor.device_mesh.shape)
    found = distributed(tuple(tensor.shape), mesh, tuple(coordinate), tuple(tensor.placements), shape)
    if len(found) != 1:
        text = f"{where} has a local tensor of {list(shape)}, which its placements {tensor.placements} "
        text += "give in two ways, with other rows" if found else "do not give"
        raise UsageError(text, hint="redistribute() it to placements without strides before saving")
    return found[0]


@functools.lru_cache(4096)  # many tensors have the same cuts, and there are many rows
def distributed(
    whole: tuple[int, ...], mesh: tuple[int, ...], coordinate: tuple[int, ...], placements: tuple[Any, ...],
    shape: tuple[int, ...],
) -> list[list[LocalBox]]:  # fmt: skip
    """The boxes of a rank whose local tensor has this shape, for each interpretation of the placements that fits it."""
    steps = [_Step(p, p.dim, mesh[d], coordinate[d]) for d, p in enumerate(placements) if hasattr(p, "dim")]
    # FSDP2 over tensor parallelism shards the local tensor of the inner mesh. If all sizes divide evenly, its
    # placements mean the same when they are applied from left to right. Else the two may differ in the number of rows
    # of a rank, and with three cuts of one dimension in the rows themselves. The tensor does not show which one is
    # meant.
    found: list[list[LocalBox]] = []
    for rows in [_left_to_right(whole, steps), *([_nested(whole, steps)] if _is_nesting(steps) else [])]:
        if rows is None or tuple(map(len, rows)) != shape:
            continue
        boxes = _product([_runs(dim) for dim in rows])
        if boxes not in found:
            found.append(boxes)
    return found


class _Step(NamedTuple):
    """The effect of one dimension of the mesh on a dimension of the tensor."""

    placement: Any
    dim: int
    ranks: int
    mine: int  # index of this one


def _is_strided(placement: Any) -> bool:
    return hasattr(placement, "split_factor")


def _left_to_right(whole: tuple[int, ...], steps: list[_Step]) -> list[torch.Tensor] | None:
    """For each dimension the rows of this rank, in order, as distribute_tensor() distributes them.

    None where torch cannot distribute them: older releases (2.6) split a strided shard evenly or not at all.
    """
    rows = [torch.arange(size) for size in whole]
    for placement, dim, ranks, mine in steps:
        shaped = rows[dim].view([1] * dim + [-1])  # the placement splits along its own dimension
        # torch has no public method for it; its result depends on the release.
        try:
            parts = placement._split_tensor(shaped, ranks, with_padding=False, contiguous=False)[0]  # noqa: SLF001
        except AssertionError:
            return None
        rows[dim] = parts[mine].reshape(-1)
    return rows


def _is_nesting(steps: list[_Step]) -> bool:
    """Whether each stride is the number of shards to its right, as after nested sharding."""
    return all(
        step.placement.split_factor == math.prod(right.ranks for right in steps[i + 1 :] if right.dim == step.dim)
        for i, step in enumerate(steps)
        if _is_strided(step.placement)
    )


def _nested(whole: tuple[int, ...], steps: list[_Step]) -> list[torch.Tensor]:
    """For each dimension the rows of this rank with nested sharding: plain placements first, then the strided ones."""
    rows = [torch.arange(size) for size in whole]
    plain = [step for step in steps if not _is_strided(step.placement)]
    strided = [step for step in reversed(steps) if _is_strided(step.placement)]  # the innermost mesh is the rightmost
    for _, dim, ranks, mine in plain + strided:
        parts = rows[dim].chunk(ranks)
        rows[dim] = parts[mine] if mine < len(parts) else rows[dim][:0]
    return rows


def _runs(rows: torch.Tensor) -> list[_Run]:
    if not len(rows):
        return []
    starts = [0, *(torch.nonzero(rows.diff() != 1).flatten() + 1).tolist()]
    return [_Run(int(rows[a]), a, b - a) for a, b in itertools.pairwise([*starts, len(rows)])]


def _product(runs: list[list[_Run]]) -> list[LocalBox]:
    return [
        LocalBox(
            tuple(run.start for run in corner),
            tuple(run.nrows for run in corner),
            tuple(slice(run.local, run.local + run.nrows) for run in corner),
        )
        for corner in itertools.product(*runs)
    ]
