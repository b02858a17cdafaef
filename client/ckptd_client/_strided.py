"""Which boxes of a DTensor this rank has, whatever its placements: strided ones interleave what others have.

torch's own answer is one box at the first offset. That is wrong where a strided shard is not one run of rows.
"""

import functools
import itertools
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from ckptd.protocol.errors import UsageError


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


def is_interleaving(tensor: DTensor) -> bool:
    """Whether its rows may be dealt out by strides, so that torch's one box is not to be trusted."""
    return any(_is_strided(placement) for placement in tensor.placements)


def boxes_of(tensor: DTensor, local: torch.Tensor, where: str) -> list[LocalBox]:
    """The boxes that make up local, the local tensor of a DTensor. where is its place in the state.

    Raises UsageError when the local tensor is not what the placements say.
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
    boxes = _dealt(tuple(tensor.shape), mesh, tuple(coordinate), tuple(tensor.placements), shape)
    if boxes is None:
        text = f"{where} has a local tensor of {list(shape)}, which its placements {tensor.placements} do not give"
        raise UsageError(text, hint="redistribute() it to placements without strides before saving")
    return boxes


@functools.lru_cache(4096)  # many tensors are cut alike, and rows are many
def _dealt(
    whole: tuple[int, ...], mesh: tuple[int, ...], coordinate: tuple[int, ...], placements: tuple[Any, ...],
    shape: tuple[int, ...],
) -> list[LocalBox] | None:  # fmt: skip
    """The boxes of a rank whose local tensor has this shape; None when the placements give no such shape."""
    steps = [_Step(p, p.dim, mesh[d], coordinate[d]) for d, p in enumerate(placements) if hasattr(p, "dim")]
    # FSDP2 over tensor parallelism shards the local tensor of the inner mesh, right to left. The placements that it
    # writes down mean the same read from left to right, but where that leaves a rank without rows.
    for rows in (_left_to_right(whole, steps), _right_to_left(whole, steps)):
        if rows is not None and tuple(map(len, rows)) == shape:
            return _product([_runs(dim) for dim in rows])
    return None


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


def _right_to_left(whole: tuple[int, ...], steps: list[_Step]) -> list[torch.Tensor]:
    rows = [torch.arange(size) for size in whole]
    for _, dim, ranks, mine in reversed(steps):
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
