"""One save of Client.save: values into a slot, sealed and handed over, or left to an overlap. A part of Client."""
# ruff: noqa: SLF001 - see above

import logging
import time
from typing import TYPE_CHECKING

from ckptd.shared.base.errors import WaitTimeoutError
from ckptd.shared.protocol.messages import MAX_LATE_CHARS, End, HandOver
from ckptd_client._daemon.channel import ChannelLostError
from ckptd_client._image.plan import Values
from ckptd_client._save.segments import free_orphans, hold, no_slot
from ckptd_client._save.slot_writer import fill_slot, seal_slot
from ckptd_client.handle import SaveHandle

if TYPE_CHECKING:
    from ckptd_client.client import Client

log = logging.getLogger("ckptd_client")
_LAST_WORDS_S = 0.2  # of a save that is broken off


def stage_or_fail(client: "Client", handle: SaveHandle, values: Values, *, drain: bool, deadline: float) -> None:
    client._link.staging = handle.save_id
    try:
        _stage_again(client, handle, values, drain=drain, deadline=deadline)
    except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
        client._note_failure(handle, error, deadline=deadline)
    except BaseException as error:  # Ctrl-C, say: whoever goes on all the same must not wait for this save
        client._link.let_go(handle.save_id)
        client._note_failure(handle, error, deadline=time.monotonic() + _LAST_WORDS_S)
        raise
    finally:
        client._link.staging = None


def _stage_again(client: "Client", handle: SaveHandle, values: Values, *, drain: bool, deadline: float) -> None:
    """Begins anew with the next daemon when one ends before the segment was sealed: the other ranks count on us."""
    while True:
        try:
            return _stage(client, handle, values, drain=drain, deadline=deadline)
        except ChannelLostError:
            if was_delivered(client, handle) or time.monotonic() >= deadline:
                raise


def was_delivered(client: "Client", handle: SaveHandle) -> bool:
    """Whether its segment is sealed, and the daemon has it or the next one will be told."""
    return client._link.holds(handle.save_id) or handle.known_milestone is not None


def _stage(client: "Client", handle: SaveHandle, values: Values, *, drain: bool, deadline: float) -> None:
    link, plan = client._link, client._plan
    assert plan is not None  # noqa: S101 - _gather made it
    link.ensure(deadline, hurried=True)
    need = plan.exact_capacity(values.plain_nbytes)
    if need > link.capacity or link.refusal is not None:
        client._fit_slots(client._plan_capacity(values), deadline)
    free_orphans(client, need)
    began, allocating = time.monotonic(), link.allocating
    try:
        name = link.wait_slot(need, deadline)
    except WaitTimeoutError:
        reason, _ = no_slot(client)
        if not link.all_granted:
            seconds = time.monotonic() - began
            reason = f"the memory of its slots is still being allocated after {seconds:.3g} s"
            reason += "; call prepare(state) before training"
        handle.fail(End.SKIPPED, reason)
        log.warning("ckptd: step %d was not saved: %s", handle.step, reason)
        link.skip(handle.save_id, reason, deadline)
        return
    if allocating:  # it is done once, and is not what the timeout is for
        deadline += time.monotonic() - began
    late = client._overlapping.late(plan, values)
    if late is not None:
        try:
            segment = hold(client, plan, name, owner=client._overlapping)
        except BaseException:
            late.let_go()
            raise
        client._overlapping.begin(segment, plan, values, late, handle=handle, drain=drain, deadline=deadline)
        return
    try:
        slot = link.slots.take(name)
    except FileNotFoundError as error:
        raise link.why_gone(name, deadline) from error
    try:
        for digest in values.digests:
            digest.take()
        fill_slot(slot, plan, values.tensors)
        seal_slot(slot, plan, values, handle.save_id, job=link.job, group=link.group, integrity=link.settings.integrity)
    except BaseException:
        link.slots.grant(name, slot.capacity)
        raise
    told = client._stats.late[:MAX_LATE_CHARS]
    link.hand_over(HandOver(seq=0, slot=name, save=handle.save_id, drain=drain, late=told), deadline=deadline)
