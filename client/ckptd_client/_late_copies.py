"""Copies that run while training goes on, and what proves that they are of what was saved.

PageCopies: bytes of the host, under write-protected pages, and digests of such bytes. TensorCopies: tensors of a device
under checksums, or of any kind under samples, for who has asked for that. Each is used by one save, in the thread of
its Overlap.
"""

import contextlib
import errno
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from ckptd_client._checksums import Checksums
from ckptd_client._copy_engines import Fetch
from ckptd_client._late_memory import LateMemory
from ckptd_client._page_guard import PAGE_NBYTES, Piece, Range, batches, copy
from ckptd_client._proofs import Samples, versions
from ckptd_client._slot_writing import copy_positions

_GROUP_NBYTES = 64 << 20  # copied in one call, without the GIL; what follows may be broken off


class LateCopies(Protocol):
    """Of one save. Names are those of the state's tensors."""

    on_device: bool  # whether a device goes on copying when copy has returned

    def copy(self, stopped: Callable[[], bool]) -> None:
        """Blocks until all that this thread copies is there, and devices have begun with theirs; or until stopped."""

    def hold_back(self) -> None:
        """What this thread queues on devices from here on comes after their copies."""

    def written_by_now(self) -> list[str]:
        """Names that somebody wrote to, as far as it shows before devices are done. Before the optimizer writes."""

    def written(self) -> list[str]:
        """The same, once devices are done: blocks for them. Empty: the copies are what was saved."""

    def let_go(self) -> None:
        """Nothing is protected or held any more. May be called at any time, by any thread, and again."""


class Cut(NamedTuple):
    """One tensor's bytes that lie in one range."""

    position: int
    offset: int  # of the first, in the tensor
    nbytes: int


def cuts(spans: Sequence[tuple[int, Range]], armed: Sequence[Range]) -> tuple[list[Cut], list[Cut]]:
    """What of these tensors lies in the armed ranges, and what does not. armed: in order. Pure."""
    inside: list[Cut] = []
    outside: list[Cut] = []
    firsts = [one.start for one in armed]
    for position, span in spans:
        at, k = span.start, max(0, bisect_right(firsts, span.start) - 1)
        while at < span.stop:
            one = next((one for one in armed[k : k + 2] if one.stop > at), None)
            if one is None or one.start >= span.stop:
                outside.append(Cut(position, at - span.start, span.stop - at))
                break
            if at < one.start:
                outside.append(Cut(position, at - span.start, one.start - at))
                at = one.start
            stop = min(one.stop, span.stop)
            inside.append(Cut(position, at - span.start, stop - at))
            at, k = stop, bisect_right(firsts, stop) - 1
    return inside, outside


class LateDigest(Protocol):
    """Of memory that is read when the copy has ended."""

    @property
    def late(self) -> Sequence[tuple[str, Range]]:
        """That memory, with names."""

    def take_late(self) -> None:
        """Reads it. Blocks. Raises OSError where nothing is mapped any more."""


class PageCopies:
    """memory: where armed was armed; given back when the copy has ended, however it ends. keep: holds the memory.

    digests: what reads armed memory too, after the copy and under the same proof.
    """

    on_device = False

    def __init__(
        self,
        memory: LateMemory,
        armed: Sequence[Range],
        pieces: Sequence[tuple[str, Piece]],  # with names
        keep: Sequence[torch.Tensor],
        digests: Sequence[LateDigest] = (),
    ) -> None:
        self._memory, self._armed = memory, list(armed)
        self._pieces, self._keep, self._digests = list(pieces), list(keep), list(digests)
        self._read = [(name, _pages_of(piece.start, piece.start + piece.nbytes)) for name, piece in pieces]
        self._read += [(name, _pages_of(*found)) for one in digests for name, found in one.late]
        self._written: list[str] | None = None

    def copy(self, stopped: Callable[[], bool]) -> None:
        """See LateCopies. The proof is taken as soon as the last byte is there: later writes do no harm."""
        armed = list(self._armed)  # who lets go of it meanwhile has it look as if it was written
        try:
            for batch in batches(piece for _, piece in self._pieces):
                if stopped():
                    return
                copy(batch)
            for one in self._digests:
                if stopped():
                    return
                one.take_late()
            self._written = self._not_proved(armed)
        except OSError as error:
            if error.errno != errno.EFAULT:
                raise
            self._written = self._not_proved(armed) or self._all()
        finally:
            self.let_go()

    def _not_proved(self, armed: Sequence[Range]) -> list[str]:
        if all(map(self._memory.unwritten, armed)):
            return []
        return sorted({name for name, pages in self._read if not self._memory.unwritten(pages)})

    def _all(self) -> list[str]:
        return sorted({name for name, _ in self._read})

    def hold_back(self) -> None:
        """See LateCopies."""

    def written_by_now(self) -> list[str]:
        """See LateCopies."""
        return []

    def written(self) -> list[str]:
        """See LateCopies."""
        return self._written if self._written is not None else self._all()

    def let_go(self) -> None:
        """See LateCopies."""
        with contextlib.suppress(IndexError):  # each is released by one thread, whoever is here too
            while True:
                self._memory.release([self._armed.pop()])


def _pages_of(start: int, stop: int) -> Range:
    return Range(start // PAGE_NBYTES * PAGE_NBYTES, -(-stop // PAGE_NBYTES) * PAGE_NBYTES)


class TensorCopies:
    """Pairs of (view in a slot, tensor), of the moment at which this is made, in the order of what this thread queues.

    counted: for each tensor the one whose count of writes tells of it; of a DTensor's part that is the DTensor.
    checked: whether every byte is proved by checksums, or some by samples; turn: by which samples differ.
    """

    def __init__(  # noqa: PLR0913 - keyword-only
        self,
        names: Sequence[str],
        views: Sequence[torch.Tensor],
        tensors: Sequence[torch.Tensor],
        counted: Sequence[torch.Tensor],
        *,
        checked: bool,
        turn: int,
    ) -> None:
        self._names = list(names)
        self._views, self._counted = list(views), list(counted)
        self._watched = list(tensors)
        self._versions: list[Any] = [] if checked else versions(counted, tensors)
        # Aliases: .data = x gives a tensor other memory, and leaves what was saved to these.
        self._tensors = [tensor.detach() for tensor in tensors]
        self._evidence = Checksums(self._tensors) if checked else Samples(self._tensors, turn)
        self._fetch = Fetch(self._tensors)
        self.on_device = bool(self._fetch.engines)

    def copy(self, stopped: Callable[[], bool]) -> None:
        """See LateCopies."""
        self._fetch.begin(self._views, self._tensors, lasting=True)
        group: list[int] = []
        nbytes = 0
        for i in self._fetch.others:
            group.append(i)
            nbytes += self._views[i].nbytes
            if nbytes >= _GROUP_NBYTES:
                copy_positions(self._views, self._tensors, group)
                group, nbytes = [], 0
            if stopped():
                return
        copy_positions(self._views, self._tensors, group)

    def hold_back(self) -> None:
        """See LateCopies."""
        self._fetch.hold_back()

    def written_by_now(self) -> list[str]:
        """See LateCopies. torch counts most writes; what it does not count shows at the end."""
        if not self._versions:
            return []
        now = versions(self._counted, self._watched)
        return [name for name, before, after in zip(self._names, self._versions, now, strict=True) if before != after]

    def written(self) -> list[str]:
        """See LateCopies."""
        self._fetch.wait()
        return [self._names[i] for i in self._evidence.differing(self._views)]

    def let_go(self) -> None:
        """See LateCopies. Tensors are held until devices are done, which written waits for."""
