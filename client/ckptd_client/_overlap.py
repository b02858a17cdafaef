"""Copies of one save that run while training goes on, in a thread of their own, and the proof that they are exact.

What is copied late must not be written before it is: who writes asks the Overlap first (``before_step``). What the
thread copies itself holds up the writer; what a device copies holds back only what the writer queues there. That nobody
else wrote is proved before the save counts: by torch's own counts of writes, and by samples for writes that torch does
not count (through .data, numpy, fused kernels). A tensor is only copied late after a Probe of some saves has held.
"""

import threading
import time
from collections.abc import Sequence
from typing import Protocol

import torch

from ckptd_client._attached import addresses as addresses_of
from ckptd_client._copy_engines import Fetch, is_capturing
from ckptd_client._proofs import Samples, versions
from ckptd_client._slot_writing import copy_positions

_GROUP_NBYTES = 64 << 20  # copied in one call, without the GIL; what follows may be broken off


class Fate(Protocol):
    """What becomes of the save. Called once, from the overlap's thread."""

    def deliver(self) -> None:
        """Everything is copied."""

    def discard(self, reason: str, written: Sequence[int]) -> None:
        """It is not what was saved, or came too late. written: positions that somebody wrote to."""


class Overlap:
    """Pairs of (view in a slot, tensor) to be copied, as the tensors are now. Holds the tensors until it is over.

    counted: for each tensor the one whose count of writes tells of it; of a DTensor's part that is the DTensor.
    addresses: of the tensors, as they are now. turn: a count of saves, by which samples differ from save to save.
    """

    def __init__(  # noqa: PLR0913 - keyword-only
        self,
        views: Sequence[torch.Tensor],
        tensors: Sequence[torch.Tensor],
        counted: Sequence[torch.Tensor],
        fate: Fate,
        *,
        addresses: Sequence[int],
        turn: int,
    ) -> None:
        self._tensors, self._counted, self._fate = list(tensors), list(counted), fate
        self._versions = versions(counted, tensors)
        self._addresses = addresses  # .data = x gives a tensor other memory, and counts nothing
        self._samples = Samples(tensors, turn)
        self._views, self._sources = [*views, *self._samples.views], [*tensors, *self._samples.again]
        self._fetch = Fetch(self._sources)
        self._reason = ""
        self._written: list[int] | None = None  # positions, once the proof was taken
        self._proving = threading.Lock()
        self._copied = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ckptd-overlap", daemon=True)

    def start(self) -> None:
        """Begins to copy."""
        self._thread.start()

    @property
    def over(self) -> bool:
        """Whether the save was delivered or discarded."""
        return not self._thread.is_alive()

    def before_step(self, deadline: float) -> None:
        """Blocks until the tensors may be written; at the deadline they may all the same, and the save is given up.

        What a device is still copying then is waited for by what this thread queues there, not by this thread.
        """
        if not self._copied.wait(max(0.0, deadline - time.monotonic())):
            self.cancel("its copy was not done when the optimizer had waited save_timeout_s for it")
        elif is_capturing():  # a graph cannot wait for what is outside of it; a capture begins on an idle device
            self._thread.join(max(0.0, deadline - time.monotonic()))
        elif not self.over:
            self._prove()
            self._fetch.hold_back()

    def hold_back(self) -> None:
        """What this thread queues from here on comes after the copies of devices, as far as these have begun."""
        if self._copied.is_set() and not is_capturing():
            self._fetch.hold_back()

    def settle(self, deadline: float) -> bool:
        """Blocks until it is over; False when it is not by the deadline."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return self.over

    def cancel(self, reason: str) -> None:
        """Discards the save, unless it is delivered already."""
        self._reason = self._reason or reason

    # --- the thread

    def _run(self) -> None:
        try:
            self._copy()
            if not self._fetch.engines:
                self._prove()
        except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
            self.cancel(f"{type(error).__name__}: {error}")
        self._copied.set()
        written = self._proved()
        if written:
            self.cancel("it was written between save and the optimizer's step")
        try:
            if self._reason:
                self._fate.discard(self._reason, written)
            else:
                self._fate.deliver()
        finally:
            self._let_go()

    def _copy(self) -> None:
        """Has devices begin with theirs, and copies the rest."""
        self._fetch.begin(self._views, self._sources, lasting=True)
        group: list[int] = []
        nbytes = 0
        for i in self._fetch.others:
            group.append(i)
            nbytes += self._views[i].nbytes
            if nbytes >= _GROUP_NBYTES:
                copy_positions(self._views, self._sources, group)
                group, nbytes = [], 0
            if self._reason:
                return
        copy_positions(self._views, self._sources, group)

    def _prove(self) -> None:
        """Once everything is copied, or before the first who may write does so: looks who has written until now."""
        with self._proving:
            if self._written is not None or self._reason:
                return
            try:
                self._written = self._changed()
            except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
                self.cancel(f"{type(error).__name__}: {error}")

    def _proved(self) -> list[int]:
        """Positions that were written. Blocks until devices are done: only then may slot and tensors be let go."""
        try:
            self._fetch.wait()
            self._prove()
            return (self._written or self._samples.changed_there()) if not self._reason else []
        except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
            self.cancel(f"{type(error).__name__}: {error}")
            return []

    def _changed(self) -> list[int]:
        """Positions of tensors that were written, or given other memory, since the save began."""
        now = zip(
            versions(self._counted, self._tensors), self._versions, addresses_of(self._tensors), self._addresses,
            strict=True,
        )  # fmt: skip
        changed = [i for i, (v, v_before, a, a_before) in enumerate(now) if v != v_before or a != a_before]
        return changed or self._samples.changed_here()

    def _let_go(self) -> None:
        self._views, self._tensors, self._counted, self._sources = [], [], [], []
        self._samples, self._fetch = Samples([], 0), Fetch([])
