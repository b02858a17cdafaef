"""Which boxes of a DTensor this rank has, whatever its placements: strided ones interleave what others have.

torch's own answer is one box at the first offset. That is wrong where a strided shard is not one run of rows.
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
    """A box of the whole tensor, and where it lies in this rank's local tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    local: tuple[slice, ...]


class _Run(NamedTuple):
    """Rows that follow one another in the whole tensor and in the local one."""

    start: int
    local: int
    nrows: int


def is_interleaving(tensor: "DTensor") -> bool:
    """Whether its rows may be dealt out by strides, so that torch's one box is not to be trusted."""
    return any(_is_strided(placement) for placement in tensor.placements)


def boxes_of(tensor: "DTensor", local: torch.Tensor, where: str) -> list[LocalBox]:
    """The boxes that make up local, the local tensor of a DTensor. where is its place in the state.

    Raises UsageError when the local tensor is not what the placements say, or when they can be read in two ways.
    """
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return []  # the mesh is one of other ranks
    shape = tuple(local.shape)
    if not is_interleaving(tensor):
        chunks = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]  # DCP's own question
        return [LocalBox(tuple(c.offsets), shape, tuple(slice(0, size) for size in shape)) for c in chunks]
    if 0 in tensor.shape:
        return [LocalBox((0,) * len(shape), shape, tuple(slice(0, size) for size in shape))]
    mesh = tuple(tensor.device_mesh.shape)
    found = dealt(tuple(tensor.shape), mesh, tuple(coordinate), tuple(tensor.placements), shape)
    if len(found) != 1:
        text = f"{where} has a local tensor of {list(shape)}, which its placements {tensor.placements} "
        text += "give in two ways, with other rows" if found else "do not give"
        raise UsageError(text, hint="redistribute() it to placements without strides before saving")
    return found[0]


@functools.lru_cache(4096)  # many tensors are cut alike, and rows are many
def dealt(
    whole: tuple[int, ...], mesh: tuple[int, ...], coordinate: tuple[int, ...], placements: tuple[Any, ...],
    shape: tuple[int, ...],
) -> list[list[LocalBox]]:  # fmt: skip
    """The boxes of a rank whose local tensor has this shape, in each way to read the placements that gives it."""
    steps = [_Step(p, p.dim, mesh[d], coordinate[d]) for d, p in enumerate(placements) if hasattr(p, "dim")]
    # FSDP2 over tensor parallelism shards the local tensor of the inner mesh. The placements that it writes down mean
    # the same read from left to right when all divides; else the two may differ in how many rows a rank has, and with
    # three cuts of one dimension in which. Which was meant, nothing says.
    found: list[list[LocalBox]] = []
    for rows in [_left_to_right(whole, steps), *([_nested(whole, steps)] if _is_nesting(steps) else [])]:
        if rows is None or tuple(map(len, rows)) != shape:
            continue
        boxes = _product([_runs(dim) for dim in rows])
        if boxes not in found:
            found.append(boxes)
    return found


class _Step(NamedTuple):
    """What one dimension of the mesh does to a dimension of the tensor."""

    placement: Any
    dim: int
    ranks: int
    mine: int  # which of them


def _is_strided(placement: Any) -> bool:
    return hasattr(placement, "split_factor")


def _left_to_right(whole: tuple[int, ...], steps: list[_Step]) -> list[torch.Tensor] | None:
    """Of each dimension the rows of this rank, in their order: as distribute_tensor() deals them out.

    None where torch deals nothing out: older releases (2.6) split a strided shard evenly or not at all.
    """
    rows = [torch.arange(size) for size in whole]
    for placement, dim, ranks, mine in steps:
        shaped = rows[dim].view([1] * dim + [-1])  # the placement splits along its own dimension
        # torch has no public name for it, and its meaning is its version's.
        try:
            parts = placement._split_tensor(shaped, ranks, with_padding=False, contiguous=False)[0]  # noqa: SLF001
        except AssertionError:
            return None
        rows[dim] = parts[mine].reshape(-1)
    return rows


def _is_nesting(steps: list[_Step]) -> bool:
    """Whether each stride counts the shards to its right, as it does when what they left was sharded once more."""
    return all(
        step.placement.split_factor == math.prod(right.ranks for right in steps[i + 1 :] if right.dim == step.dim)
        for i, step in enumerate(steps)
        if _is_strided(step.placement)
    )


def _nested(whole: tuple[int, ...], steps: list[_Step]) -> list[torch.Tensor]:
    """Of each dimension the rows of this rank when each shard is cut once more: plain ones first, then the strided."""
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
