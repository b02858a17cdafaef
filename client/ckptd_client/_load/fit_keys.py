"""Restores int keys of dicts that torch.distributed.checkpoint turned into text, from the state and optimizers."""

from collections.abc import Mapping
from typing import Any

import torch

from ckptd.shared.format.layout import Leaf, Path
from ckptd_client._state.leaves import decode_leaf
from ckptd_client._state.pickle import CODEC as PICKLE
from ckptd_client._state.tree import Flat, format_path


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
