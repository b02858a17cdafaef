"""The transport for CPU tensors: each rank sends its parts directly to each rank that receives them."""

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ckptd_client._gather._buckets import Bucket
from ckptd_client._gather._transports import (
    LINE,
    Buffers,
    Items,
    Recipients,
    Results,
    Transfer,
    as_bytes,
    copy,
    in_place,
    sources,
    split,
    targets,
)

_ALONE_NBYTES = 256 << 10  # larger pieces get a message of their own


class Direct:
    """Point-to-point messages between CPUs: no padding, no relay, and no message to a rank that receives nothing.

    A large piece goes from the state's own memory to the new tensor's memory without another copy. One message carries
    all smaller pieces. (gloo's all-gather allocates and fills memory for its whole result in every call.)
    """

    def __init__(self, recipients: Recipients, turns: int) -> None:
        self._recipients = recipients
        self._buffers = Buffers(turns)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return self._buffers.nbytes

    def on_stream(self) -> AbstractContextManager[Any]:
        """See Transport."""
        return contextlib.nullcontext()

    def hand_over(self, tensor: torch.Tensor) -> None:
        """See Transport."""

    def end(self) -> None:
        """See Transport."""

    def begin(self, bucket: Bucket, results: Results, turn: int) -> Transfer:
        """See Transport."""
        messages = list(_messages(bucket))
        room = bucket.count * bucket.dtype.itemsize + len(messages) * len(bucket.members) * LINE
        self._buffers.clear(turn, room)
        transfer = _DirectTransfer(self._recipients, bucket, self._buffers, turn)
        for items in messages if self._recipients.receives else ():
            transfer.receive(items, results)
        for items in messages:
            transfer.send(items)
        transfer.keep(results)
        return transfer


@dataclass(frozen=True, slots=True)
class _Arrival:
    """A message from one rank."""

    work: Any
    into: list[torch.Tensor]  # destinations of a copy, unless the message arrives there
    out_of: list[torch.Tensor]


class _DirectTransfer:
    """The messages of a bucket."""

    def __init__(self, recipients: Recipients, bucket: Bucket, buffers: Buffers, turn: int) -> None:
        self._recipients, self._bucket, self._buffers, self._turn = recipients, bucket, buffers, turn
        self._me = bucket.members.index(recipients.rank)
        self._arrivals: list[_Arrival] = []
        self._departures: list[tuple[Any, torch.Tensor]] = []  # with the memory that they read

    def receive(self, items: Items, results: Results) -> None:
        """Starts to receive one message from each of the others."""
        for member in self._others(1):
            count = sum(piece.counts[member] for _, piece in items)
            if count == 0:
                continue
            into = targets(items, member, results)
            buffer, out_of = in_place(into), []
            if buffer is None:
                buffer = self._buffers.take(self._turn, count, self._bucket.dtype)
                out_of = split(buffer, items, member)
            work = dist.irecv(as_bytes(buffer), self._bucket.members[member], group=self._recipients.groups.all)
            self._arrivals.append(_Arrival(work, into if out_of else [], out_of))

    def send(self, items: Items) -> None:
        """Starts to send this rank's parts of one message."""
        others = [self._bucket.members[member] for member in self._others(-1)]
        receivers = [rank for rank in others if rank in self._recipients.to]
        count = sum(piece.counts[self._me] for _, piece in items)
        if count == 0 or not receivers:
            return
        parts = sources(items, self._me)
        buffer = in_place(parts)
        if buffer is None:
            buffer = self._buffers.take(self._turn, count, self._bucket.dtype)
            copy(split(buffer, items, self._me), parts)
        for rank in receivers:
            self._departures.append((dist.isend(as_bytes(buffer), rank, group=self._recipients.groups.all), buffer))

    def keep(self, results: Results) -> None:
        """Copies this rank's own part, during the transfer of the others."""
        if self._recipients.receives:
            copy(targets(self._bucket.items, self._me, results), sources(self._bucket.items, self._me))

    def finish(self) -> None:
        """See Transfer."""
        for arrival in self._arrivals:
            arrival.work.wait()
            copy(arrival.into, arrival.out_of)
        for work, _ in self._departures:
            work.wait()

    def _others(self, step: int) -> Iterator[int]:
        """All other members, in an order that differs from rank to rank."""
        members = len(self._bucket.members)
        return ((self._me + step * distance) % members for distance in range(1, members))


def _messages(bucket: Bucket) -> Iterator[Items]:
    """The messages of a bucket: one for each large piece, one for all others."""
    packed = []
    for item in bucket.items:
        if max(item[1].counts) * bucket.dtype.itemsize >= _ALONE_NBYTES:
            yield [item]
        else:
            packed.append(item)
    if packed:
        yield packed
