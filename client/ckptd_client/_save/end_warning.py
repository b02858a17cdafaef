"""The end of a client: one line about saves that are not safe, none if all are. It never waits for the daemon.

A staged save whose drain runs is safe. So is a save that other ranks have not delivered yet, unless the daemon has
reported that it waits for them.
"""

import atexit
import contextlib
import logging
import sys
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import zmq

from ckptd.shared.base.errors import CkptdError, parted
from ckptd_client._local.save_record import Outlook, SaveRecord
from ckptd_client._save.staging import Staging

log = logging.getLogger("ckptd_client")
_open: "weakref.WeakSet[Staging]" = weakref.WeakSet()


class Unsafe(NamedTuple):
    """A description of saves that are not safe, and a hint."""

    text: str
    hint: str


def unsafe(handles: Sequence[SaveRecord], outlook: Outlook, arena: str, *, daemon_lost: bool) -> Unsafe | None:
    """The unsafe saves of one run; handles: its saves, the oldest first. None: no problem is known. Pure."""
    incomplete = _incomplete(handles, outlook)
    found = []
    if incomplete:
        found.append(_of_ranks(incomplete, outlook))
    elif outlook.missed:
        steps, why = [save.step for save in outlook.missed], parted(outlook.missed[max(outlook.missed)])
        found.append(Unsafe(f"{_are(steps)} not complete and cannot be restored: {why[0]}", why[1]))
    stuck = "no daemon runs on this node" if daemon_lost else outlook.stuck
    newest, durable = outlook.newest_staged, outlook.newest_durable
    if stuck and newest is not None and (durable is None or newest > durable):
        where = f"only in memory, and lost with its nodes; newest durable step of this run: {_step(durable)}"
        again = f"ckptd run --arena {arena}" if daemon_lost else f"mend that, then: ckptd drain --wait --arena {arena}"
        found.append(Unsafe(f"step {newest.step}, the newest complete save, is {where}; {stuck}", again))
    if not found:
        return None
    return Unsafe("; ".join(one.text for one in found), "; ".join(one.hint for one in found if one.hint))


def _incomplete(handles: Sequence[SaveRecord], outlook: Outlook) -> list[SaveRecord]:
    """Saves newer than the newest complete one that failed, or that other ranks do not deliver."""
    late = [h for h in handles if outlook.newest_staged is None or h.save_id > outlook.newest_staged]
    first = next((i for i, handle in enumerate(late) if handle.waits and handle.reason), len(late))
    return [handle for i, handle in enumerate(late) if handle.in_vain or (handle.waits and i >= first)]


def _of_ranks(incomplete: Sequence[SaveRecord], outlook: Outlook) -> Unsafe:
    steps = [handle.step for handle in incomplete]
    one = len(steps) == 1
    told = [handle for handle in incomplete if handle.reason]
    why, hint = told[-1].cause if told else ("", "")
    why = f": {'it' if one else f'step {told[-1].step}'} {'' if told[-1].waits else 'failed: '}{why}" if told else ""
    complete = f"newest complete save of this run: {_step(outlook.newest_staged)}"
    return Unsafe(f"{_are(steps)} not complete and cannot be restored{why}; {complete}", hint)


def _are(steps: Sequence[int]) -> str:
    return f"step {steps[0]} is" if len(steps) == 1 else f"{len(steps)} saves (steps {steps[0]} to {steps[-1]}) are"


def _step(save: object) -> str:
    return "none" if save is None else f"step {getattr(save, 'step', save)}"


class EndWarning:
    """The warning at the end of one client."""

    def __init__(self, staging: Staging) -> None:
        self._staging = staging
        _open.add(staging)
        self.daemon_lost = False

    def begin(self) -> None:
        """Receives the last updates; call it while the client is connected."""
        with contextlib.suppress(CkptdError, zmq.ZMQError):
            self._staging.pump(0.0)
        self.daemon_lost = self._staging.link.is_lost

    def end(self, how: str) -> None:
        """Warns once of unsafe saves. how: the client's end, such as "closed"; empty: no warning is due."""
        staging = self._staging
        if staging not in _open:
            return
        _open.discard(staging)
        link = staging.link
        outlook = link.book.outlook
        outlook.missed = {save: why for save, why in outlook.missed.items() if save.incarnation == link.incarnation}
        handles = [handle for handle in link.book.handles if handle.save_id.incarnation == link.incarnation]
        found = unsafe(handles, outlook, link.settings.arena, daemon_lost=self.daemon_lost)
        if how and found is not None:
            hint = f"\n  hint: {found.hint}" if found.hint else ""
            log.warning("ckptd: job %s %s: %s%s", link.job.job, how, found.text, hint)


def _at_exit() -> None:
    """Warns for clients that were not closed, unless an error of ckptd, which the user has read, ends the process."""
    read = isinstance(getattr(sys, "last_value", None), CkptdError)
    for staging in [] if read else list(_open):
        if staging.owner.is_here and not staging.closed:
            warning = EndWarning(staging)
            warning.begin()
            warning.end("ended without close()")


atexit.register(_at_exit)
