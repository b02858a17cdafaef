"""Prepares memory for saves while training runs: load asks for it, or a first save for the saves after it.

The daemon creates the slots. Here a thread receives the grants and maps the slots, so that no save has to. It ends once
all slots are mapped, and with the client.
"""

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from ckptd.shared.base.errors import WaitTimeoutError
from ckptd_client._daemon.channel import PreemptedError
from ckptd_client._local.copy_engines import is_capturing
from ckptd_client._local.processes import call_at_exit
from ckptd_client._local.slots import SlotMap
from ckptd_client._save.slot_writer import pin_for, slot_views
from ckptd_client._save.staging import Staging

log = logging.getLogger("ckptd_client")
_POLL_S = 0.05  # between two checks of the thread for new slots
_LAST_S = 600.0  # limit of the thread and of prepare
_AT_EXIT_S = 5.0
_ASK_S = 1.0  # limit by which a step that asks for slots may be delayed


class Preparing:
    """The preparation of one client. Call its methods under the client's lock."""

    def __init__(self, staging: Staging) -> None:
        self._staging = weakref.ref(staging)
        self._owner = staging.owner
        staging.link.on_slots_coming = self.begin
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._until = 0.0
        self._registered = False
        self._steps: list[_FirstSteps] = []

    # --- requests

    def after_load(self, state: dict[str, Any]) -> None:
        """Asks for slots for the state, after the first step if its optimizers have no state until then.

        Blocks for a plan of the state. Never raises: save reports a bad state.
        """
        self.forget_steps()
        unready = [found for found in _optimizers_in(state) if not found.state]
        if unready:
            self._steps.append(_FirstSteps(self, unready, state))
        else:
            self._ask(state)

    def make_ready(self, state: dict[str, Any]) -> None:
        """Waits until all slots are created, and maps and pins them. Blocks. Raises BudgetError, WaitTimeoutError."""
        staging = self._staging()
        assert staging is not None  # noqa: S101 - it called
        plan, values = staging.plans.gather(state)
        link, deadline = staging.link, time.monotonic() + _LAST_S
        link.ensure(deadline)
        staging.ask_slots(plan.capacity(values.plain.nbytes), deadline)
        seen = 0
        while True:
            if link.refusal is not None:
                staging.last_failure = str(link.refusal)
                raise link.refusal
            if link.slots.count > seen:
                seen = link.slots.count
                link.slots.populate()
                for slot in link.slots.maps():
                    slot_views(slot, plan)
                    pin_for(slot, values.tensors)
            if link.all_granted:
                return
            link.pump(time.monotonic() + 1.0)
            if time.monotonic() > deadline:
                raise WaitTimeoutError(f"the slots were not ready after {_LAST_S:g} s")

    def _ask(self, state: dict[str, Any]) -> None:
        staging = self._staging()
        if staging is None:
            return
        try:
            plan, values = staging.plans.gather(state)
            deadline = time.monotonic() + _ASK_S
            staging.link.ensure(deadline, hurried=True)
            staging.ask_slots(plan.capacity(values.plain.nbytes), deadline)
        except Exception as error:  # noqa: BLE001 - save meets the same error and reports it
            log.debug("ckptd: no memory is prepared: %s: %s", type(error).__name__, error)

    def stepped(self, state: dict[str, Any]) -> None:
        """Asks for slots: all optimizers have their state now. Runs in the step of the last one; never raises.

        Waits a second at most for other threads, not less: a user's state_dict may be collective, so all ranks must
        call it.
        """
        staging = self._staging()
        if staging is None or not self._owner.is_here:
            return
        with staging.first(time.monotonic() + _ASK_S) as mine:
            if mine and not staging.closed:
                self._ask(state)

    def forget_steps(self) -> None:
        """Drops requests of first steps: a save, another load or the end makes them obsolete."""
        while self._steps:
            self._steps.pop().forget()

    # --- grants

    def begin(self) -> None:
        """Starts a thread that maps requested slots when they are granted."""
        self._until = time.monotonic() + _LAST_S
        if self._thread is not None or self._stop.is_set():
            return
        if not self._registered:
            self._registered = True
            call_at_exit(self.join)  # before the connection is closed
        thread = threading.Thread(target=_run, args=(weakref.ref(self), self._stop), name="ckptd-prepare", daemon=True)
        with contextlib.suppress(RuntimeError):  # no thread can be started: saves map slots themselves
            thread.start()
            self._thread = thread

    def join(self, timeout_s: float = _AT_EXIT_S) -> None:
        """Ends the thread for good and blocks until then. Not under the lock. Does nothing in a forked child."""
        if not self._owner.is_here:
            return
        self._stop.set()
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)

    def map_new(self) -> bool:
        """Maps slots that were granted. Whether more may come."""
        staging = self._staging()
        if staging is None:
            return False
        new: list[SlotMap] = []
        with contextlib.suppress(PreemptedError), staging.last(time.monotonic() + _POLL_S) as mine:
            if not mine:
                return True
            link = staging.link
            if staging.closed or not self._update(staging):
                self._thread = None
                return False
            new = [slot for slot in link.slots.maps() if not slot.populated]
            if not new and (link.all_granted or link.refusal is not None or time.monotonic() > self._until):
                self._thread = None
                return False
            keep = [slot.memory for slot in new]  # keeps the mapping while this thread touches it
        for slot in new:
            slot.populate(self._stop.is_set)
        del keep
        return True

    def _update(self, staging: Staging) -> bool:
        """Receives updates of the daemon and reports a refusal. False if there is no daemon."""
        link = staging.link
        link.pump(time.monotonic())
        if link.refusal is not None and str(link.refusal) != staging.last_failure:
            staging.last_failure = str(link.refusal)
            log.warning("ckptd: the memory for saves cannot be had, and they will fail: %s", link.refusal)
        return not link.is_lost


def _run(preparing: "weakref.ref[Preparing]", stop: threading.Event) -> None:
    """The thread. Keeps no reference, so that a client that is dropped without close is freed."""
    while not stop.wait(_POLL_S):
        found = preparing()
        try:
            if found is None or not found.map_new():
                return
        except Exception as error:  # noqa: BLE001 - saves map slots themselves
            log.debug("ckptd: slots are not mapped ahead: %s: %s", type(error).__name__, error)
            return
        del found


class _FirstSteps:
    """Optimizers that create their state in their first step, and the state to be saved that contains them."""

    def __init__(self, preparing: Preparing, optimizers: list[torch.optim.Optimizer], state: dict[str, Any]) -> None:
        self._preparing = preparing
        self._state: dict[str, Any] | None = state
        self._hooks: dict[int, Any] = {}
        try:
            for optimizer in optimizers:
                self._hooks[id(optimizer)] = optimizer.register_step_post_hook(self._stepped)
        except AttributeError:  # a wrapper in a subclass that did not create hooks: the first save asks
            self.forget()
        self._waiting = set(self._hooks)

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._state is None or is_capturing():  # the hook stays: torch calls hooks now
            return
        self._waiting.discard(id(optimizer))
        if not self._waiting:
            state, self._state = self._state, None
            self._preparing.stepped(state)

    def forget(self) -> None:
        """Removes the hooks and drops the state."""
        self._state = None
        while self._hooks:
            self._hooks.popitem()[1].remove()


def _optimizers_in(value: Any) -> Iterator[torch.optim.Optimizer]:
    """The optimizers in a state, at any depth of dicts, lists and tuples."""
    if isinstance(value, torch.optim.Optimizer):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _optimizers_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _optimizers_in(item)
