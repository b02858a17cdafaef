"""Saves in two steps, for torch.distributed.checkpoint: fill a slot now, seal and hand it over later.

Between the two a segment holds its slot. It survives a daemon that ends meanwhile: the next one grants slots anew, and
the segment goes back into its own, or is copied into another. Written as a part of Client in a file of its own.
"""
# ruff: noqa: SLF001 - see above

import contextlib
import gc
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ckptd.shared.base.errors import SaveFailedError, UsageError, WaitTimeoutError
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.format.integrity import Integrity
from ckptd.shared.format.layout import Leaf
from ckptd.shared.format.replica_shares import Share
from ckptd.shared.protocol.messages import MAX_LATE_CHARS, HandOver
from ckptd.shared.protocol.publication import Publication
from ckptd_client._daemon.channel import ChannelLostError
from ckptd_client._image.plan import Plan, Values
from ckptd_client._image.segment_plan import SegmentPlan
from ckptd_client._local.slots import SlotMap
from ckptd_client._save.slot_writer import fill_slot, seal_slot
from ckptd_client._state.replica_shares import ByPosition, Stream, said_of, said_of_wholes, wholes_of
from ckptd_client.handle import SaveHandle

if TYPE_CHECKING:
    from ckptd_client.client import Client


@dataclass(frozen=True, slots=True)
class Plain:
    """Encoded plain values of one save."""

    leaves: bytes
    objects: bytes
    said: Callable[[], tuple[Share, ...]] = tuple

    @property
    def shares(self) -> tuple[Share, ...]:
        """What is said of tensors that replicas hold too. Blocks until it is known."""
        return self.said()

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return len(self.leaves) + len(self.objects)


def integrity_of(client: "Client") -> Integrity:
    """How everything that the client saves and loads is proved."""
    return client._link.settings.integrity


@dataclass(slots=True, eq=False)
class Segment:
    """A filled slot. Owned by owner, a writer or a staged state: when that is gone, the next save frees the slot."""

    plan: SegmentPlan
    name: str
    slot: SlotMap
    memory: torch.Tensor  # of the slot; keeps it mapped
    attachment: int
    owner: Callable[[], Any]  # a weak reference

    def holds(self, address: int) -> bool:
        """Whether the address lies in the slot."""
        return 0 <= address - self.memory.data_ptr() < self.memory.numel()

    def views(self) -> list[torch.Tensor]:
        """The tensors in the slot, in the order of the plan."""
        return self.plan.views(self.memory)


def count(client: "Client") -> tuple[int, int]:
    """Incarnation and number of the next save. Every rank counts alike, also a save that fails."""
    with client._numbers():
        client._check_open()
        client._counter += 1
        return client._link.incarnation, client._counter


def name_save(client: "Client", number: tuple[int, int], step: int | None) -> SaveId:
    """What a save will be called. Raises UsageError for a step that was saved already, and for a number of before."""
    with client._numbers():
        client._check_open()
        incarnation, counter = number
        if incarnation != client._link.incarnation:
            text = "the state was staged before the load that came after it, and cannot be saved any more"
            raise UsageError(text, hint="wait for the future of dcp.async_save before a load")
        return SaveId(incarnation, counter, client._check_step(step), client._link.run)


def begin(client: "Client", save: SaveId) -> SaveHandle:
    """Opens the handle of a save: it is to be sealed or given up. Raises UsageError as name_save."""
    with client._numbers():
        handle = client._begin(name_save(client, (save.incarnation, save.counter), save.step))
        client._link.unsealed.add(handle.save_id)
        client._stats.saves += 1
        return handle


def fill(  # noqa: PLR0913 - keyword-only
    client: "Client",
    plan: SegmentPlan,
    tensors: list[torch.Tensor],
    plain_nbytes: int,
    *,
    owner: Any,
    deadline: float | None = None,
) -> Segment:
    """Copies the tensors into a free slot, which the segment then holds. Blocks until deadline, or save_timeout_s.

    Raises CkptdError when there is none in time.
    """

    def once(deadline: float) -> Segment:
        link = client._link
        need = plan.exact_capacity(plain_nbytes)
        if need > link.capacity or link.refusal is not None:
            client._fit_slots(plan.capacity(plain_nbytes), deadline)
        free_orphans(client, need)
        segment = hold(client, plan, _wait_slot(client, need, deadline), owner=owner)
        try:
            fill_slot(segment.slot, plan, tensors)
        except BaseException:
            release(client, segment)
            raise
        return segment

    deadline = deadline_of(client) if deadline is None else deadline
    with _turn(client, deadline):
        segment: Segment = _while_daemons_end(client, once, deadline)
        client._stats.nbytes += plan.nbytes
        return segment


def hold(client: "Client", plan: SegmentPlan, name: str, *, owner: Any) -> Segment:
    """Takes a granted slot, to be filled by the caller. Under the client's lock."""
    link = client._link
    slot = link.slots.take(name)
    link.slots.held.add(name)
    segment = Segment(plan, name, slot, slot.bytes, link.attachments, weakref.ref(owner))
    client._segments.append(segment)
    return segment


def seal(  # noqa: PLR0913 - keyword-only
    client: "Client",
    segment: Segment,
    handle: SaveHandle,
    plain: Plain,
    *,
    drain: bool,
    publication: Publication | None = None,
) -> None:
    """Seals the segment and hands it over. Raises CkptdError when that fails."""
    plan = segment.plan

    def once(deadline: float) -> None:
        if client._link.holds(handle.save_id):
            return  # it was sealed: a new daemon has heard of it by now
        _settle(client, segment, plan.exact_capacity(plain.nbytes), deadline)
        seal_slot(
            segment.slot,
            plan,
            plain,
            handle.save_id,
            job=client._link.job,
            group=client._link.group,
            integrity=client._link.settings.integrity,
        )
        client._link.slots.held.discard(segment.name)
        late = client._stats.late[:MAX_LATE_CHARS]
        descriptor = HandOver(
            seq=0, slot=segment.name, save=handle.save_id, drain=drain, publication=publication, late=late
        )
        client._link.hand_over(descriptor, deadline=deadline)

    deadline = deadline_of(client)
    with _turn(client, deadline):
        try:
            _while_daemons_end(client, once, deadline)
        except ChannelLostError:
            if not client._link.holds(handle.save_id):
                release(client, segment)
                raise
            # It is sealed, and the next daemon is told.
        except BaseException:
            release(client, segment)
            raise
        client._link.unsealed.discard(handle.save_id)
        client._segments.remove(segment)


def release(client: "Client", segment: Segment) -> None:
    """Gives an unsealed segment's slot back: now, or with the next save if another thread keeps the client. Idempotent.

    Never raises; blocks at most save_timeout_s. In a forked child the slot is its parent's.
    """
    if not client._owner.is_here:
        return
    segment.owner = _nobody
    with client._first(deadline_of(client)) as mine:
        if not mine or segment not in client._segments:
            return
        client._segments.remove(segment)
        link = client._link
        if segment.name in link.slots.held:
            link.slots.held.discard(segment.name)
            if segment.attachment == link.attachments and segment.slot.capacity >= link.capacity:
                link.slots.grant(segment.name, segment.slot.capacity)


def free_orphans(client: "Client", need: int) -> None:
    """Frees the slots whose owners are gone. need: when no slot of so many bytes is free, it looks twice."""
    if client._segments and client._link.slots.fitting(need) is None:
        gc.collect()  # an error's traceback may hold a state in a circle
    for left in [segment for segment in client._segments if segment.owner() is None]:
        release(client, left)


def holder(client: "Client", address: int) -> Segment | None:
    """The segment, filled and still to be sealed, in whose slot the address lies."""
    with client._first(deadline_of(client)):
        return next((segment for segment in client._segments if segment.holds(address)), None)


def no_slot(client: "Client") -> tuple[str, str]:
    """Why no slot was free in time, and what to do."""
    if reason := client._link.book.waits_for:
        return f"no slot is free: {reason}", ""
    text = f"no slot was free within {client._save_timeout_s:g} s"
    if client._segments:
        held, slots = len(client._segments), "slot holds a state" if len(client._segments) == 1 else "slots hold states"
        text += f"; {held} {slots} staged and not yet written"
        return text, "wait for the future of dcp.async_save, keep no state that stage returned, or raise slots_per_rank"
    return f"{text}; drains are slow, or slots are few", "save less often, or raise slots_per_rank or save_timeout_s"


def _nobody() -> None:
    """The owner of a segment that is given up."""


def plan_of(client: "Client", state: dict[str, Any], deadline: float) -> tuple[Plan, Values]:
    """The client's own plan of a state, and its values now. Raises UsageError for what cannot be saved."""
    with _turn(client, deadline):
        values = client._gather(state, balanced=False)  # DCP's planner has shared out what replicas hold
        plan = client._plan
        assert plan is not None  # noqa: S101 - _gather made it
        return plan, values


def said_of_staged(client: "Client", segment: Segment, handle: SaveHandle, *, drain: bool) -> tuple[Share, ...]:
    """This rank's word of what replicas hold too of a state that lies in a slot, by the client's own plan of it.

    Blocks while what is looked at is read. Raises WaitTimeoutError.
    """
    plan = segment.plan
    if not isinstance(plan, Plan) or not (plan.streams or plan.unseen):
        return ()
    stored = dict(zip(plan.stored, segment.views(), strict=False))  # the boxes of cut tensors come after them
    return plan.said(lambda: said_of_streams(client, plan.streams, stored, handle, drain=drain))()


def said_of_streams(
    client: "Client", streams: Sequence[Stream], values: ByPosition[Any], handle: SaveHandle, *, drain: bool
) -> tuple[Share, ...]:
    """This rank's word of each stream, of values that stay what they are meanwhile. Blocks and raises as above."""
    with _turn(client, deadline_of(client)):
        looks = client._link.looks
        look = looks.next(handle.save_id, drain=drain)
        looks.looked(streams, look, handle)
    if look.whole:
        return said_of_wholes(streams, wholes_of(streams, values))()
    return said_of(streams, values, look)()


def stock_objects(client: "Client", leaves: dict[str, Leaf]) -> bytes:
    """The leaves for stock readers, encoded; empty but on rank 0. Blocks at most save_timeout_s."""
    if client._stock is None:
        return b""
    with _turn(client, deadline_of(client)):
        return client._stock.encode(leaves)


def give_up(client: "Client", handle: SaveHandle, error: BaseException) -> None:
    """Tells everybody that this rank does not take part in the save. Never raises; blocks at most save_timeout_s.

    In a forked child nobody is told: the save is its parent's.
    """
    if not client._owner.is_here:
        return
    client._link.unsealed.discard(handle.save_id)
    deadline = deadline_of(client)
    with client._first(deadline) as mine:
        if not client._closed and not handle.failed_here:
            client._note_failure(handle, error, deadline=deadline if mine else None)


def deadline_of(client: "Client") -> float:
    """Until when a save that begins now may hold up its thread."""
    return time.monotonic() + client._save_timeout_s


@contextlib.contextmanager
def _turn(client: "Client", deadline: float) -> Iterator[None]:
    """The client's lock, ahead of threads that wait for news."""
    with client._first(deadline) as mine:
        if not mine:
            raise WaitTimeoutError("another thread kept the client to itself")
        client._check_open()
        yield


def _while_daemons_end(client: "Client", once: Callable[[float], Any], deadline: float) -> Any:
    """What once returns, begun anew with the next daemon when one ends in the middle of it."""
    while True:
        try:
            client._link.ensure(deadline, hurried=True)
            return once(deadline)
        except ChannelLostError:
            if time.monotonic() >= deadline:
                raise


def _settle(client: "Client", segment: Segment, need: int, deadline: float) -> None:
    """Makes sure that the segment lies in a slot that is this rank's to seal, and large enough."""
    link = client._link
    own = segment.attachment == link.attachments
    if own and segment.slot.capacity >= need:
        return
    if need > link.capacity or link.refusal is not None:
        client._fit_slots(segment.plan.capacity(need - segment.plan.exact_capacity(0)), deadline)
        own = False  # what was granted before is withdrawn
    if link.slots.granted.get(segment.name, 0) >= need:
        link.slots.take(segment.name)
    else:
        old, nbytes = segment.memory, segment.plan.nbytes
        link.slots.held.discard(segment.name)
        if own:
            link.slots.grant(segment.name, segment.slot.capacity)
        segment.name = _wait_slot(client, need, deadline)
        segment.slot = link.slots.take(segment.name)
        segment.memory = segment.slot.bytes
        segment.slot.plan_id = ""  # its fillers are not those of the plan it had
        segment.memory[:nbytes].copy_(old[:nbytes])
        link.slots.held.add(segment.name)
    segment.attachment = link.attachments


def _wait_slot(client: "Client", need: int, deadline: float) -> str:
    try:
        return client._link.wait_slot(need, deadline)
    except WaitTimeoutError:
        text, hint = no_slot(client)
        raise SaveFailedError(text, hint=hint) from None


def is_own(client: "Client") -> Callable[[str], bool]:
    """Whether a name is of what each rank has for itself, as connect was told."""
    return client._link.settings.named.is_own


def job_of(client: "Client") -> JobKey:
    """Store and name of the client's job."""
    return client._link.job


def has(client: "Client", save: SaveId) -> bool:
    """Whether this very save can be restored, as this node's daemon knows. Another one may have its step's number."""
    name = save.incarnation, save.counter, save.step
    runs = [found.run for found in client._checkpoints() if (found.incarnation, found.counter, found.step) == name]
    return any(run in {"", save.run.hex()} for run in runs)  # empty: of a daemon that tells no runs
