"""A gather on its way: begun bucket by bucket, handed out tensor by tensor or as a whole state."""

import contextlib
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ckptd.shared.base.errors import GatherError, UsageError
from ckptd.shared.files.mapping import HUGE_NBYTES, advise_huge
from ckptd_client._gather._agreement import Members, Word, agree, check_reached, failed_word
from ckptd_client._gather._all_gather import AllGather
from ckptd_client._gather._buckets import Bucket, buckets_of
from ckptd_client._gather._direct import Direct
from ckptd_client._gather._groups import Groups, is_distributed, told_as_error
from ckptd_client._gather._lanes import Built, Flight, Lane, Party
from ckptd_client._gather._leaves import Finder, FlatPart, Leaf
from ckptd_client._state.tensors import is_tensor
from ckptd_client._state.tree import flatten, unflatten

Ranks = int | Collection[int] | None
BUCKET_NBYTES = 64 << 20
_TURNS = 3  # buckets on their way at a time


@dataclass(frozen=True, slots=True)
class Order:
    """What was asked for. collective: by all-gathers on CPUs too, which only tests want."""

    to: Ranks = None
    bucket_nbytes: int = BUCKET_NBYTES
    cpu_offload: bool = True
    collective: bool = False

    def ranks(self, world: int) -> frozenset[int]:
        """The ranks that get the tensors. Raises UsageError."""
        named = range(world) if self.to is None else [self.to] if isinstance(self.to, int) else self.to
        found = frozenset(named)
        if not found or not found <= frozenset(range(world)):
            text = f"to={self.to!r} names no rank, or one that is not among 0 to {world - 1}"
            raise UsageError(text, hint="to=0, to=[0, 1], or nothing for all ranks")
        if self.bucket_nbytes < 1:
            raise UsageError(f"a bucket of {self.bucket_nbytes} bytes holds nothing")
        return found

    def text(self, to: frozenset[int]) -> str:
        """For the other ranks, who must have been asked for the same."""
        return f"to={sorted(to)}, bucket_nbytes={self.bucket_nbytes}, cpu_offload={self.cpu_offload}"


class Gathering:
    """A gather that has begun. On every rank, once: wait for it, or iterate over it.

    Iterating gives (name, tensor) for each tensor of the state, names joined with dots as in a checkpoint: first those
    that are no shards, as they lie in the state, then each of the others when it is whole, on ranks that it is gathered
    to. The others take part in the same loop, which gives them nothing. What is handed out is the caller's own, so that
    no more than three buckets, and the tensors that they are parts of, are in memory besides what the caller keeps.
    A loop that is left early takes part in the rest without handing it out.

    One at a time: until its end no other begins. Until then the state must not change, either. Raises GatherError when
    another rank is gone, or keeps this one waiting for 10 minutes; after that the job's processes should be started
    anew.
    """

    def __init__(self, state: Any, order: Order, groups: Groups) -> None:
        rank, world = (dist.get_rank(), dist.get_world_size()) if is_distributed() else (0, 1)
        self._order = order
        try:
            groups.check_idle()
            to = order.ranks(world)
            self._flat = flatten(state, lambda value: is_tensor(value) or isinstance(value, FlatPart))
            leaves = Finder(rank, world).leaves(self._flat)
        except Exception as error:
            with contextlib.suppress(GatherError):  # what went wrong here says more
                groups.exchange(failed_word(error))
            raise
        sets: dict[Members, list[Leaf]] = {}
        for leaf in leaves:
            sets.setdefault(leaf.place.members, []).append(leaf)
        apart = {
            members
            for members, found in sets.items()
            if order.collective or any(leaf.device.type != "cpu" for leaf in found)
        }
        word = Word(
            order.text(to),
            orphans=[leaf.name for leaf in leaves if not to & leaf.place.reach],
            groups=groups.lacking(apart, rank),
        )
        agreed = agree(sets, word, groups.exchange, rank)
        if agreed.orphans:
            check_reached(agreed.orphans, set(self._flat.names) if rank in to else (), groups.exchange)
        groups.make(agreed.groups)
        self._party, self._wanted = Party(groups, rank, to), rank in to
        self._sharded = {leaf.index for leaf in leaves}
        self._ties: dict[Leaf, list[Leaf]] = {}
        for leaf in leaves:
            if leaf.tied is not None:
                self._ties.setdefault(leaf.tied, []).append(leaf)
        self._left = deque(bucket for bucket in buckets_of(sets, order.bucket_nbytes) if to & set(bucket.members))
        self._flying: deque[tuple[Bucket, Flight]] = deque()
        self._lanes: dict[torch.device, Lane] = {}
        self._built: dict[Leaf, Built] = {}
        self._begun = 0
        self._taken = False
        self._groups = groups
        groups.busy = bool(self._left)
        for _ in range(_TURNS):
            self._begin_next()

    def wait(self) -> Any:
        """The whole state: its containers anew, plain values and unsharded tensors as they are. Blocks.

        None on ranks that it is not gathered to.
        """
        found = dict(self._tensors())
        if not self._wanted:
            return None
        values = enumerate(self._flat.values)
        return unflatten([(self._flat.paths[i], found.get(i, value)) for i, value in values])

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((self._flat.names[i], tensor) for i, tensor in self._tensors())

    def _tensors(self) -> Iterator[tuple[int, torch.Tensor]]:
        """By place among the values."""
        if self._taken:
            raise UsageError("this gather was waited for before", hint="call gather again")
        self._taken = True
        return self._handed_out()

    def _handed_out(self) -> Iterator[tuple[int, torch.Tensor]]:
        try:
            for i, value in enumerate(self._flat.values if self._wanted else ()):
                if is_tensor(value) and i not in self._sharded:
                    yield i, value.detach().cpu() if self._order.cpu_offload else value.detach()
            while self._flying:
                yield from self._land_next()
        finally:
            while self._flying:  # the caller left early; the other ranks still want what is here
                self._land_next()
            for lane in self._lanes.values():
                lane.end()
            self._groups.busy = False

    def _begin_next(self) -> None:
        if not self._left:
            return
        bucket = self._left.popleft()
        lane = self._lane(bucket.device)
        with lane.beside():
            for leaf, _ in bucket.items if self._wanted else ():
                if leaf not in self._built:
                    self._built[leaf] = Built.of(leaf, self._empty(leaf))
        with told_as_error():
            self._flying.append((bucket, lane.begin(bucket, self._built, self._begun % _TURNS)))
        self._begun += 1

    def _land_next(self) -> list[tuple[int, torch.Tensor]]:
        bucket, flight = self._flying.popleft()
        try:
            with told_as_error():
                flight.land()
            self._begin_next()
        except BaseException:
            self._flying.clear()  # there is no going on
            raise
        lane = self._lane(bucket.device)
        found = []
        for leaf in bucket.last if self._wanted else ():
            tensor = self._built.pop(leaf).tensor
            lane.hand_over(tensor)
            found += [(one.index, tensor) for one in (leaf, *self._ties.get(leaf, ()))]
        return found

    def _lane(self, device: torch.device) -> Lane:
        if device not in self._lanes:
            if device.type == "cpu" and not self._order.collective:
                self._lanes[device] = Direct(self._party, _TURNS)
            else:
                self._lanes[device] = AllGather(self._party, _TURNS, device, to_host=self._order.cpu_offload)
        return self._lanes[device]

    def _empty(self, leaf: Leaf) -> torch.Tensor:
        tensor = torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu" if self._order.cpu_offload else leaf.device)
        if tensor.device.type == "cpu" and tensor.nbytes >= HUGE_NBYTES:
            advise_huge(tensor.data_ptr(), tensor.nbytes)
        return tensor
