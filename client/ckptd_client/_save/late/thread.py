"""Copies of one save that run while training goes on, in a thread of their own, and the proof that they are exact.

Who writes asks the Overlap first (``before_step``). What the thread copies itself holds up the writer; what a device
copies holds back only what the writer queues there. Before the save counts, each of its LateCopies tells whether
somebody else wrote.
"""

import os
import threading
import time
from collections.abc import Sequence
from typing import Protocol

from ckptd_client._local.copy_engines import is_capturing
from ckptd_client._save.late.copies import LateCopies

TOO_SLOW = "its copy was not done when the optimizer had waited save_timeout_s for it"


class Fate(Protocol):
    """What becomes of the save. Called once, from the overlap's thread."""

    def deliver(self) -> None:
        """Everything is copied."""

    def discard(self, reason: str, written: Sequence[str]) -> None:
        """It is not what was saved, or came too late. written: names of tensors that somebody wrote to."""


class _NoFate:
    def deliver(self) -> None:
        """Nobody's."""

    def discard(self, reason: str, written: Sequence[str]) -> None:
        """Nobody's."""


_NO_FATE = _NoFate()


class Overlap:
    """One save's. Owns the copies from here on, and lets go of them when it is over."""

    def __init__(self, copies: Sequence[LateCopies], fate: Fate) -> None:
        self._copies, self._fate = list(copies), fate
        self._pid = os.getpid()
        self._on_device = any(one.on_device for one in copies)
        self._reason = ""
        self._written: list[str] | None = None  # names, once it was looked
        self._looking = threading.Lock()
        self._whose = threading.Lock()  # whoever gets it ends the save: the thread, or who could not start it
        self._copied = threading.Event()
        self._hurried = threading.Event()  # an optimizer waits
        self._thread = threading.Thread(target=self._run, name="ckptd-overlap", daemon=True)

    def start(self) -> None:
        """Begins to copy."""
        self._thread.start()

    def withdraw(self) -> bool:
        """Whether the thread has not begun, and never will: else it alone delivers or discards. To be asked once."""
        return self._whose.acquire(blocking=False)

    @property
    def over(self) -> bool:
        """Whether the save was delivered or discarded. In a forked child it is its parent's."""
        return not self._thread.is_alive() or os.getpid() != self._pid

    def before_step(self, deadline: float) -> None:
        """Blocks until the tensors may be written; at the deadline they may all the same, and the save is given up.

        What a device is still copying then is waited for by what this thread queues there, not by this thread.
        """
        if self.over:
            return
        self._hurried.set()
        if not self._copied.wait(max(0.0, deadline - time.monotonic())):
            self.cancel(TOO_SLOW)
            self.let_go()
        elif is_capturing():  # a graph cannot wait for what is outside of it; a capture begins on an idle device
            self._thread.join(max(0.0, deadline - time.monotonic()))
        elif not self.over:
            self._look()
            self.block_stream()

    def block_stream(self) -> None:
        """What this thread queues from here on comes after the copies of devices, as far as these have begun."""
        if self._copied.is_set() and not is_capturing():
            for one in self._copies:
                one.block_stream()

    def settle(self, deadline: float) -> bool:
        """Blocks until it is over; False when it is not by the deadline."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return self.over

    def cancel(self, reason: str) -> None:
        """Discards the save, unless it is delivered already."""
        self._reason = self._reason or reason

    def let_go(self) -> None:
        """Nothing is protected any more."""
        for one in self._copies:
            one.let_go()

    # --- the thread

    def _run(self) -> None:
        if not self._whose.acquire(blocking=False):
            return
        try:
            self._copy()
            if not self._on_device:
                self._look()
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
            self.let_go()
            self._copies, self._fate = [], _NO_FATE  # a slot stays mapped for as long as somebody refers to it

    def _copy(self) -> None:
        """Has devices begin with theirs, and copies the rest."""
        for one in sorted(self._copies, key=lambda one: not one.on_device):
            one.copy(lambda: bool(self._reason), self._hurried.is_set)

    def _look(self) -> None:
        """Once everything is copied, or before the first who may write does so: who has written until now."""
        with self._looking:
            if self._written is not None or self._reason:
                return
            try:
                self._written = [name for one in self._copies for name in one.written_by_now()]
            except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
                self.cancel(f"{type(error).__name__}: {error}")

    def _proved(self) -> list[str]:
        """Names that were written. Blocks until devices are done: only then may slot and tensors be let go."""
        found: list[str] = []
        for one in self._copies:
            try:
                found += one.written()
            except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
                self.cancel(f"{type(error).__name__}: {error}")
        self._look()
        return sorted({*found, *(self._written or ())}) if not self._reason else []
