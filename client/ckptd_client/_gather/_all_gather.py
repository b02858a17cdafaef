"""The transport for tensors on devices: one all-gather of a flat buffer per bucket, on a stream of its own."""

import contextlib
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ckptd_client._gather._buckets import Bucket
from ckptd_client._gather._transports import Buffers, Recipients, Results, Transfer, as_bytes, copy, sources, targets


class AllGather:
    """The transport of one device; also of the CPU, without a stream, for tests without a device.

    The stream waits for the work that the current stream had when the transport was created. The current stream waits
    for the transport's stream only before it uses a tensor (hand_over). to_host: copies results to pinned memory, and
    from there into CPU tensors; only the host waits for that.
    """

    def __init__(self, recipients: Recipients, turns: int, device: torch.device, *, to_host: bool) -> None:
        self._recipients, self._device = recipients, device
        self._outgoing = Buffers(turns, device=device)
        self._incoming = Buffers(turns, device=device)
        self._stream = _stream(device)
        self._host = Buffers(turns, pin_memory=True) if to_host and self._stream is not None else None
        self._finished: torch.cuda.Event | None = None  # after the last bucket that finished
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(device))

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, with those of the host."""
        return sum(b.nbytes for b in (self._outgoing, self._incoming, self._host) if b is not None)

    def on_stream(self) -> AbstractContextManager[Any]:
        """A context in which work is queued on the transport's stream."""
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def hand_over(self, tensor: torch.Tensor) -> None:
        """Lets the current stream use a device tensor that was built here: that stream waits, the host does not."""
        if self._stream is not None and tensor.is_cuda:
            self.end()
            tensor.record_stream(torch.cuda.current_stream(tensor.device))

    def end(self) -> None:
        """Lets the current stream write to the state again: it waits until finished buckets have been read."""
        if self._finished is not None:
            torch.cuda.current_stream(self._device).wait_event(self._finished)

    def begin(self, bucket: Bucket, results: Results, turn: int) -> Transfer:
        """See Transport."""
        me, members = bucket.members.index(self._recipients.rank), len(bucket.members)
        width = sum(max(piece.counts) for _, piece in bucket.items)
        nbytes = width * bucket.dtype.itemsize
        with self.on_stream():
            self._outgoing.clear(turn, nbytes)
            self._incoming.clear(turn, nbytes * members)
            outgoing = self._outgoing.take(turn, width, bucket.dtype)
            incoming = self._incoming.take(turn, width * members, bucket.dtype)
            parts = sources(bucket.items, me)
            if self._stream is not None:
                for part in parts:  # if its owner frees it before it is read, its memory must not be reused
                    part.record_stream(self._stream)
            copy(_slots(outgoing, bucket, me), parts)
            work = None
            if members == 1:
                incoming = outgoing
            elif nbytes:
                group = self._recipients.groups.of(bucket.members)
                work = dist.all_gather_into_tensor(as_bytes(incoming), as_bytes(outgoing), group, async_op=True)
        return _CollectiveTransfer(self, bucket, results, turn, work, incoming)

    def finish(self, transfer: "_CollectiveTransfer") -> None:
        """See Transfer."""
        bucket, incoming = transfer.bucket, transfer.incoming
        with self.on_stream():
            if transfer.work is not None:
                transfer.work.wait()  # with NCCL the stream waits, not the host
            if self._stream is not None:
                self._finished = self._recorded(self._stream)
            if not self._recipients.receives:
                return
            if self._host is not None and self._stream is not None:
                self._host.clear(transfer.turn, incoming.nbytes)
                host = self._host.take(transfer.turn, incoming.numel(), bucket.dtype)
                host.copy_(incoming, non_blocking=True)
                self._recorded(self._stream).synchronize()
                incoming = host
            for member, row in enumerate(incoming.view(len(bucket.members), -1)):
                copy(targets(bucket.items, member, transfer.results), _slots(row, bucket, member))
            if self._stream is not None:
                self._finished = self._recorded(self._stream)

    @staticmethod
    def _recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
        return event


def _stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


@dataclass(slots=True)
class _CollectiveTransfer:
    transport: AllGather
    bucket: Bucket
    results: Results
    turn: int
    work: Any
    incoming: torch.Tensor

    def finish(self) -> None:
        self.transport.finish(self)


def _slots(buffer: torch.Tensor, bucket: Bucket, member: int) -> list[torch.Tensor]:
    """A member's regions in its part of a buffer, in which each piece has room for the largest member."""
    found = []
    room = buffer.split_with_sizes([max(piece.counts) for _, piece in bucket.items])
    for (_, piece), part in zip(bucket.items, room, strict=True):
        at = 0
        for region in piece.regions[member]:
            found.append(part[at : at + region.numel].view(region.box.sizes))
            at += region.numel
    return found
