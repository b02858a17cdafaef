"""Copies that run during training, with a check that they are exact.

PageCopies: bytes of the host in write-protected pages, and digests of such bytes. TensorCopies: tensors of a device
with checksums, or of any kind with samples if the user asks for that. One save uses each of them, in the thread of its
Overlap.
"""

import contextlib
import errno
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from ckptd_client._local.checksums import Checksums
from ckptd_client._local.copy_engines import DeviceCopy
from ckptd_client._local.late_memory import LateMemory, Lease
from ckptd_client._local.page_division import Division, placed
from ckptd_client._local.page_guard import CALL_NBYTES, PAGE_NBYTES, Range, batches, common, copy
from ckptd_client._save.late.proofs import Samples, versions
from ckptd_client._save.slot_writer import copy_positions
from ckptd_client._state.replica_digests import WholeDigest

_GROUP_NBYTES = 64 << 20  # copied in one call, without the GIL; the copy may stop between calls


class LateCopies(Protocol):
    """Late copies of one save. Names are those of the state's tensors."""

    on_device: bool  # whether a device still copies after copy returns

    def copy(self, stopped: Callable[[], bool], hurried: Callable[[], bool]) -> None:
        """Makes the copies of this thread and starts those of devices. Blocks until then, or until stopped.

        hurried: whether the optimizer waits for it.
        """

    def block_stream(self) -> None:
        """Makes later work of this thread on devices wait for their copies."""

    def written_by_now(self) -> list[str]:
        """Names of tensors with writes detected so far. Call it before the optimizer writes."""

    def written(self) -> list[str]:
        """The same, once devices are done: blocks for them. Empty: the copies are exact."""

    def release(self) -> None:
        """Ends the protection and drops memory. At any time, by any thread, repeatedly."""


class NeighbourWroteError(Exception):
    """A page with copied bytes was written; it is unknown whether the write was to these bytes."""


class PageCopies:
    """Copies of the host's memory under a lease. slot: address of the slot.

    lease: of the memory of division; protect it before the copy; it ends with the copy. names: of the plan's tensors.
    keep: objects that keep the memory alive. digests: read leased memory too, after the copy, with the same proof.
    """

    on_device = False

    def __init__(  # noqa: PLR0913 - keyword-only
        self,
        memory: LateMemory,
        lease: Lease,
        division: Division,
        *,
        slot: int,
        names: Sequence[str],
        keep: Sequence[Any],
        digests: Sequence[WholeDigest] = (),
    ) -> None:
        self._memory, self._lease, self._division, self._names = memory, lease, division, names
        self._late, self._keep, self._digests = placed(division.late, slot), keep, list(digests)
        self._digested = [(name, found) for one in digests for name, found in one.late]
        self._written: list[str] | None = None

    def copy(self, stopped: Callable[[], bool], hurried: Callable[[], bool]) -> None:
        """See LateCopies. Checks for writes directly after the last byte: later writes do not matter.

        Raises NeighbourWroteError.
        """
        try:
            for batch in batches(self._late):
                if stopped():
                    return
                copy(batch)
            for one in self._digests:
                if stopped():
                    return
                one.take_late()
            if self._rehearsed(lambda: stopped() or hurried()):
                self._memory.watched(self._lease, self._division.watched)
            self._prove()
        except OSError as error:
            if error.errno != errno.EFAULT:
                raise
            self._prove()
            if not self._written:  # the memory that is not mapped any more was not to be copied
                raise
        finally:
            self.release()

    def _rehearsed(self, broken_off: Callable[[], bool]) -> bool:
        """Reads watched memory, for as long as a copy would take. Whether it was complete, not broken off."""
        room = np.empty(CALL_NBYTES if len(self._division.rehearsed) else 0, np.uint8)
        for batch in batches(self._division.rehearsed):
            if broken_off():
                return False
            read = batch.copy()
            read[:, 0] = room.ctypes.data + np.cumsum(batch[:, 2]) - batch[:, 2]
            with contextlib.suppress(OSError):  # these bytes are copied already
                copy(read)
        return True

    def _prove(self) -> None:
        """Finds the tensors whose bytes were written. Raises NeighbourWroteError."""
        division = self._division
        if all(map(self._lease.unwritten, division.late_ranges)):
            self._written = []
            return
        read = [
            (self._names[i], Range(start, start + nbytes))
            for i, (_, start, nbytes) in zip(division.late_of, division.late.tolist(), strict=True)
        ]
        read += self._digested
        self._written = self._written_of(read, division.own)
        if not self._written:
            self._memory.alone = True
            names = self._written_of(read, division.late_ranges)
            text = f"memory was written that shares a page with {names[0]!r}" if names else "memory was written"
            raise NeighbourWroteError(f"{text}; such pages are copied before save returns")

    def _written_of(self, read: Sequence[tuple[str, Range]], ranges: Sequence[Range]) -> list[str]:
        """Names of tensors that were read in these ranges and whose pages were written."""
        found = ((name, part) for name, one in read for part in common([one], ranges))
        return sorted({name for name, part in found if not self._lease.unwritten(_pages_of(part))})

    def block_stream(self) -> None:
        """See LateCopies."""

    def written_by_now(self) -> list[str]:
        """See LateCopies."""
        return []

    def written(self) -> list[str]:
        """See LateCopies."""
        if self._written is not None:
            return self._written
        return sorted({*(self._names[i] for i in self._division.late_of), *(name for name, _ in self._digested)})

    def release(self) -> None:
        """See LateCopies."""
        self._lease.release()


def _pages_of(found: Range) -> Range:
    return Range(found.start // PAGE_NBYTES * PAGE_NBYTES, -(-found.stop // PAGE_NBYTES) * PAGE_NBYTES)


class TensorCopies:
    """Copies of tensors to views in a slot, of their content at the time of the constructor.

    counted: for each tensor the one that counts its writes: for a DTensor's local tensor the DTensor. checked: whether
    checksums prove every byte, or samples some; turn: selects the samples.
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
        # Aliases keep the saved memory if .data = x gives a tensor other memory.
        self._tensors = [tensor.detach() for tensor in tensors]
        self._evidence = Checksums(self._tensors) if checked else Samples(self._tensors, turn)
        self._copy = DeviceCopy(self._tensors)
        self.on_device = bool(self._copy.engines)

    def copy(self, stopped: Callable[[], bool], hurried: Callable[[], bool]) -> None:  # noqa: ARG002
        """See LateCopies."""
        self._copy.begin(self._views, self._tensors, lasting=True)
        group: list[int] = []
        nbytes = 0
        for i in self._copy.others:
            group.append(i)
            nbytes += self._views[i].nbytes
            if nbytes >= _GROUP_NBYTES:
                copy_positions(self._views, self._tensors, group)
                group, nbytes = [], 0
            if stopped():
                return
        copy_positions(self._views, self._tensors, group)

    def block_stream(self) -> None:
        """See LateCopies."""
        self._copy.block_stream()

    def written_by_now(self) -> list[str]:
        """See LateCopies. torch counts most writes; written() detects the others."""
        if not self._versions:
            return []
        now = versions(self._counted, self._watched)
        return [name for name, before, after in zip(self._names, self._versions, now, strict=True) if before != after]

    def written(self) -> list[str]:
        """See LateCopies."""
        self._copy.wait()
        return [self._names[i] for i in self._evidence.differing(self._views)]

    def release(self) -> None:
        """See LateCopies. Keeps tensors until devices are done; written() waits for that."""
