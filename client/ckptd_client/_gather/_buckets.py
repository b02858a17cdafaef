"""Buckets of sharded tensors: the pieces that ranks transfer together."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ckptd_client._gather._cuts import Piece, Shape, pieces_of
from ckptd_client._gather._leaves import Leaf
from ckptd_client._state.tensors import copied_as

Members = tuple[int, ...]


@dataclass(slots=True, eq=False)
class Bucket:
    """Pieces of tensors of one dtype that the same ranks hold. Ranks transfer them together."""

    members: Members
    dtype: torch.dtype  # as torch can copy it
    device: torch.device
    items: list[tuple[Leaf, Piece]] = field(default_factory=list)
    last: list[Leaf] = field(default_factory=list)  # tensors whose last piece it has
    count: int = 0  # elements of all members, padded to equal counts


def buckets_of(sets: Mapping[Members, Sequence[Leaf]], nbytes: int) -> Iterator[Bucket]:
    """The buckets of all sets, each of at most so many bytes, in an order that ranks of several sets share.

    Larger tensors are cut. Tensors of one dtype stay in the order of the state.
    """
    for members in sorted(sets):
        kinds: dict[tuple[torch.dtype, torch.device], list[Leaf]] = {}
        for leaf in sets[members]:
            kinds.setdefault((leaf.dtype, leaf.device), []).append(leaf)
        for (dtype, device), leaves in kinds.items():
            yield from _of_one_kind(members, copied_as(dtype), device, leaves, nbytes)


def _of_one_kind(
    members: Members, dtype: torch.dtype, device: torch.device, leaves: Sequence[Leaf], nbytes: int
) -> Iterator[Bucket]:
    most = max(1, nbytes // dtype.itemsize)
    cut: dict[tuple[Shape, int], list[Piece]] = {}  # many tensors have the same boxes and cuts
    bucket = Bucket(members, dtype, device)
    for leaf in leaves:
        assert leaf.place.boxes is not None  # noqa: S101 - all ranks have announced theirs
        key = (leaf.box_shape, id(leaf.place.boxes))
        if key not in cut:
            cut[key] = pieces_of(leaf.box_shape, leaf.place.boxes, most // len(members))
        for piece in cut[key]:
            count = len(members) * max(piece.counts)
            if bucket.items and bucket.count + count > most:
                yield bucket
                bucket = Bucket(members, dtype, device)
            bucket.items.append((leaf, piece))
            bucket.count += count
        bucket.last.append(leaf)
    if bucket.items:
        yield bucket
