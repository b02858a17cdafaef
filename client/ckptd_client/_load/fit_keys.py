"""What torch.distributed.checkpoint writes in another form: int keys of dicts as text, a container as one value."""

import contextlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from ckptd.shared.base.errors import UsageError
from ckptd.shared.format.layout import Leaf, Path
from ckptd_client._state.leaves import decode_leaf, encode_leaf
from ckptd_client._state.pickle import CODEC as PICKLE
from ckptd_client._state.tensors import is_tensor
from ckptd_client._state.tree import Flat, flatten, format_path


def settled(paths: Mapping[str, Path], leaves: Mapping[str, Leaf], flat: Flat) -> dict[str, Path]:
    """The paths of a checkpoint, with ints where the state has them and where optimizers number parameters."""
    here = dict(zip(flat.names, flat.paths, strict=True))
    counted = {prefix for prefix, value in flat.statefuls if isinstance(value, torch.optim.Optimizer)}
    counted |= {path[:-3] for name, path in paths.items() if _counts(path, leaves.get(name))}
    return {
        name: _like(path, here[name]) if name in here else _numbered(path, [p for p, _ in flat.statefuls], counted)
        for name, path in paths.items()
    }


def _like(path: Path, own: Path) -> Path:
    """The saved path with the int keys of the state's path."""
    if len(path) != len(own):
        return path
    pairs = zip(path, own, strict=True)
    return tuple(mine if mine[0] == "i" and saved == ("k", str(mine[1])) else saved for saved, mine in pairs)


def _counts(path: Path, leaf: Leaf | None) -> bool:
    """Whether this is an optimizer's list of parameter numbers; then the keys of its state are numbers too."""
    match path:
        case (*_, ("k", "param_groups"), ("l", _), ("k", "params")) if leaf is not None and leaf.codec != PICKLE:
            value: Any = decode_leaf(leaf, format_path(path))
            return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)
    return False


def _numbered(path: Path, statefuls: list[Path], counted: set[Path]) -> Path:
    """The path with an int key for an optimizer's state, only inside Statefuls."""
    for at, (letter, key) in enumerate(path[2:], 2):
        if letter != "k" or path[at - 1] != ("k", "state") or path[: at - 1] not in counted:
            continue
        text = str(key)
        inside = any(path[: len(prefix)] == prefix for prefix in statefuls)
        if inside and text.isdecimal() and str(int(text)) == text:
            return (*path[:at], ("i", int(text)), *path[at + 1 :])
    return path


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
