"""Tuples and lists with tensors that torch.distributed.checkpoint writes as one plain value.

ckptd gives each item a name. A state with those names gets the items from the one value.
"""

import contextlib
from collections.abc import Mapping
from typing import NamedTuple

import torch

from ckptd.shared.base.errors import UsageError
from ckptd.shared.format.layout import Leaf, Path
from ckptd_client._state.leaves import decode_leaf, encode_leaf
from ckptd_client._state.pickle import CODEC as PICKLE
from ckptd_client._state.tensors import is_tensor
from ckptd_client._state.tree import Flat, flatten, format_path


class Opened(NamedTuple):
    """The items of one value, by ckptd's names for them."""

    paths: dict[str, Path]
    tensors: dict[str, torch.Tensor]
    leaves: dict[str, Leaf]


def opened(paths: Mapping[str, Path], leaves: Mapping[str, Leaf], flat: Flat) -> dict[str, Opened]:
    """By name, the values of which the state has items as names. Inside Statefuls values stay as they are."""
    inner = {path[:depth] for path in flat.paths for depth in range(1, len(path))}
    found: dict[str, Opened] = {}
    for name, path in paths.items():
        leaf = leaves.get(name)
        if leaf is None or leaf.codec == PICKLE or path not in inner:
            continue
        if any(path[: len(prefix)] == prefix for prefix, _ in flat.statefuls):
            continue
        value = decode_leaf(leaf, format_path(path))
        if type(value) in (tuple, list) and value:
            with contextlib.suppress(UsageError):  # keys that a state must not have
                found[name] = _open(name, path, value)
    return found


def _open(name: str, path: Path, value: object) -> Opened:
    flat = flatten(value, is_tensor)
    names = [f"{name}.{inner}" for inner in flat.names]
    items = dict(zip(names, flat.values, strict=True))
    return Opened(
        {item: (*path, *rest) for item, rest in zip(names, flat.paths, strict=True)},
        {item: content for item, content in items.items() if is_tensor(content)},
        {item: encode_leaf(content, item) for item, content in items.items() if not is_tensor(content)},
    )
