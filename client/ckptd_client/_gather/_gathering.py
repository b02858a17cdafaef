"""A gather in progress: it starts bucket by bucket, and gives single tensors or the complete state."""

import contextlib
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ckptd.shared.base.errors import GatherError, UsageError
from ckptd.shared.files.mapping import HUGE_NBYTES, advise_huge
from ckptd_client._gather._agreement import Members, RankPlan, agree, check_reached, failed_plan
from ckptd_client._gather._all_gather import AllGather
from ckptd_client._gather._buckets import Bucket, buckets_of
from ckptd_client._gather._direct import Direct
from ckptd_client._gather._groups import Groups, as_gather_error, is_distributed
from ckptd_client._gather._leaves import Finder, FlatPart, Leaf
from ckptd_client._gather._transports import Built, Recipients, Transfer, Transport
from ckptd_client._state.tensors import is_tensor
from ckptd_client._state.tree import flatten, unflatten

Ranks = int | Collection[int] | None
BUCKET_NBYTES = 64 << 20
_TURNS = 3  # buckets in transfer at a time


@dataclass(frozen=True, slots=True)
class Order:
    """The arguments of a gather. collective: use all-gathers on CPUs too, for tests."""

    to: Ranks = None
    bucket_nbytes: int = BUCKET_NBYTES
    cpu_offload: bool = True
    collective: bool = False

    def ranks(self, world: int) -> frozenset[int]:
        """The ranks that receive the tensors. Raises UsageError."""
        named = range(world) if self.to is None else [self.to] if isinstance(self.to, int) else self.to
        found = frozenset(named)
        if not found or not found <= frozenset(range(world)):
            text = f"to={self.to!r} names no rank, or one that is not among 0 to {world - 1}"
            raise UsageError(text, hint="to=0, to=[0, 1], or nothing for all ranks")
        if self.bucket_nbytes < 1:
            raise UsageError(f"a bucket of {self.bucket_nbytes} bytes holds nothing")
        return found

    def text(self, to: frozenset[int]) -> str:
        """The arguments as text; they must be equal on all ranks."""
        return f"to={sorted(to)}, bucket_nbytes={self.bucket_nbytes}, cpu_offload={self.cpu_offload}"


class Gathering:
    """A gather that has begun. Every rank either calls `wait` or iterates over it, once.

    Iterating gives (name, tensor) for each tensor of the state, names joined with dots as in a checkpoint: first those
    that are no shards, as they lie in the state, then each of the others when it is complete, on the ranks that get it.
    The other ranks take part in the same loop, which gives them nothing. The caller owns each tensor, so that no more
    than three buckets, and the tensors that they are parts of, are in memory beyond what the caller keeps. A loop that
    ends early takes part in the rest without giving it out.

    Only one gather may run at a time, and the state must not change until its end.

    Raises:
        GatherError: Another rank is gone, or has kept this one waiting for 10 minutes. Start the processes of the job
            again.
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
            with contextlib.suppress(GatherError):  # the error of this rank has the cause
                groups.exchange(failed_plan(error))
            raise
        sets: dict[Members, list[Leaf]] = {}
        for leaf in leaves:
            sets.setdefault(leaf.place.members, []).append(leaf)
        grouped = {
            members
            for members, found in sets.items()
            if order.collective or any(leaf.device.type != "cpu" for leaf in found)
        }
        plan = RankPlan(
            order.text(to),
            orphans=[leaf.name for leaf in leaves if not to & leaf.place.reach],
            groups=groups.missing(grouped, rank),
        )
        agreed = agree(sets, plan, groups.exchange, rank)
        if agreed.orphans:
            check_reached(agreed.orphans, set(self._flat.names) if rank in to else (), groups.exchange)
        groups.make(agreed.groups)
        self._recipients, self._receives = Recipients(groups, rank, to), rank in to
        self._sharded = {leaf.index for leaf in leaves}
        self._ties: dict[Leaf, list[Leaf]] = {}
        for leaf in leaves:
            if leaf.tied is not None:
                self._ties.setdefault(leaf.tied, []).append(leaf)
        self._left = deque(bucket for bucket in buckets_of(sets, order.bucket_nbytes) if to & set(bucket.members))
        self._transfers: deque[tuple[Bucket, Transfer]] = deque()
        self._transports: dict[torch.device, Transport] = {}
        self._built: dict[Leaf, Built] = {}
        self._started = 0
        self._taken = False
        self._groups = groups
        groups.busy = bool(self._left)
        for _ in range(_TURNS):
            self._begin_next()

    def wait(self) -> Any:
        """Returns the whole state, or None on ranks that do not get it. Blocks.

        Containers are copies; plain values and unsharded tensors are those of the state.
        """
        found = dict(self._tensors())
        if not self._receives:
            return None
        values = enumerate(self._flat.values)
        return unflatten([(self._flat.paths[i], found.get(i, value)) for i, value in values])

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((self._flat.names[i], tensor) for i, tensor in self._tensors())

    def _tensors(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Pairs of an index among the values, and the tensor."""
        if self._taken:
            raise UsageError("this gather was waited for before", hint="call gather again")
        self._taken = True
        return self._results()

    def _results(self) -> Iterator[tuple[int, torch.Tensor]]:
        try:
            for i, value in enumerate(self._flat.values if self._receives else ()):
                if is_tensor(value) and i not in self._sharded:
                    yield i, value.detach().cpu() if self._order.cpu_offload else value.detach()
            while self._transfers:
                yield from self._finish_next()
        finally:
            while self._transfers:  # the caller left early; other ranks still need the data of this one
                self._finish_next()
            for transport in self._transports.values():
                transport.end()
            self._groups.busy = False

    def _begin_next(self) -> None:
        if not self._left:
            return
        bucket = self._left.popleft()
        transport = self._transport(bucket.device)
        with transport.on_stream():
            for leaf, _ in bucket.items if self._receives else ():
                if leaf not in self._built:
                    self._built[leaf] = Built.of(leaf, self._empty(leaf))
        with as_gather_error():
            self._transfers.append((bucket, transport.begin(bucket, self._built, self._started % _TURNS)))
        self._started += 1

    def _finish_next(self) -> list[tuple[int, torch.Tensor]]:
        bucket, transfer = self._transfers.popleft()
        try:
            with as_gather_error():
                transfer.finish()
            self._begin_next()
        except BaseException:
            self._transfers.clear()  # the gather cannot continue
            raise
        transport = self._transport(bucket.device)
        found = []
        for leaf in bucket.last if self._receives else ():
            tensor = self._built.pop(leaf).tensor
            transport.hand_over(tensor)
            found += [(one.index, tensor) for one in (leaf, *self._ties.get(leaf, ()))]
        return found

    def _transport(self, device: torch.device) -> Transport:
        if device not in self._transports:
            if device.type == "cpu" and not self._order.collective:
                self._transports[device] = Direct(self._recipients, _TURNS)
            else:
                self._transports[device] = AllGather(self._recipients, _TURNS, device, to_host=self._order.cpu_offload)
        return self._transports[device]

    def _empty(self, leaf: Leaf) -> torch.Tensor:
        tensor = torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu" if self._order.cpu_offload else leaf.device)
        if tensor.device.type == "cpu" and tensor.nbytes >= HUGE_NBYTES:
            advise_huge(tensor.data_ptr(), tensor.nbytes)
        return tensor
