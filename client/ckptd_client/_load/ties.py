"""Tensors that were one when they were saved: they become one again where an object takes over what it is given.

What the state has of its own stays as it is: a model whose weights are not tied any more gets two equal tensors. But
for optimizers: of their state the checkpoint decides what there is.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import torch

from ckptd.shared.format.layout import Layout, Path


class Kind(NamedTuple):
    """What a saved tensor is, all of its boxes together."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def ties_of(layouts: Sequence[Layout]) -> dict[str, str]:
    """Each tied name with the name that holds its bytes, by the first layout that has the name. Pure."""
    ties: dict[str, str] = {}
    if not any(layout.aliases for layout in layouts):
        return ties
    alone: set[str] = set()
    for layout in layouts:
        ties |= {name: owner for name, owner in layout.aliases.items() if name not in ties and name not in alone}
        alone.update(entry.name for entry in layout.tensors if entry.name not in ties)
    return ties


def groups_of(ties: Mapping[str, str], paths: Mapping[str, Path], prefix: Path) -> list[list[Path]]:
    """Places below prefix that were one tensor, counted from there. paths: of all names that are loaded. Pure."""
    groups: dict[str, list[Path]] = {}
    for name, owner in ties.items():
        group = groups.setdefault(owner, [paths[owner]] if owner in paths else [])
        group += [paths[name]] if name in paths else []
    inside = ([path[len(prefix) :] for path in group if path[: len(prefix)] == prefix] for group in groups.values())
    return [group for group in inside if len(group) > 1]


class Homes:
    """Which tensor holds the value of each name: of tied names that an object is given, the first one's for all.

    common: names that are tied again even if the state has a tensor of each. Keeps the tensors.
    """

    def __init__(self, ties: Mapping[str, str], common: Collection[str]) -> None:
        self._ties = ties
        self._common = common
        self._first: dict[tuple[str, Kind], torch.Tensor] = {}  # by the name that held the bytes

    def of(self, name: str, kind: Kind, own: torch.Tensor | None, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The tensor for a name. own: the state's, if it can hold the value. make: a new one; raises what it does."""
        owner = self._ties.get(name, name), kind
        first = self._first.get(owner)
        if first is not None and (own is None or name in self._common):
            return first.detach() if first.requires_grad else first
        tensor = make() if own is None else own
        self._first.setdefault(owner, tensor)
        return tensor
