"""What rank 0 finds, for all ranks, by torch.distributed where it runs."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from ckptd.shared.base.errors import RestoreError


def from_rank_0(ask: Callable[[], Any]) -> Any:
    """What rank 0 finds, on all ranks. What it raises is raised on all."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return ask()
    box: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            box[0] = ask()
        except Exception as error:  # noqa: BLE001 - the others wait
            box[1] = f"{type(error).__name__}: {error}"
    dist.broadcast_object_list(box, src=0)
    if box[1] is not None:
        raise RestoreError(f"rank 0 could not look: {box[1]}", hint="ckptd status")
    return box[0]
