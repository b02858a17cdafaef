"""This rank's slice of the bytes of replicated tensors. Ranks exchange no message for it.

A set of replicas is any ranks of the job. Its tensors form one stream of bytes, in the order of the state. Replica k of
n saves the k-th of n slices, cut at rows of tensors: so all save equally much, a tensor is cut only where two slices
meet, and each replica computes its slice from its own state. The daemons check that the replicas' states are equal,
from the attestation of each replica: its cut, and a digest of the bytes (ckptd.shared.format.replica_attestations).
"""

import functools
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec
import torch
import xxhash

from ckptd.shared.format.rank_members import MAX_MEMBERS_NBYTES, members_of
from ckptd.shared.format.replica_attestations import (
    FIRST,
    MAX_ATTESTATIONS,
    MAX_SHARED_PARTS,
    SUM_NBYTES,
    WINDOW,
    Attestation,
)
from ckptd_client._local.copy_engines import DeviceCopy, by_engine, flat_bytes, parts_of
from ckptd_client._state.replica_digests import WholeDigest
from ckptd_client._state.sampling import Sample
from ckptd_client._state.tensors import local_of, locals_of
from ckptd_client._state.tree import Flat

MAX_STREAMS = MAX_ATTESTATIONS - 1  # the last one is for tensors in no stream
WINDOWS = 256  # parts of a stream; each save compares one
_SAMPLE_NBYTES = 4 << 30  # compared at most in one save
_ON_HOST_NBYTES = 32 << 20  # copied from a device at a time
_ALIGN = 16  # bytes: alignment for elements of any dtype


_T_co = TypeVar("_T_co", covariant=True)


class ByPosition(Protocol[_T_co]):
    """A list, or a part of one."""

    def __getitem__(self, position: int, /) -> _T_co:
        """The item at a position."""


class Rows(NamedTuple):
    """Rows first to stop of a tensor, along the first dimension with more than one row."""

    dim: int
    first: int
    stop: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The rows, sharing the tensor's memory."""
        return tensor.narrow(self.dim, self.first, self.stop - self.first) if tensor.dim() else tensor


@dataclass(frozen=True, slots=True)
class Stream:
    """The tensors of one set of replicas, one after the other."""

    ranks: tuple[int, ...]
    members: bytes  # the same
    positions: tuple[int, ...]  # indexes among the values of the state
    names: tuple[str, ...]  # of the tensors
    shapes: tuple[tuple[int, ...], ...]  # of this rank's local tensors
    starts: tuple[int, ...]  # in the stream
    nbytes: int
    cut: bytes

    @property
    def parts(self) -> int:
        """The number of saves over which the first comparison of it is spread, so that none takes long."""
        return max(1, -(-self.nbytes // _SAMPLE_NBYTES))

    def runs(self, streams: int) -> list[int]:
        """The number of tensors in each part with a digest of its own, if the rank has so many streams."""
        count = len(self.positions)
        parts = min(count, max(1, MAX_SHARED_PARTS // streams))
        return [(i + 1) * count // parts - i * count // parts for i in range(parts)]

    def names_in(self, parts: Sequence[int], streams: Sequence["Stream"]) -> list[str]:
        """Keys of the tensors of these parts."""
        ends = list(accumulate(self.runs(len(streams)), initial=0))
        return [name for i in parts if i + 1 < len(ends) for name in self.names[ends[i] : ends[i + 1]]]

    def slice_of(self, rank: int) -> dict[int, Rows]:
        """The rank's slice: rows by position; it has nothing of other positions."""
        k, n = self.ranks.index(rank), len(self.ranks)
        return dict(self.between(k * self.nbytes // n, (k + 1) * self.nbytes // n))

    def between(self, first: int, stop: int) -> Iterator[tuple[int, Rows]]:
        """Rows whose first byte is in this range."""
        i = max(0, bisect_right(self.starts, first) - 1)
        while i < len(self.starts) and self.starts[i] < stop:
            end = self.starts[i + 1] if i + 1 < len(self.starts) else self.nbytes
            dim = next((d for d, size in enumerate(self.shapes[i]) if size > 1), 0)
            rows = self.shapes[i][dim] if self.shapes[i] else 1
            step = (end - self.starts[i]) // rows
            lo = min(rows, max(0, -(-(first - self.starts[i]) // step)))
            hi = min(rows, -(-(stop - self.starts[i]) // step))
            if lo < hi:
                yield self.positions[i], Rows(dim, lo, hi)
            i += 1


def streams_of(replicas: Mapping[int, tuple[int, ...]], flat: Flat, skipped: set[int]) -> tuple[Stream, ...]:
    """One stream for each set of replicas. replicas: ranks by position; skipped: positions that are saved otherwise.

    If there are many sets, or large ones without any order, only those that a seal has room for have a stream.
    """
    sets: dict[tuple[int, ...], list[int]] = {}
    for position, ranks in replicas.items():
        if position not in skipped and local_of(flat.values[position]).numel():
            sets.setdefault(ranks, []).append(position)
    return tuple(stream_of(ranks, sets[ranks], flat.names, flat.values) for ranks in fitting(sorted(sets)))


def fitting(sets: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The sets of a rank that its seal has room for, the first ones first."""
    found: list[tuple[int, ...]] = []
    left = MAX_MEMBERS_NBYTES
    for ranks in sets:
        nbytes = len(members_of(ranks))
        if len(found) < MAX_STREAMS and nbytes <= left:
            found.append(ranks)
            left -= nbytes
    return found


def slices_of(streams: Sequence[Stream], rank: int) -> tuple[dict[int, Rows], set[int]]:
    """The rank's rows of all streams by position, and positions of tensors of which it saves nothing."""
    own = {position: rows for stream in streams for position, rows in stream.slice_of(rank).items()}
    return own, {position for stream in streams for position in stream.positions} - set(own)


def stream_of(
    ranks: tuple[int, ...], positions: Sequence[int], names: ByPosition[str], values: ByPosition[Any]
) -> Stream:
    """The stream of one set of replicas. positions: of its tensors, which have elements."""
    cut = xxhash.xxh3_128()
    shapes, starts, at = [], [], 0
    for position in positions:
        local = local_of(values[position])
        shape = tuple(local.shape)
        cut.update(repr((names[position], str(local.dtype), shape)).encode())
        shapes.append(shape)
        starts.append(at)
        at += math.prod(shape) * local.itemsize
    found_names = tuple(names[position] for position in positions)
    return Stream(
        ranks, members_of(ranks), tuple(positions), found_names, tuple(shapes), tuple(starts), at,
        cut.digest()[:SUM_NBYTES],
    )  # fmt: skip


# --- attestations


def attestation_of(
    streams: Sequence[Stream], values: ByPosition[Any], sample: Sample
) -> Callable[[], tuple[Attestation, ...]]:
    """This rank's attestation of a sample of the current values. The call that it returns blocks for devices.

    sample: not whole.
    """
    contents = [_content(stream, values, sample.turn, is_first=stream.cut not in sample.checked) for stream in streams]
    attestations: list[Attestation] = []

    def attest() -> tuple[Attestation, ...]:
        for stream, content in zip(streams[len(attestations) :], contents[len(attestations) :], strict=True):
            attestations.append(Attestation(stream.members, stream.cut, content()))
        return tuple(attestations)

    return attest


def digests_of(streams: Sequence[Stream], values: ByPosition[Any]) -> list[WholeDigest]:
    """A digest of all bytes of each stream. Take it before the values change."""
    return [
        WholeDigest(stream.names, locals_of([values[i] for i in stream.positions]), stream.runs(len(streams)))
        for stream in streams
    ]


def attestation_of_digests(
    streams: Sequence[Stream], wholes: Sequence[WholeDigest]
) -> Callable[[], tuple[Attestation, ...]]:
    """This rank's attestation of all bytes. The call that it returns takes the digests not taken yet, and blocks."""

    @functools.cache
    def attest() -> tuple[Attestation, ...]:
        digests = [whole.digest() for whole in wholes]
        return tuple(
            Attestation(stream.members, stream.cut, found.content, found.parts)
            for stream, found in zip(streams, digests, strict=True)
        )

    return attest


def as_not_binding(attestations: Sequence[Attestation]) -> tuple[Attestation, ...]:
    """The same attestations from a rank that saves all that it holds, or what a planner assigned to it."""
    return tuple(msgspec.structs.replace(attestation, only_told=True) for attestation in attestations)


def _content(stream: Stream, values: ByPosition[Any], turn: int, *, is_first: bool) -> Callable[[], bytes]:
    parts = stream.parts if is_first else WINDOWS
    part = turn % parts
    first, stop = part * stream.nbytes // parts, (part + 1) * stream.nbytes // parts
    pieces = [rows.of(local_of(values[position]).detach()) for position, rows in stream.between(first, stop)]
    taken = _digest_now(pieces) if is_first or not by_engine(pieces) else _digest_when_copied(pieces)
    return lambda: (FIRST if is_first else WINDOW) + taken()[: SUM_NBYTES - 1]


def _digest_now(pieces: Sequence[torch.Tensor]) -> Callable[[], bytes]:
    """The digest of all bytes, taken now. Copies a device's bytes to the host in small parts."""
    found = xxhash.xxh3_128()
    for piece in pieces:
        if not by_engine([piece]):
            found.update(flat_bytes(piece.cpu()).numpy().data)
            continue
        for part, _ in parts_of(piece, piece, _ON_HOST_NBYTES):
            _HostCopy([part]).digested(found)
    digest = found.digest()
    return lambda: digest


def _digest_when_copied(pieces: Sequence[torch.Tensor]) -> Callable[[], bytes]:
    """The digest of all bytes. Starts the copies from devices; the call that it returns blocks for them."""
    way = _HostCopy(pieces)
    return lambda: way.digested(xxhash.xxh3_128()).digest()


class _HostCopy:
    """Copies tensors into memory of the host, one after the other. Keeps them until the copies end."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = list(tensors)
        self._copy = DeviceCopy(self._tensors)
        self._memory = self._copy.engines[0].scratch(sum(-(-tensor.nbytes // _ALIGN) * _ALIGN for tensor in tensors))
        starts = accumulate((-(-tensor.nbytes // _ALIGN) * _ALIGN for tensor in tensors), initial=0)
        self._places = [self._memory[at : at + t.nbytes] for at, t in zip(starts, tensors, strict=False)]
        views = [place.view(t.dtype).view(t.shape) for place, t in zip(self._places, tensors, strict=True)]
        self._copy.begin(views, self._tensors)
        with torch.no_grad():
            for i in self._copy.others:
                views[i].copy_(self._tensors[i])

    def digested(self, found: "xxhash.xxh3_128") -> "xxhash.xxh3_128":
        """Feeds all bytes to the hash and returns it. Blocks until the copies end."""
        self._copy.wait()
        self._tensors = []
        for place in self._places:
            found.update(place.numpy().data)
        return found
