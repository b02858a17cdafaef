"""Tensors that were tied when they were saved: they are tied again where an object adopts the loaded tensors.

Tensors of the state stay as they are: a model whose weights are not tied any more gets two equal tensors. In the state
of optimizers the checkpoint decides.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import torch

from ckptd.shared.format.layout import Layout, Path


class Kind(NamedTuple):
    """Shape and dtype of a saved tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def ties_of(layouts: Sequence[Layout]) -> dict[str, str]:
    """By tied name the name with its bytes, from the first layout that has the name. Pure."""
    ties: dict[str, str] = {}
    if not any(layout.aliases for layout in layouts):
        return ties
    alone: set[str] = set()
    for layout in layouts:
        ties |= {name: owner for name, owner in layout.aliases.items() if name not in ties and name not in alone}
        alone.update(entry.name for entry in layout.tensors if entry.name not in ties)
    return ties


def groups_of(ties: Mapping[str, str], paths: Mapping[str, Path], prefix: Path) -> list[list[Path]]:
    """Paths, relative to prefix, that were one tensor. paths: of all loaded names. Pure."""
    groups: dict[str, list[Path]] = {}
    for name, owner in ties.items():
        group = groups.setdefault(owner, [paths[owner]] if owner in paths else [])
        group += [paths[name]] if name in paths else []
    inside = ([path[len(prefix) :] for path in group if path[: len(prefix)] == prefix] for group in groups.values())
    return [group for group in inside if len(group) > 1]


class Homes:
    """The tensor for the value of each name: one for all tied names that an object adopts.

    common: names that are tied again even if the state has separate tensors. Keeps the tensors.
    """

    def __init__(self, ties: Mapping[str, str], common: Collection[str]) -> None:
        self._ties = ties
        self._common = common
        self._first: dict[tuple[str, Kind], torch.Tensor] = {}  # by the name with the bytes

    def of(self, name: str, kind: Kind, own: torch.Tensor | None, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The tensor for a name. own: the state's tensor if it can hold the value. make: creates one, and may raise."""
        owner = self._ties.get(name, name), kind
        first = self._first.get(owner)
        if first is not None and (own is None or name in self._common):
            return first.detach() if first.requires_grad else first
        tensor = make() if own is None else own
        self._first.setdefault(owner, tensor)
        return tensor
