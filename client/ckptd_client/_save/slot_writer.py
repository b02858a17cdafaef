"""Writes a segment into a slot: first the payloads, last the seal, which shows that they are complete."""

from collections.abc import Sequence

import torch

from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.format.integrity import XXH3, Integrity, Purpose
from ckptd.shared.format.slot import Seal, SlotState
from ckptd_client._image.segment_plan import Plain, SegmentPlan
from ckptd_client._local.copy_engines import DeviceCopy, by_engine
from ckptd_client._local.rank import Group
from ckptd_client._local.slots import SlotMap


def slot_views(slot: SlotMap, plan: SegmentPlan | None) -> list[torch.Tensor]:
    """The plan's tensors in the slot, created once while the slot is used for this plan."""
    assert plan is not None  # noqa: S101 - values have a plan
    if slot.plan_id != plan.plan_id and slot.capacity >= plan.exact_capacity(0):
        slot.views, slot.plan_id = plan.views(slot.bytes), plan.plan_id
        for start, data in plan.image.fillers:  # constant: they stay in the slot from save to save
            slot.memory[start : start + len(data)] = data
    return slot.views


def fill_slot(slot: SlotMap, plan: SegmentPlan, tensors: list[torch.Tensor]) -> None:
    """Copies the payloads into the slot, which stays unsealed. Blocks."""
    copy_all(slot, slot_views(slot, plan), tensors)


def copy_all(slot: SlotMap, views: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    """Copies tensors of any device into views of the slot. Blocks for these copies only."""
    pin_for(slot, tensors)
    copies = DeviceCopy(tensors)
    try:
        copies.begin(views, tensors)
        copy_positions(views, tensors, copies.others)
    finally:
        copies.wait()


def pin_for(slot: SlotMap, tensors: Sequence[torch.Tensor]) -> None:
    """Registers the slot with the devices of these tensors, once. Blocks."""
    for engine in by_engine(tensors) if slot.pinned is None else ():
        slot.pin(engine)


def copy_positions(views: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], positions: Sequence[int]) -> None:
    """Copies some of the tensors in this thread. Blocks."""
    if not positions:  # torch refuses an empty list
        return
    if len(positions) < len(tensors):
        views, tensors = [views[i] for i in positions], [tensors[i] for i in positions]
    with torch.no_grad():
        torch._foreach_copy_(views, tensors)  # type: ignore[arg-type]  # they are lists


def seal_slot(  # noqa: PLR0913 - keyword-only
    slot: SlotMap, plan: SegmentPlan, values: Plain, save: SaveId, *, job: JobKey, group: Group,
    integrity: Integrity = XXH3,
) -> None:  # fmt: skip
    """Writes all parts but the payloads, the seal last."""
    memory = slot.memory
    for start, header in plan.image.patched_headers(save):
        memory[start : start + len(header)] = header
    seal = Seal(
        state=SlotState.SEALED,
        job=job,
        save=save,
        rank=group.rank,
        world_size=group.world_size,
        image_nbytes=plan.nbytes,
        header_nbytes=plan.image.header_nbytes,
        layout_nbytes=len(plan.layout),
        leaves_nbytes=len(values.leaves),
        layout_digest=plan.layout_digest,
        leaves_digest=integrity.digest(values.leaves, Purpose.LEAVES),
        objects_nbytes=len(values.objects),
        objects_digest=integrity.digest(values.objects, Purpose.OBJECTS) if values.objects else bytes(16),
        parts=plan.image.part_nbytes,
        raw=plan.image.raw,
        attestations=values.attestations,
    )
    memory[seal.layout_offset : seal.leaves_offset] = plan.layout
    memory[seal.leaves_offset : seal.objects_offset] = values.leaves
    memory[seal.objects_offset : seal.content_nbytes] = values.objects
    slot.put_seal(seal, integrity)
