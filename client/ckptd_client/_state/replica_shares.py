"""This rank's share of the bytes of tensors that other ranks hold too. No word is exchanged for it.

The tensors of one set of replicas are taken as one stream of bytes, in the order of the state. Replica k of n saves the
k-th n-th of it, cut at rows of tensors: so all save equally much, a tensor is cut only where two shares meet, and each
replica knows its own share from its own state. That the replicas' states are alike is for the daemons to find out, from
what each says of its cut and of the bytes (ckptd.shared.format.replica_shares).
"""

import functools
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec
import torch
import xxhash

from ckptd.shared.format.replica_shares import FIRST, MAX_SHARED_PARTS, MAX_SHARES, SUM_NBYTES, WINDOW, Share
from ckptd_client._local.copy_engines import Fetch, divided, flat_bytes, parts_of
from ckptd_client._state.looks import Look
from ckptd_client._state.replica_digests import WholeDigest
from ckptd_client._state.tensors import local_of, locals_of
from ckptd_client._state.tree import Flat

MAX_STREAMS = MAX_SHARES - 1  # the last word is of what no stream has
WINDOWS = 256  # parts of the stream, of which each save looks at one
_LOOKED_NBYTES = 4 << 30  # at most so much in one save
_ON_HOST_NBYTES = 32 << 20  # of a device, at a time
_APART = 16  # bytes: where elements of any dtype may begin


_T_co = TypeVar("_T_co", covariant=True)


class ByPosition(Protocol[_T_co]):
    """A list, or a part of one."""

    def __getitem__(self, position: int, /) -> _T_co:
        """What is there."""


class Rows(NamedTuple):
    """Rows first to stop of a tensor, along the first dimension that has more than one."""

    dim: int
    first: int
    stop: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The rows, sharing the tensor's memory."""
        return tensor.narrow(self.dim, self.first, self.stop - self.first) if tensor.dim() else tensor


@dataclass(frozen=True, slots=True)
class Stream:
    """The tensors of one set of replicas end to end."""

    ranks: tuple[int, ...]
    positions: tuple[int, ...]  # among the values of the state
    names: tuple[str, ...]  # of the tensors
    shapes: tuple[tuple[int, ...], ...]  # of this rank's local tensors
    starts: tuple[int, ...]  # in the stream
    nbytes: int
    cut: bytes

    @property
    def parts(self) -> int:
        """Into which the first look at it is divided, one for each save, so that none is held up for long."""
        return max(1, -(-self.nbytes // _LOOKED_NBYTES))

    @property
    def sum(self) -> bytes:
        """Digest of the ranks' numbers."""
        return xxhash.xxh3_128(repr(self.ranks).encode()).digest()[:SUM_NBYTES]

    def runs(self, streams: int) -> list[int]:
        """How many tensors each part has of which a digest is told, where the rank has so many streams."""
        count = len(self.positions)
        parts = min(count, max(1, MAX_SHARED_PARTS // streams))
        return [(i + 1) * count // parts - i * count // parts for i in range(parts)]

    def names_in(self, parts: Sequence[int], streams: Sequence["Stream"]) -> list[str]:
        """Keys of the tensors of these parts."""
        ends = list(accumulate(self.runs(len(streams)), initial=0))
        return [name for i in parts if i + 1 < len(ends) for name in self.names[ends[i] : ends[i + 1]]]

    def share(self, rank: int) -> dict[int, Rows]:
        """What the rank saves: rows by position; positions that are not there are others'."""
        k, n = self.ranks.index(rank), len(self.ranks)
        return dict(self.between(k * self.nbytes // n, (k + 1) * self.nbytes // n))

    def between(self, first: int, stop: int) -> Iterator[tuple[int, Rows]]:
        """Rows of which the first byte lies there."""
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

    Of many sets only the first have one.
    """
    sets: dict[tuple[int, ...], list[int]] = {}
    for position, ranks in replicas.items():
        if position not in skipped and local_of(flat.values[position]).numel():
            sets.setdefault(ranks, []).append(position)
    return tuple(stream_of(ranks, sets[ranks], flat.names, flat.values) for ranks in sorted(sets)[:MAX_STREAMS])


def shares_of(streams: Sequence[Stream], rank: int) -> tuple[dict[int, Rows], set[int]]:
    """The rank's rows of all streams by position, and positions of tensors of which it has none."""
    share = {position: rows for stream in streams for position, rows in stream.share(rank).items()}
    return share, {position for stream in streams for position in stream.positions} - set(share)


def stream_of(
    ranks: tuple[int, ...], positions: Sequence[int], names: ByPosition[str], values: ByPosition[Any]
) -> Stream:
    """The tensors at these positions, that have elements, as one set of replicas holds them."""
    cut = xxhash.xxh3_128()
    shapes, starts, at = [], [], 0
    for position in positions:
        local = local_of(values[position])
        shape = tuple(local.shape)
        cut.update(repr((names[position], str(local.dtype), shape)).encode())
        shapes.append(shape)
        starts.append(at)
        at += math.prod(shape) * local.itemsize
    told = tuple(names[position] for position in positions)
    return Stream(ranks, tuple(positions), told, tuple(shapes), tuple(starts), at, cut.digest()[:SUM_NBYTES])


# --- what is said of it


def said_of(streams: Sequence[Stream], values: ByPosition[Any], look: Look) -> Callable[[], tuple[Share, ...]]:
    """This rank's word of each stream in this save, as the values are now. A call blocks until devices sent theirs.

    look: one that is not whole.
    """
    contents = [_content(stream, values, look.turn, first_look=stream.cut not in look.checked) for stream in streams]
    shares: list[Share] = []

    def said() -> tuple[Share, ...]:
        for stream, content in zip(streams[len(shares) :], contents[len(shares) :], strict=True):
            shares.append(Share(stream.sum, len(stream.ranks), stream.cut, content()))
        return tuple(shares)

    return said


def wholes_of(streams: Sequence[Stream], values: ByPosition[Any]) -> list[WholeDigest]:
    """Of all bytes of each stream. To be taken while the values are what is saved."""
    return [
        WholeDigest(stream.names, locals_of([values[i] for i in stream.positions]), stream.runs(len(streams)))
        for stream in streams
    ]


def said_of_wholes(streams: Sequence[Stream], wholes: Sequence[WholeDigest]) -> Callable[[], tuple[Share, ...]]:
    """This rank's word of each stream, by the digests of them. A call takes those that are not taken yet."""

    @functools.cache
    def said() -> tuple[Share, ...]:
        digests = [whole.digest() for whole in wholes]
        return tuple(
            Share(stream.sum, len(stream.ranks), stream.cut, found.content, found.parts)
            for stream, found in zip(streams, digests, strict=True)
        )

    return said


def as_told(shares: Sequence[Share]) -> tuple[Share, ...]:
    """The same words from a rank that saves all of its own, or what a planner has dealt it."""
    return tuple(msgspec.structs.replace(share, only_told=True) for share in shares)


def _content(stream: Stream, values: ByPosition[Any], turn: int, *, first_look: bool) -> Callable[[], bytes]:
    parts = stream.parts if first_look else WINDOWS
    part = turn % parts
    first, stop = part * stream.nbytes // parts, (part + 1) * stream.nbytes // parts
    pieces = [rows.of(local_of(values[position]).detach()) for position, rows in stream.between(first, stop)]
    taken = _at_once(pieces) if first_look or not divided(pieces) else _on_the_way(pieces)
    return lambda: (FIRST if first_look else WINDOW) + taken()[: SUM_NBYTES - 1]


def _at_once(pieces: Sequence[torch.Tensor]) -> Callable[[], bytes]:
    """The digest of all bytes, taken now. Of a device it has only a little on the host at a time."""
    found = xxhash.xxh3_128()
    for piece in pieces:
        if not divided([piece]):
            found.update(flat_bytes(piece.cpu()).numpy().data)
            continue
        for part, _ in parts_of(piece, piece, _ON_HOST_NBYTES):
            _Way([part]).digested(found)
    digest = found.digest()
    return lambda: digest


def _on_the_way(pieces: Sequence[torch.Tensor]) -> Callable[[], bytes]:
    """The digest, of what devices begin to send now."""
    way = _Way(pieces)
    return lambda: way.digested(xxhash.xxh3_128()).digest()


class _Way:
    """Tensors, some of devices, that are copied into memory of the host, end to end. Keeps them until they arrived."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = list(tensors)
        self._fetch = Fetch(self._tensors)
        self._memory = self._fetch.engines[0].scratch(sum(-(-tensor.nbytes // _APART) * _APART for tensor in tensors))
        starts = accumulate((-(-tensor.nbytes // _APART) * _APART for tensor in tensors), initial=0)
        self._places = [self._memory[at : at + t.nbytes] for at, t in zip(starts, tensors, strict=False)]
        views = [place.view(t.dtype).view(t.shape) for place, t in zip(self._places, tensors, strict=True)]
        self._fetch.begin(views, self._tensors)
        with torch.no_grad():
            for i in self._fetch.others:
                views[i].copy_(self._tensors[i])

    def digested(self, found: "xxhash.xxh3_128") -> "xxhash.xxh3_128":
        """The hash, fed with all bytes. Blocks until they are there."""
        self._fetch.wait()
        self._tensors = []
        for place in self._places:
            found.update(place.numpy().data)
        return found
