"""Tensors that torch.distributed shards, told from others without importing what makes them.

That import takes a second, and where nothing has made it there are none.
"""

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from torch.distributed.tensor import DTensor


def is_dtensor(value: Any) -> "TypeGuard[DTensor]":
    """Whether value is a DTensor."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(value, kind)


def is_sharded_tensor(value: Any) -> "TypeGuard[ShardedTensor]":
    """Whether value is a ShardedTensor."""
    kind = getattr(sys.modules.get("torch.distributed._shard.sharded_tensor.api"), "ShardedTensor", None)
    return kind is not None and isinstance(value, kind)
