"""Converts a nested state to named leaves and back. Independent of torch, files and messages.

A leaf is everything that is not a dict, a list or a tuple (exact types, and OrderedDict), an empty dict, and a list or
tuple that holds no tensor, no dict and no Stateful, however deep. The last rule keeps a random generator's tuple of 625
numbers one leaf, and gives the names that torch.distributed.checkpoint gives to the same state.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from ckptd.shared.base.errors import DamagedError, MismatchError, UsageError
from ckptd.shared.format.layout import Path, PathStep

MAX_DEPTH = 100
_MOST_KEY_CHARS = 40  # that a hint repeats
_DICTS = frozenset({dict, OrderedDict})
_SEQUENCES = frozenset({list, tuple})
_CONTAINERS = _DICTS | _SEQUENCES
_SCALARS = frozenset({type(None), bool, int, float, complex, str, bytes})
_INT_KEYS = range(-(1 << 63), 1 << 63)

IsTensor = Callable[[Any], bool]


@dataclass(frozen=True, slots=True)
class _Container:
    """A container: its exact type, its keys if it is a dict, and the nodes of its items (None for a leaf)."""

    kind: type[Any]
    keys: tuple[str | int, ...]
    children: tuple["_Node", ...]
    flat: bool  # all items are leaves


@dataclass(frozen=True, slots=True)
class _Call:
    """An object that state_dict() replaces."""

    owner: type[Any]
    content: "_Node"


_Node = _Container | _Call | None


@dataclass(slots=True)
class Structure:
    """The nesting of a state without its values. Equal structures give equal names in equal order."""

    root: "_Container | _Call"
    is_tensor: IsTensor = field(compare=False, repr=False)
    leaf_types: set[type] = field(compare=False, repr=False)  # no containers, no Statefuls: need no second check


@dataclass(frozen=True, slots=True)
class Flat:
    """A flattened state: three lists of one length, the nesting, and the Statefuls with the place of each."""

    names: list[str]
    paths: list[Path]
    values: list[Any]
    structure: Structure
    statefuls: list[tuple[Path, Any]]

    def in_stateful(self, path: Path) -> bool:
        """Whether the path is inside one of the Statefuls."""
        return any(within(path, prefix) for prefix, _ in self.statefuls)


def within(path: Path, prefix: Path) -> bool:
    """Whether the path is the prefix, or below it."""
    return path[: len(prefix)] == prefix


def format_path(path: Iterable[PathStep]) -> str:
    """A place in the state in Python notation: state['model']['w'][0]."""
    return "state" + "".join(f"[{key!r}]" for _, key in path)


def is_stateful(value: Any) -> bool:
    """Whether value is an object with state_dict() and load_state_dict(). A class never is."""
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict") and not isinstance(value, type)


def _is_leaf(value: Any, is_tensor: IsTensor, depth: int = 0) -> bool:
    kind = type(value)
    if kind in _SEQUENCES:
        if _SCALARS.issuperset(map(type, value)):
            return True
        if depth > MAX_DEPTH:
            return False  # left to flatten, which knows the path for the error
        return all(not is_tensor(item) and _is_plain(item, is_tensor, depth + 1) for item in value)
    return not value if kind in _DICTS else is_tensor(value) or not is_stateful(value)


def _is_plain(item: Any, is_tensor: IsTensor, depth: int) -> bool:
    return type(item) not in _DICTS and _is_leaf(item, is_tensor, depth)


class _Flattener:
    """Walks over a state and collects its leaves in order."""

    def __init__(self, is_tensor: IsTensor) -> None:
        self.is_tensor = is_tensor
        self.names: list[str] = []
        self.paths: list[Path] = []
        self.values: list[Any] = []
        self.statefuls: list[tuple[Path, Any]] = []
        self._above: set[int] = set()  # containers and Statefuls between the root and the current value

    def walk(self, value: Any, name: str, path: Path) -> _Node:
        if (path or type(value) not in _CONTAINERS) and _is_leaf(value, self.is_tensor):
            if not path:
                raise UsageError(
                    f"the state is a {type(value).__name__}", hint="pass a dict, as in save({'model': model}, step)"
                )
            self.names.append(name)
            self.paths.append(path)
            self.values.append(value)
            return None
        if id(value) in self._above or len(path) > MAX_DEPTH:
            if id(value) in self._above:
                place = format_path(path)
                raise UsageError(f"{place} contains itself", hint=f"leave {place} out of the state")
            text = f"{format_path(path[:1])} is nested deeper than {MAX_DEPTH} levels"
            raise UsageError(text, hint="save flatter values")
        self._above.add(id(value))
        node: _Node
        if type(value) in _CONTAINERS:
            node = self._container(value, name, path)
        else:
            self.statefuls.append((path, value))
            node = _Call(type(value), self.walk(value.state_dict(), name, path))
        self._above.discard(id(value))
        return node

    def _container(self, value: Any, name: str, path: Path) -> _Container:
        keys: tuple[str | int, ...] = ()
        steps: list[PathStep]
        if type(value) in _DICTS:
            keys = tuple(value)
            steps = [_dict_step(key, path) for key in keys]
            items = value.values()
        else:
            steps = [("l" if type(value) is list else "t", index) for index in range(len(value))]
            items = value
        prefix = f"{name}." if path else ""
        children = tuple(
            self.walk(item, f"{prefix}{step[1]}", (*path, step)) for step, item in zip(steps, items, strict=True)
        )
        return _Container(type(value), keys, children, flat=not any(children))


def _dict_step(key: Any, path: Path) -> PathStep:
    if type(key) is str:
        return ("k", key)
    if type(key) is int and key in _INT_KEYS:
        return ("i", key)
    parts = key if isinstance(key, tuple) else (key,)
    such = ".".join(map(str, parts))[:_MOST_KEY_CHARS]
    raise UsageError(
        f"{format_path(path)} has the key {key!r} of type {type(key).__name__}; keys are str or int (64 bits)",
        hint=f"a str as the key, such as {such!r}, or leave this key out",
    )


def flatten(state: Any, is_tensor: IsTensor) -> Flat:
    """Leaves of a nested state, in its own order, each named by its path joined with dots.

    The root is a dict, list, tuple or Stateful, and never a leaf; an empty one has no leaves. state_dict() of every
    Stateful is called once. Raises UsageError for a key that is no str or int, two leaves of one name, a name that is
    no valid text, and a cycle.
    """
    walker = _Flattener(is_tensor)
    root = walker.walk(state, "", ())
    assert root is not None  # noqa: S101 - for the type checker: a root that is a leaf was refused
    _check_names(walker.names, walker.paths)
    leaf_types = set(map(type, walker.values)) - _CONTAINERS
    return Flat(walker.names, walker.paths, walker.values, Structure(root, is_tensor, leaf_types), walker.statefuls)


def _check_names(names: list[str], paths: list[Path]) -> None:
    first: dict[str, Path] = {}
    for name, path in zip(names, paths, strict=True):
        if first.setdefault(name, path) is not path:
            raise UsageError(
                f"{format_path(first[name])} and {format_path(path)} both have the name {name!r}",
                hint="rename one of the two keys",
            )
        if not name.isascii() and name != name.encode(errors="replace").decode():
            raise UsageError(f"the key of {format_path(path)} is not valid Unicode", hint="rename the key")


def collect(state: Any, structure: Structure) -> list[Any] | None:
    """Leaf values of a state that is nested like structure, in the order of flatten; None if it is nested otherwise.

    The hot path of later saves: builds no names and no paths. Calls state_dict() of every Stateful it meets.
    """
    values: list[Any] = []
    if not _gather(state, structure.root, values):
        return None
    fresh = set(map(type, values)) - structure.leaf_types
    if fresh:
        is_tensor = structure.is_tensor
        if not all(_is_leaf(value, is_tensor) for value in values if type(value) in fresh):
            return None
        structure.leaf_types |= fresh - _CONTAINERS
    return values


def _gather(value: Any, node: _Container | _Call, values: list[Any]) -> bool:
    """Appends the leaf values, unchecked; whether value is nested like node."""
    if type(node) is _Call:
        return type(value) is node.owner and _gather_child(value.state_dict(), node.content, values)
    assert type(node) is _Container  # noqa: S101 - for the type checker
    if type(value) is not node.kind:
        return False
    if node.kind in _DICTS:
        if tuple(value) != node.keys:
            return False
        value = value.values()
    elif len(value) != len(node.children):
        return False
    if node.flat:
        values.extend(value)
        return True
    return all(_gather_child(item, child, values) for item, child in zip(value, node.children, strict=True))


def _gather_child(value: Any, node: _Node, values: list[Any]) -> bool:
    if node is None:
        values.append(value)
        return True
    return _gather(value, node, values)


def unflatten(items: Iterable[tuple[Path, Any]]) -> Any:
    """The nested state of leaves with their paths; dict keys in the order of first appearance, {} for no items.

    Raises DamagedError when the paths contradict each other: a place that is both leaf and container, or filled twice,
    a list with gaps, items of a list among the keys of a dict.
    """
    root: _Branch | None = None
    for path, value in items:
        if not 0 < len(path) <= MAX_DEPTH:
            raise DamagedError(f"a leaf at a path of {len(path)} steps; 1 to {MAX_DEPTH} are possible")
        root = root or _Branch(path[0][0])
        branch = root
        for index, (step, below) in enumerate(pairwise(path)):
            branch = branch.enter(step, below[0], path[:index])
        branch.put(path[-1], value, path[:-1])
    return {} if root is None else root.build(())


class _Branch:
    """A container under construction."""

    __slots__ = ("items", "kind")

    def __init__(self, letter: str) -> None:
        self.kind = "d" if letter in "ki" else letter
        self.items: dict[str | int, Any] = {}

    def enter(self, step: PathStep, letter: str, path: Path) -> "_Branch":
        self._check(step, path)
        child = self.items.get(step[1])
        if child is None:
            child = self.items[step[1]] = _Branch(letter)
        elif type(child) is not _Branch:
            raise DamagedError(f"{format_path((*path, step))} is both a value and a container")
        return child

    def put(self, step: PathStep, value: Any, path: Path) -> None:
        self._check(step, path)
        if step[1] in self.items:
            raise DamagedError(f"{format_path((*path, step))} is given twice")
        self.items[step[1]] = (value,)  # boxed, since None and any other value is a possible leaf

    def _check(self, step: PathStep, path: Path) -> None:
        letter, key = step
        if self.kind != ("d" if letter in "ki" else letter) or (letter == "k") is not isinstance(key, str):
            raise DamagedError(f"{format_path(path)} has items of different kinds of container")

    def build(self, path: Path) -> Any:
        """The finished container."""
        keys: Sequence[str | int] = list(self.items)
        if self.kind != "d":
            keys = range(len(keys))
            if not all(index in self.items for index in keys):
                raise DamagedError(f"{format_path(path)} lacks some of its items")
        values = [self._finished(key, path) for key in keys]
        if self.kind == "d":
            return dict(zip(keys, values, strict=True))
        return values if self.kind == "l" else tuple(values)

    def _finished(self, key: str | int, path: Path) -> Any:
        item = self.items[key]
        return item.build((*path, ("k", key))) if type(item) is _Branch else item[0]


def assign(state: Any, path: Path, value: Any) -> None:
    """Puts a leaf into the user's own containers, in place. A tuple on the way is replaced by a changed copy.

    Raises MismatchError when the state has no such place, UsageError when the root itself would have to be replaced.
    """
    holders = [state]
    try:
        for _, key in path[:-1]:
            holders.append(holders[-1][key])
        for holder, (_, key) in zip(reversed(holders), reversed(path), strict=True):
            if not isinstance(holder, tuple):
                holder[key] = value
                return
            value = _with_item(holder, key, value)
    except (LookupError, TypeError) as error:
        raise MismatchError(f"the state has no place {format_path(path)}: {error}") from error
    raise UsageError(
        f"{format_path(path)} cannot be set: a tuple cannot change", hint="make the state a dict or a list"
    )


def _with_item(items: tuple[Any, ...], index: Any, value: Any) -> tuple[Any, ...]:
    changed = list(items)
    changed[index] = value
    return tuple(changed)
