"""The content of a slot that is filled and not yet sealed."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ckptd_client._image.segment_plan import SegmentPlan
from ckptd_client._local.slots import SlotMap


@dataclass(slots=True, eq=False)
class Segment:
    """A filled slot. owner: a writer or a staged state; once it is freed, the next save frees the slot."""

    plan: SegmentPlan
    name: str
    slot: SlotMap
    memory: torch.Tensor  # of the slot; keeps it mapped
    attachment: int
    owner: Callable[[], Any]  # a weak reference

    def holds(self, address: int) -> bool:
        """Whether the address is in the slot."""
        return 0 <= address - self.memory.data_ptr() < self.memory.numel()

    def views(self) -> list[torch.Tensor]:
        """The tensors in the slot, in the order of the plan."""
        return self.plan.views(self.memory)
