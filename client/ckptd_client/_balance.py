"""This rank's share of the bytes of tensors that other ranks hold too. No word is exchanged for it.

The tensors of one set of replicas are taken as one stream of bytes, in the order of the state. Replica k of n saves the
k-th n-th of it, cut at rows of tensors: so all save equally much, a tensor is cut only where two shares meet, and each
replica knows its own share from its own state. That the replicas' states are alike is for the daemons to find out, from
what each says of its cut and of the bytes (ckptd.protocol.shares).
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import xxhash

from ckptd.protocol.shares import MAX_SHARES, SUM_NBYTES, Share
from ckptd_client._copy_engines import Fetch, divided, flat_bytes, parts_of
from ckptd_client._tensors import local_of
from ckptd_client._tree import Flat
from ckptd_client.handle import SaveHandle

WINDOWS = 256  # parts of the stream, of which each save looks at one
_FIRST, _LATER = b"f", b"l"  # how much was looked at
_LOOKED_NBYTES = 4 << 30  # at most so much in one save
_ON_HOST_NBYTES = 32 << 20  # of a device, at a time
_APART = 16  # bytes: where elements of any dtype may begin


class Rows(NamedTuple):
    """Rows first to stop of a tensor, along the first dimension that has more than one."""

    dim: int
    first: int
    stop: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The rows, sharing the tensor's memory."""
        return tensor.narrow(self.dim, self.first, self.stop - self.first) if tensor.dim() else tensor


class Look(NamedTuple):
    """What a save looks at of tensors that replicas hold too."""

    turn: int = 0  # count of saves, the same on all ranks
    checked: Collection[bytes] = ()  # cuts of streams of which all was looked at before


class Looks:
    """Which streams one client has looked at, byte by byte, in saves that all ranks staged."""

    def __init__(self) -> None:
        self._pending: list[tuple[Stream, int, SaveHandle]] = []  # a part that was looked at, and in which save
        self._covered: dict[bytes, set[int]] = {}
        self._checked: set[bytes] = set()

    def next(self, turn: int) -> Look:
        """What the next save looks at. A save in which a rank said nothing proves nothing: it must be staged."""
        staged = [(stream, part) for stream, part, handle in self._pending if handle.known_milestone is not None]
        for stream, part in staged:
            covered = self._covered.setdefault(stream.cut, set())
            covered.add(part)
            if len(covered) == stream.parts:
                self._checked.add(stream.cut)
        self._pending = [one for one in self._pending if one[2].known_milestone is None and not one[2].ended]
        return Look(turn, self._checked)

    def looked(self, streams: Sequence["Stream"], turn: int, handle: SaveHandle) -> None:
        """A save said of these streams what it saw."""
        new = [stream for stream in streams if stream.cut not in self._checked]
        self._pending += [(stream, turn % stream.parts, handle) for stream in new]


@dataclass(frozen=True, slots=True)
class Stream:
    """The tensors of one set of replicas end to end."""

    ranks: tuple[int, ...]
    positions: tuple[int, ...]  # among the values of the state
    shapes: tuple[tuple[int, ...], ...]  # of this rank's local tensors
    starts: tuple[int, ...]  # in the stream
    nbytes: int
    cut: bytes

    @property
    def parts(self) -> int:
        """Into which the first look at it is divided, one for each save, so that none is held up for long."""
        return max(1, -(-self.nbytes // _LOOKED_NBYTES))

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
    """One stream for each set of replicas. replicas: ranks by position; skipped: positions that are saved otherwise."""
    sets: dict[tuple[int, ...], list[int]] = {}
    for position, ranks in replicas.items():
        if position not in skipped and local_of(flat.values[position]).numel():
            sets.setdefault(ranks, []).append(position)
    return tuple(_stream(ranks, sets[ranks], flat) for ranks in sorted(sets)[:MAX_SHARES])


def shares_of(streams: Sequence[Stream], rank: int) -> tuple[dict[int, Rows], set[int]]:
    """The rank's rows of all streams by position, and positions of tensors of which it has none."""
    share = {position: rows for stream in streams for position, rows in stream.share(rank).items()}
    return share, {position for stream in streams for position in stream.positions} - set(share)


def _stream(ranks: tuple[int, ...], positions: Sequence[int], flat: Flat) -> Stream:
    cut = xxhash.xxh3_128()
    shapes, starts, at = [], [], 0
    for position in positions:
        local = local_of(flat.values[position])
        shape = tuple(local.shape)
        cut.update(repr((flat.names[position], str(local.dtype), shape)).encode())
        shapes.append(shape)
        starts.append(at)
        at += math.prod(shape) * local.itemsize
    return Stream(ranks, tuple(positions), tuple(shapes), tuple(starts), at, cut.digest()[:SUM_NBYTES])


# --- what is said of it


def said_of(streams: Sequence[Stream], values: Sequence[Any], look: Look) -> Callable[[], tuple[Share, ...]]:
    """This rank's word of each stream in this save, as the values are now. A call blocks until devices sent theirs."""
    contents = [_content(stream, values, look.turn, first_look=stream.cut not in look.checked) for stream in streams]
    shares: list[Share] = []

    def said() -> tuple[Share, ...]:
        for stream, content in zip(streams[len(shares) :], contents[len(shares) :], strict=True):
            replicas = xxhash.xxh3_128(repr(stream.ranks).encode()).digest()[:SUM_NBYTES]
            shares.append(Share(replicas=replicas, count=len(stream.ranks), cut=stream.cut, content=content()))
        return tuple(shares)

    return said


def _content(stream: Stream, values: Sequence[Any], turn: int, *, first_look: bool) -> Callable[[], bytes]:
    parts = stream.parts if first_look else WINDOWS
    part = turn % parts
    first, stop = part * stream.nbytes // parts, (part + 1) * stream.nbytes // parts
    pieces = [rows.of(local_of(values[position]).detach()) for position, rows in stream.between(first, stop)]
    taken = _at_once(pieces) if first_look or not divided(pieces) else _on_the_way(pieces)
    return lambda: (_FIRST if first_look else _LATER) + taken()[: SUM_NBYTES - 1]


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
