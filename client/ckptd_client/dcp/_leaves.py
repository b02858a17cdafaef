"""Plain values between DCP's planners, which speak in torch.save archives, and ckptd's safe encoding."""

import io
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType

from ckptd.shared.base.errors import RestoreError, UsageError
from ckptd.shared.format.layout import Leaf
from ckptd_client._state.leaves import decode_leaf
from ckptd_client._state.pickle import CODEC, PickleKeys, check_allowed, encode
from ckptd_client._state.tensors import is_tensor


def own_leaves(planner: SavePlanner, items: Iterable[WriteItem], keys: PickleKeys) -> dict[str, Leaf]:
    """This rank's plain values, encoded; also those that the plan left to another rank, since each has its own.

    Raises UsageError, with the key, for a value without a safe encoding that keys do not allow to pickle.
    """
    written = {item.index.fqn: item for item in items if item.type == WriteItemType.BYTE_IO}
    state = getattr(planner, "state_dict", None)
    names = [name for name, value in state.items() if not is_tensor(value)] if isinstance(state, dict) else []
    if not _looks_up(planner):
        return {name: _resolved(planner, item, keys) for name, item in written.items()}
    wanted = [name for name in dict.fromkeys([*names, *written]) if not _is_sharded(state, name)]
    return {name: encode(_looked_up(planner, name), name, repr(name), allowed=keys.allow(name)) for name in wanted}


def _is_sharded(state: Any, name: str) -> bool:
    """Whether the value makes write items of its own, as ShardedTensor does, and is no plain value."""
    value = state.get(name) if isinstance(state, dict) else None
    return hasattr(value, "__create_write_items__") or hasattr(value, "local_shards")


def _looks_up(planner: SavePlanner) -> bool:
    """Whether the planner can give a value itself, and means no other by resolve_data."""
    if not isinstance(planner, DefaultSavePlanner):
        return False
    kind = type(planner)
    return (
        kind.resolve_data is DefaultSavePlanner.resolve_data
        and kind.transform_object is DefaultSavePlanner.transform_object
    )


def writes_its_state(planner: SavePlanner) -> bool:
    """Whether what the planner writes are the tensors of its state, as they are."""
    return _looks_up(planner) and type(planner).create_local_plan is DefaultSavePlanner.create_local_plan


def _looked_up(planner: Any, name: str) -> Any:
    return planner.lookup_object(MetadataIndex(name))


def _resolved(planner: SavePlanner, item: WriteItem, keys: PickleKeys) -> Leaf:
    name = item.index.fqn
    data = planner.resolve_data(item)
    if isinstance(data, torch.Tensor):
        return encode(data, name, repr(name), allowed=keys.allow(name))
    data.seek(0)
    try:
        return encode(torch.load(data, weights_only=True), name, repr(name), allowed=keys.allow(name))
    except UsageError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever reading a pickle raises
        if keys.allow(name):
            return Leaf(CODEC, data.getvalue())
        text = f"{name!r} cannot be saved: its planner pickles it, and torch.load refuses that: {error}"
        raise UsageError(
            text,
            hint=f"use DefaultSavePlanner, or make it a plain value; or connect(allow_pickle=[{name!r}])",
        ) from None


def archive(leaf: Leaf, name: str, keys: PickleKeys, how: str) -> io.BytesIO:
    """A torch.save archive of the value, as a load planner wants it. Raises RestoreError, DamagedError.

    A pickle goes to the planner as it is, for it to read, if its key is allowed. how: see check_allowed.
    """
    check_allowed(leaf, name, repr(name), keys, how=how)
    if leaf.codec == CODEC:
        return io.BytesIO(leaf.data)
    buffer = io.BytesIO()
    value = decode_leaf(leaf, repr(name))
    try:
        torch.save(value, buffer)
    except Exception as error:
        raise RestoreError(f"{name!r} cannot be handed to DCP: {error}", hint="read it with client.load") from error
    buffer.seek(0)
    return buffer
