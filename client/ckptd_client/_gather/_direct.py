"""Buckets of CPU tensors: from each rank straight to each that wants them."""

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ckptd_client._gather._buckets import Bucket
from ckptd_client._gather._lanes import (
    LINE,
    Buffers,
    Flight,
    Items,
    Party,
    Results,
    as_bytes,
    copy,
    in_place,
    sources,
    split,
    targets,
)

_ALONE_NBYTES = 256 << 10  # of a piece that is worth a message of its own


class Direct:
    """Between CPUs: no padding, no rank in between, and nothing to those that get nothing.

    A large piece is sent from the state's own memory and received in the tensor's, and copied nowhere else. Smaller
    ones travel in one message. (gloo's all-gather makes and fills memory for its whole result in every call.)
    """

    def __init__(self, party: Party, turns: int) -> None:
        self._party = party
        self._buffers = Buffers(turns)

    @property
    def nbytes(self) -> int:
        """Of all buffers."""
        return self._buffers.nbytes

    def beside(self) -> AbstractContextManager[Any]:
        """See Lane."""
        return contextlib.nullcontext()

    def hand_over(self, tensor: torch.Tensor) -> None:
        """See Lane."""

    def end(self) -> None:
        """See Lane."""

    def begin(self, bucket: Bucket, results: Results, turn: int) -> Flight:
        """See Lane."""
        messages = list(_messages(bucket))
        room = bucket.count * bucket.dtype.itemsize + len(messages) * len(bucket.members) * LINE
        self._buffers.clear(turn, room)
        flight = _DirectFlight(self._party, bucket, self._buffers, turn)
        for items in messages if self._party.wanted else ():
            flight.receive(items, results)
        for items in messages:
            flight.send(items)
        flight.keep(results)
        return flight


@dataclass(frozen=True, slots=True)
class _Arrival:
    """What comes from one rank in one message."""

    work: Any
    into: list[torch.Tensor]  # where it is copied to, if it does not come there by itself
    out_of: list[torch.Tensor]


class _DirectFlight:
    """A bucket's messages."""

    def __init__(self, party: Party, bucket: Bucket, buffers: Buffers, turn: int) -> None:
        self._party, self._bucket, self._buffers, self._turn = party, bucket, buffers, turn
        self._me = bucket.members.index(party.rank)
        self._arrivals: list[_Arrival] = []
        self._departures: list[tuple[Any, torch.Tensor]] = []  # with what they read

    def receive(self, items: Items, results: Results) -> None:
        """Has what the others send in one message come."""
        for member in self._others(1):
            count = sum(piece.counts[member] for _, piece in items)
            if count == 0:
                continue
            into = targets(items, member, results)
            buffer, out_of = in_place(into), []
            if buffer is None:
                buffer = self._buffers.take(self._turn, count, self._bucket.dtype)
                out_of = split(buffer, items, member)
            work = dist.irecv(as_bytes(buffer), self._bucket.members[member], group=self._party.groups.all)
            self._arrivals.append(_Arrival(work, into if out_of else [], out_of))

    def send(self, items: Items) -> None:
        """Sends what this rank has of one message."""
        wanting = [rank for rank in map(self._bucket.members.__getitem__, self._others(-1)) if rank in self._party.to]
        count = sum(piece.counts[self._me] for _, piece in items)
        if count == 0 or not wanting:
            return
        parts = sources(items, self._me)
        buffer = in_place(parts)
        if buffer is None:
            buffer = self._buffers.take(self._turn, count, self._bucket.dtype)
            copy(split(buffer, items, self._me), parts)
        for rank in wanting:
            self._departures.append((dist.isend(as_bytes(buffer), rank, group=self._party.groups.all), buffer))

    def keep(self, results: Results) -> None:
        """Copies this rank's own part, while the others' is on its way."""
        if self._party.wanted:
            copy(targets(self._bucket.items, self._me, results), sources(self._bucket.items, self._me))

    def land(self) -> None:
        """See Flight."""
        for arrival in self._arrivals:
            arrival.work.wait()
            copy(arrival.into, arrival.out_of)
        for work, _ in self._departures:
            work.wait()

    def _others(self, step: int) -> Iterator[int]:
        """All members but this one, in an order that differs from rank to rank."""
        members = len(self._bucket.members)
        return ((self._me + step * distance) % members for distance in range(1, members))


def _messages(bucket: Bucket) -> Iterator[Items]:
    """What of a bucket travels in one message: large pieces alone, the others together."""
    packed = []
    for item in bucket.items:
        if max(item[1].counts) * bucket.dtype.itemsize >= _ALONE_NBYTES:
            yield [item]
        else:
            packed.append(item)
    if packed:
        yield packed
