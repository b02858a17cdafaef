"""Finds dicts in a state that some object's state_dict() gave: a plain value that is put there reaches no object.

Tensors in them share the object's memory, so load fills them. Numbers are copies: the optimizer never sees the rate.
A dict of the user's own looks alike where state_dict() gives plain names only; of such nothing is said.
"""

from collections.abc import Collection, Iterable
from typing import Any

from ckptd.shared.format.layout import Path
from ckptd_client._load.verify import same_plain
from ckptd_client._state.naming import listed
from ckptd_client._state.tree import format_path, within

_MISSING = object()


def notes_of(state: Any, leaves: Iterable[tuple[Path, Any]]) -> list[str]:
    """What to say of plain values before they are put into the state: those that change a dict of state_dict() only."""
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
    """What to type when places in a dict of state_dict() are missing; empty when none is in one.

    A new optimizer's dict has no place for its state. known: all places of the checkpoint: of an object of which it has
    nothing there is nothing to pass.
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
    """The outermost dict on the way to a place that state_dict() gave, and of what; None when there is none."""
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
    """Of what object a dict is the state_dict(), as far as it shows; empty for a dict of the user's own."""
    groups = value.get("param_groups")
    if "state" in value and isinstance(groups, list | tuple) and all(isinstance(group, dict) for group in groups):
        return "optimizer"
    if hasattr(value, "_metadata"):
        return "module"
    if root or not any(isinstance(key, str) and key.startswith("_") for key in value):
        return ""
    return "scheduler" if "last_epoch" in value else "object"  # private attributes: made of some __dict__


def _at(state: Any, path: Path) -> Any:
    for _, key in path:
        try:
            state = state[key]
        except (LookupError, TypeError):
            return _MISSING
    return state
