"""Finds dicts in a state that are results of state_dict(): plain values in them do not reach the object.

Tensors in them share the object's memory, so load fills the object. Numbers are copies: the optimizer does not get the
rate. A result with plain names only cannot be distinguished from a dict of the user; there are no notes for it.
"""

from collections.abc import Collection, Iterable
from typing import Any

from ckptd.shared.format.layout import Path
from ckptd_client._load.verify import same_plain
from ckptd_client._state.naming import listed
from ckptd_client._state.tree import format_path, within

_MISSING = object()


def notes_of(state: Any, leaves: Iterable[tuple[Path, Any]]) -> list[str]:
    """Notes on plain values that change only a result of state_dict(); call it before they are assigned."""
    found: dict[Path, tuple[str, list[str]]] = {}
    for path, value in leaves:
        owner = owner_of(state, path)
        if owner is not None and not same_plain(_at(state, path), value):
            found.setdefault(owner[0], (owner[1], []))[1].append(format_path(path))
    return [
        f"your {kind} was not changed: {format_path(place)} is a dict that state_dict() gave, and no {kind} sees what "
        f"is put into it: {listed(keys)}; "
        f"pass load the {kind} itself, or give restored.{format_path(place)} to its load_state_dict"
        for place, (kind, keys) in found.items()
    ]


def hint_of(state: Any, paths: Iterable[Path], known: Collection[Path]) -> str:
    """The hint if missing paths are in a result of state_dict(); empty: none is.

    The dict of a new optimizer has no keys for its state. known: all paths of the checkpoint, because the hint helps
    only for an object that it has.
    """
    looked: set[Path] = set()
    for path in paths:
        owner = owner_of(state, path)
        if owner is None or owner[1] == "module" or owner[0] in looked:  # a module has all its names from the start
            continue
        looked.add(owner[0])
        if any(within(one, owner[0]) for one in known):
            return f"pass the {owner[1]} itself, not its state_dict()"
    return ""


def owner_of(state: Any, path: Path) -> tuple[Path, str] | None:
    """Path and kind of the outermost result of state_dict() around a path; None if there is none."""
    value = state
    for depth, (_, key) in enumerate(path):
        kind = _kind(value, root=not depth) if isinstance(value, dict) else ""
        if kind:
            return path[:depth], kind
        try:
            value = value[key]
        except (LookupError, TypeError):
            return None
    return None


def _kind(value: dict[Any, Any], *, root: bool) -> str:
    """The kind of object whose state_dict() a dict seems to be; empty for a dict of the user."""
    groups = value.get("param_groups")
    if "state" in value and isinstance(groups, list | tuple) and all(isinstance(group, dict) for group in groups):
        return "optimizer"
    if hasattr(value, "_metadata"):
        return "module"
    if root or not any(isinstance(key, str) and key.startswith("_") for key in value):
        return ""
    return "scheduler" if "last_epoch" in value else "object"  # private attributes: from a __dict__


def _at(state: Any, path: Path) -> Any:
    for _, key in path:
        try:
            state = state[key]
        except (LookupError, TypeError):
            return _MISSING
    return state
