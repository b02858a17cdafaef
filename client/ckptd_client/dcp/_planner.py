"""The save planner for tensors that interleave."""

from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import StorageMeta

from ckptd_client.dcp._boxes import boxed


class CkptdSavePlanner(DefaultSavePlanner):
    """``dcp.save(state, storage_writer=writer, planner=CkptdSavePlanner())``: DefaultSavePlanner, of every storage.

    It differs for DTensors with strided placements. DCP describes the shard of one as a single box at its first row;
    where the shard is several runs of rows, that is refused by DCP ("Failed to validate global plan"). Here each run
    is an item of its own.
    """

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """As DefaultSavePlanner's. Raises UsageError for a DTensor whose placements do not give its local tensor.

        DCP looks for the parameters by name, and warns where they are not.
        """
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self.state_dict = {name: boxed(value, repr(name)) for name, value in self.state_dict.items()}
