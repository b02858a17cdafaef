"""Which boxes of a DTensor this rank has, whatever its placements: strided ones interleave what others have.

torch's own answer is one box at the first offset. That is wrong where a strided shard is not one run of rows.
"""

import itertools
from collections.abc import Sequence
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


def boxes_of(tensor: DTensor, local: torch.Tensor, where: str) -> list[LocalBox]:
    """The boxes that make up local, the local tensor of a DTensor. where is its place in the state.

    Raises UsageError when the local tensor is not what the placements say.
    """
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return []  # the mesh is one of other ranks
    shape = tuple(local.shape)
    if not any(_is_strided(placement) for placement in tensor.placements):
        chunks = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]  # DCP's own question
        return [LocalBox(tuple(c.offsets), shape, tuple(slice(0, size) for size in shape)) for c in chunks]
    if 0 in tensor.shape:
        return [LocalBox((0,) * len(shape), shape, tuple(slice(0, size) for size in shape))]
    # FSDP2 over tensor parallelism shards the local tensor of the inner mesh, right to left. The placements that it
    # writes down mean the same read from left to right, but where that leaves a rank without rows.
    for rows in (_left_to_right(tensor, coordinate), _right_to_left(tensor, coordinate)):
        if tuple(map(len, rows)) == shape:
            return _product([_runs(dim) for dim in rows])
    text = f"{where} has a local tensor of {list(shape)}, which its placements {tensor.placements} do not give"
    raise UsageError(text, hint="redistribute() it to placements without strides before saving")


def _is_strided(placement: Any) -> bool:
    return hasattr(placement, "split_factor")


def _left_to_right(tensor: DTensor, coordinate: Sequence[int]) -> list[torch.Tensor]:
    """Of each dimension the rows of this rank, in their order: as distribute_tensor() deals them out."""
    rows = [torch.arange(size) for size in tensor.shape]
    for mesh_dim, placement in enumerate(tensor.placements):
        if hasattr(placement, "dim"):
            dim = placement.dim
            shaped = rows[dim].view([1] * dim + [-1])  # the placement splits along its own dimension
            parts = placement._split_tensor(  # type: ignore[attr-defined]  # noqa: SLF001 - torch has no public one
                shaped, tensor.device_mesh.size(mesh_dim), with_padding=False, contiguous=False
            )[0]
            rows[dim] = parts[coordinate[mesh_dim]].reshape(-1)
    return rows


def _right_to_left(tensor: DTensor, coordinate: Sequence[int]) -> list[torch.Tensor]:
    rows = [torch.arange(size) for size in tensor.shape]
    for mesh_dim, placement in reversed(list(enumerate(tensor.placements))):
        if hasattr(placement, "dim"):
            parts = rows[placement.dim].chunk(tensor.device_mesh.size(mesh_dim))
            mine = coordinate[mesh_dim]
            rows[placement.dim] = parts[mine] if mine < len(parts) else rows[placement.dim][:0]
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
