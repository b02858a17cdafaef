"""Recognizes the sharded tensors of torch.distributed without importing their classes.

The import takes a second; where no other module has made it, no such tensor exists.
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
