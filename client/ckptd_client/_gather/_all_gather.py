"""Buckets of tensors on devices: one all-gather of a flat buffer each, on a stream beside that of the training."""

import contextlib
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ckptd_client._gather._buckets import Bucket
from ckptd_client._gather._lanes import Buffers, Flight, Party, Results, as_bytes, copy, sources, targets


class AllGather:
    """The lane of one device; of the CPU too, without a stream, which is how it is tested where no device is.

    The stream waits for what was queued on the current one when the lane was made, and the current one never waits for
    the stream but for what it is handed (hand_over). to_host: what comes is copied to pinned memory, and from there
    into tensors of the CPU; only the host waits for that.
    """

    def __init__(self, party: Party, turns: int, device: torch.device, *, to_host: bool) -> None:
        self._party, self._device = party, device
        self._outgoing = Buffers(turns, device=device)
        self._incoming = Buffers(turns, device=device)
        self._stream = _stream(device)
        self._host = Buffers(turns, pin_memory=True) if to_host and self._stream is not None else None
        self._landed: torch.cuda.Event | None = None  # after the last bucket that landed
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(device))

    @property
    def nbytes(self) -> int:
        """Of all buffers, those of the host included."""
        return sum(b.nbytes for b in (self._outgoing, self._incoming, self._host) if b is not None)

    def beside(self) -> AbstractContextManager[Any]:
        """A context in which work is queued on the lane's stream."""
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def hand_over(self, tensor: torch.Tensor) -> None:
        """The current stream may use a tensor of the device that was built here; it waits, the host does not."""
        if self._stream is not None and tensor.is_cuda:
            self.end()
            tensor.record_stream(torch.cuda.current_stream(tensor.device))

    def end(self) -> None:
        """The current stream may write to the state again: it waits until all that landed was read."""
        if self._landed is not None:
            torch.cuda.current_stream(self._device).wait_event(self._landed)

    def begin(self, bucket: Bucket, results: Results, turn: int) -> Flight:
        """See Lane."""
        me, members = bucket.members.index(self._party.rank), len(bucket.members)
        width = sum(max(piece.counts) for _, piece in bucket.items)
        nbytes = width * bucket.dtype.itemsize
        with self.beside():
            self._outgoing.clear(turn, nbytes)
            self._incoming.clear(turn, nbytes * members)
            outgoing = self._outgoing.take(turn, width, bucket.dtype)
            incoming = self._incoming.take(turn, width * members, bucket.dtype)
            parts = sources(bucket.items, me)
            if self._stream is not None:
                for part in parts:  # whoever frees one before it is read must not get its memory
                    part.record_stream(self._stream)
            copy(_slots(outgoing, bucket, me), parts)
            work = None
            if members == 1:
                incoming = outgoing
            elif nbytes:
                group = self._party.groups.of(bucket.members)
                work = dist.all_gather_into_tensor(as_bytes(incoming), as_bytes(outgoing), group, async_op=True)
        return _CollectiveFlight(self, bucket, results, turn, work, incoming)

    def land(self, flight: "_CollectiveFlight") -> None:
        """See Flight."""
        bucket, incoming = flight.bucket, flight.incoming
        with self.beside():
            if flight.work is not None:
                flight.work.wait()  # of NCCL: the stream waits, not the host
            if self._stream is not None:
                self._landed = self._recorded(self._stream)
            if not self._party.wanted:
                return
            if self._host is not None and self._stream is not None:
                self._host.clear(flight.turn, incoming.nbytes)
                host = self._host.take(flight.turn, incoming.numel(), bucket.dtype)
                host.copy_(incoming, non_blocking=True)
                self._recorded(self._stream).synchronize()
                incoming = host
            for member, lane in enumerate(incoming.view(len(bucket.members), -1)):
                copy(targets(bucket.items, member, flight.results), _slots(lane, bucket, member))
            if self._stream is not None:
                self._landed = self._recorded(self._stream)

    @staticmethod
    def _recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
        return event


def _stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


@dataclass(slots=True)
class _CollectiveFlight:
    lane: AllGather
    bucket: Bucket
    results: Results
    turn: int
    work: Any
    incoming: torch.Tensor

    def land(self) -> None:
        self.lane.land(self)


def _slots(buffer: torch.Tensor, bucket: Bucket, member: int) -> list[torch.Tensor]:
    """A member's regions in its part of a buffer, where every piece has room for the largest of all members."""
    found = []
    room = buffer.split_with_sizes([max(piece.counts) for _, piece in bucket.items])
    for (_, piece), part in zip(bucket.items, room, strict=True):
        at = 0
        for region in piece.regions[member]:
            found.append(part[at : at + region.numel].view(region.box.sizes))
            at += region.numel
    return found
