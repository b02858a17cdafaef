"""A thread that makes the late copies of one save during training, and checks that they are exact.

The optimizer calls the Overlap before it writes (``before_step``). It waits for copies that the thread makes itself;
copies by a device only delay later work of the optimizer on that device. Before the save counts, each of its LateCopies
reports whether other code wrote.
"""

import os
import threading
import time
from collections.abc import Sequence
from typing import Protocol

from ckptd_client._local.copy_engines import is_capturing
from ckptd_client._save.late.copies import LateCopies

TOO_SLOW = "its copy was not done when the optimizer had waited save_timeout_s for it"


class Completion(Protocol):
    """Completes the save. The overlap's thread calls one method, once."""

    def deliver(self) -> None:
        """Delivers the save: all copies are exact."""

    def discard(self, reason: str, written: Sequence[str]) -> None:
        """Discards the save: its copies are wrong or too late. written: names of tensors that other code wrote to."""


class Overlap:
    """The late copies of one save. Owns them and releases them at the end."""

    def __init__(self, copies: Sequence[LateCopies], completion: Completion) -> None:
        self._copies, self._completion = list(copies), completion
        self._pid = os.getpid()
        self._on_device = any(one.on_device for one in copies)
        self._reason = ""
        self._written: list[str] | None = None  # names, once checked
        self._checking = threading.Lock()
        self._ownership = threading.Lock()  # taken by the thread, or by a caller that ends the save
        self._copied = threading.Event()
        self._hurried = threading.Event()  # an optimizer waits
        self._thread = threading.Thread(target=self._run, name="ckptd-overlap", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def withdraw(self) -> bool:
        """Whether the thread has not begun and never will; else it delivers or discards the save. Call it once."""
        return self._ownership.acquire(blocking=False)

    @property
    def over(self) -> bool:
        """Whether the save was delivered or discarded; True in a forked child."""
        return not self._thread.is_alive() or os.getpid() != self._pid

    def before_step(self, deadline: float) -> None:
        """Blocks until the tensors may be written. At the deadline gives the save up, so that they may be written.

        Does not wait for copies by a device: later work of this thread on the device waits for them.
        """
        if self.over:
            return
        self._hurried.set()
        if not self._copied.wait(max(0.0, deadline - time.monotonic())):
            self.cancel(TOO_SLOW)
            self.release()
        elif is_capturing():  # a graph cannot wait for work outside it; a capture begins on an idle device
            self._thread.join(max(0.0, deadline - time.monotonic()))
        elif not self.over:
            self._check_written()
            self.block_stream()

    def block_stream(self) -> None:
        """Makes later work of this thread on devices wait for their copies that have begun."""
        if self._copied.is_set() and not is_capturing():
            for one in self._copies:
                one.block_stream()

    def settle(self, deadline: float) -> bool:
        """Blocks until the save is over; False at the deadline."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return self.over

    def cancel(self, reason: str) -> None:
        """Discards the save, unless it is delivered already."""
        self._reason = self._reason or reason

    def release(self) -> None:
        """Ends the protection of memory."""
        for one in self._copies:
            one.release()

    # --- the thread

    def _run(self) -> None:
        if not self._ownership.acquire(blocking=False):
            return
        try:
            self._copy()
            if not self._on_device:
                self._check_written()
        except Exception as error:  # noqa: BLE001 - training continues after any error
            self.cancel(f"{type(error).__name__}: {error}")
        self._copied.set()
        written = self._proved()
        if written:
            self.cancel("it was written between save and the optimizer's step")
        try:
            if self._reason:
                self._completion.discard(self._reason, written)
            else:
                self._completion.deliver()
        finally:
            self.release()
            self._copies = []  # drops references that would keep a slot mapped
            del self._completion

    def _copy(self) -> None:
        """Starts the copies by devices, then copies the rest."""
        for one in sorted(self._copies, key=lambda one: not one.on_device):
            one.copy(lambda: bool(self._reason), self._hurried.is_set)

    def _check_written(self) -> None:
        """Checks once for writes: after all copies, or before the optimizer writes."""
        with self._checking:
            if self._written is not None or self._reason:
                return
            try:
                self._written = [name for one in self._copies for name in one.written_by_now()]
            except Exception as error:  # noqa: BLE001 - training continues after any error
                self.cancel(f"{type(error).__name__}: {error}")

    def _proved(self) -> list[str]:
        """Names of tensors that were written. Blocks until devices are done: slot and tensors may be freed then."""
        found: list[str] = []
        for one in self._copies:
            try:
                found += one.written()
            except Exception as error:  # noqa: BLE001 - training continues after any error
                self.cancel(f"{type(error).__name__}: {error}")
        self._check_written()
        return sorted({*found, *(self._written or ())}) if not self._reason else []
