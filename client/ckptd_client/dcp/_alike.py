"""Which tensors several ranks of a DCP save hold alike, so that its planner leaves each to one of them.

A rank tells which items it has before they are dealt out, 8 bytes for each. The coordinator answers which sets of ranks
have which. Both travel with DCP's own plans, and stay in them where DCP caches those.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import xxhash
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from ckptd_client._state.replica_slices import Stream, fitting, stream_of

_SUM_NBYTES = 8
_NO_SET = 255
_KEPT = 8  # lists of items: of plans that DCP may have cached, whichever writer made them
_items: OrderedDict[bytes, list[WriteItem]] = OrderedDict()  # of tensors, by the digest of their description


class Told(NamedTuple):
    """Which items a rank has, before any is left to another rank."""

    sums: bytes


class Alike(NamedTuple):
    """Which of its items a rank has in common with which others."""

    told: bytes  # digest of what it told
    sets: tuple[tuple[int, ...], ...]  # of ranks
    of: bytes  # for each item the number of its set
    unseen: bool  # whether there may be more


UNKNOWN = Alike(b"", (), b"", unseen=True)


def tell(plan: SavePlan, is_own: Callable[[str], bool]) -> SavePlan:
    """The plan with what this rank has. is_own: whether a name is of what each rank has for itself."""
    if not getattr(plan, "usable", True):
        return plan  # DCP goes on with one that it has cached
    items = [i for i in plan.items if i.type != WriteItemType.BYTE_IO and i.tensor_data and not is_own(i.index.fqn)]
    items.sort(key=lambda item: (item.index.fqn, tuple(item.index.offset or ())))
    told = Told(b"".join(map(_sum, items)))
    _items[_key(told)] = items
    _items.move_to_end(_key(told))
    while len(_items) > _KEPT:
        _items.popitem(last=False)
    return replace(plan, storage_data=told)


def answer(plans: Sequence[SavePlan]) -> list[SavePlan]:
    """The plans of all ranks, each with what it has in common with others."""
    told = [plan.storage_data for plan in plans]
    if not all(isinstance(one, Told) for one in told):  # who goes on with a cached plan goes on with its answer
        return [replace(plan, storage_data=UNKNOWN) if getattr(plan, "usable", True) else plan for plan in plans]
    ranks: dict[bytes, tuple[int, ...]] = {}
    for rank, one in enumerate(told):
        for found in set(_split(one)):
            ranks[found] = (*ranks.get(found, ()), rank)
    return [replace(plan, storage_data=_of(one, ranks)) for plan, one in zip(plans, told, strict=True)]


def items_of(alike: Alike) -> list[WriteItem] | None:
    """What the rank told; None when that is not known any more."""
    return _items.get(alike.told)


def streams_of(
    alike: Alike, items: Sequence[WriteItem], resolve: Callable[[WriteItem], torch.Tensor]
) -> tuple[list[Stream], dict[int, torch.Tensor]]:
    """A stream for each set, and the tensors of all by position among the items."""
    of_sets: dict[int, list[int]] = {}
    for position, number in enumerate(alike.of):
        if number != _NO_SET:
            of_sets.setdefault(number, []).append(position)
    values = {at: resolve(items[at]).detach() for positions in of_sets.values() for at in positions}
    full = {number: [at for at in positions if values[at].numel()] for number, positions in of_sets.items()}
    names = {at: items[at].index.fqn for at in values}
    return [stream_of(alike.sets[number], found, names, values) for number, found in full.items() if found], values


def _of(told: Told, ranks: dict[bytes, tuple[int, ...]]) -> Alike:
    held = [ranks[found] for found in _split(told)]
    sets = sorted({found for found in held if len(found) > 1})
    numbers = {found: number for number, found in enumerate(fitting(sets))}
    of = bytes(numbers.get(found, _NO_SET) for found in held)
    return Alike(_key(told), tuple(numbers), of, unseen=len(sets) > len(numbers))


def _sum(item: WriteItem) -> bytes:
    data = item.tensor_data
    assert data is not None  # noqa: S101 - tell has left out what has none
    where = tuple(item.index.offset or ()), tuple(data.chunk.sizes), tuple(data.size)
    return xxhash.xxh3_64_digest(repr((item.index.fqn, *where, str(data.properties.dtype))).encode())


def _split(told: Told) -> Iterable[bytes]:
    return (told.sums[at : at + _SUM_NBYTES] for at in range(0, len(told.sums), _SUM_NBYTES))


def _key(told: Told) -> bytes:
    return xxhash.xxh3_128_digest(told.sums)
