"""A state that a stager has put into a slot, on its way to the writer."""

from dataclasses import dataclass, field
from typing import Any

from ckptd.protocol.errors import UsageError
from ckptd.protocol.layout import Leaf
from ckptd_client._segments import Segment
from ckptd_client._tensors import is_tensor, shard_of


@dataclass(slots=True)
class Staged:
    """One save: the slot that holds it, or why there is none."""

    number: tuple[int, int]
    segment: Segment | None = None
    leaves: dict[str, Leaf] = field(default_factory=dict)
    seconds: float = 0.0
    error: Exception | None = None

    def check(self, planner: Any) -> None:
        """Raises UsageError when the planner holds another state than the staged one."""
        state = getattr(planner, "state_dict", None)
        if self.segment is None or not isinstance(state, dict):
            return
        start = self.segment.memory.data_ptr()
        end = start + self.segment.memory.numel()
        for value in state.values():
            chunks = shard_of(value, "").chunks if is_tensor(value) else ()
            if chunks and chunks[0].local.numel():
                if not start <= chunks[0].local.data_ptr() < end:
                    text = "dcp.save was called while an asynchronous save of the same writer was still to be written"
                    raise UsageError(text, hint="wait for the future of dcp.async_save first, or use a second writer")
                return
