"""The save planner for tensors that interleave."""

from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import StorageMeta

from ckptd_client.dcp._boxes import boxed


class CkptdSavePlanner(DefaultSavePlanner):
    """Save planner for DTensors with strided placements: `dcp.save(..., planner=CkptdSavePlanner())`, with any writer.

    DCP describes the shard of such a tensor as a single box at its first row. Where the shard is several runs of rows,
    DCP then refuses the plan ("Failed to validate global plan"). This planner makes each run an item of its own; it is
    a DefaultSavePlanner otherwise.
    """

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """As DefaultSavePlanner's. Raises UsageError for a DTensor whose placements do not give its local tensor.

        DCP looks for the parameters by name, and warns where they are not.
        """
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self.state_dict = {name: boxed(value, repr(name)) for name, value in self.state_dict.items()}
