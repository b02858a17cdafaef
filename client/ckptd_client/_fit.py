"""Fits a checkpoint onto a state: which bytes go to which tensor, which leaf to which place, or what differs."""

from dataclasses import dataclass, field
from typing import Any

import torch

from ckptd.protocol.errors import MismatchError
from ckptd.protocol.layout import Layout, Leaves, Path, TensorEntry
from ckptd_client._leaves import decode_leaf
from ckptd_client._restore import Target
from ckptd_client._tensors import DTYPE_OF, describe, is_tensor
from ckptd_client._tree import Flat, assign, flatten, format_path, unflatten

_SHOWN = 8


@dataclass(slots=True)
class Fit:
    """Where everything goes. Keeps the tensors it points into alive."""

    targets: list[Target] = field(default_factory=list)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)  # by name: what holds the value afterwards
    through: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)  # (read here, copy there)
    statefuls: list[tuple[Path, Any]] = field(default_factory=list)
    leaves: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)

    def finish(self, state: Any) -> None:
        """After the bytes are in: strided and device tensors, plain leaves, and load_state_dict of each Stateful."""
        with torch.no_grad():
            for scratch, tensor in self.through:
                tensor.copy_(scratch)
        for name, value in self.leaves.items():
            if not any(_within(self.paths[name], prefix) for prefix, _ in self.statefuls):
                assign(state, self.paths[name], value)
        for prefix, stateful in sorted(self.statefuls, key=lambda item: -len(item[0])):
            stateful.load_state_dict(self._content(prefix))

    def _content(self, prefix: Path) -> Any:
        items = []
        for name, path in self.paths.items():
            if _within(path, prefix):
                value = self.tensors[name] if name in self.tensors else self.leaves[name]
                items.append((path[len(prefix) :], value))
        return unflatten(items)


def _within(path: Path, prefix: Path) -> bool:
    return path[: len(prefix)] == prefix


def fit(state: Any, layout: Layout, leaves: Leaves, *, where: str) -> Fit:
    """Matches names, shapes and dtypes. Raises MismatchError that lists the first differences.

    Inside a Stateful the checkpoint decides what there is: its load_state_dict judges. A tensor it already has, of the
    same shape and dtype, is read in place.
    """
    flat = flatten(state, is_tensor)
    here = dict(zip(flat.names, flat.values, strict=True))
    entries = {entry.name: entry for entry in layout.tensors}
    entries |= {name: entries[owner] for name, owner in layout.aliases.items()}
    differences = _differences(flat, here, entries, leaves, layout)
    if differences:
        shown = "\n  ".join(differences[:_SHOWN])
        more = f"\n  ... and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
        raise MismatchError(f"the state does not fit the checkpoint {where}:\n  {shown}{more}")
    out = Fit(statefuls=flat.statefuls, paths=layout.paths)
    filled: dict[tuple[int, int], str] = {}
    for name, entry in entries.items():
        tensor = here.get(name)
        if not is_tensor(tensor) or (tuple(tensor.shape), tensor.dtype) != (entry.sizes, DTYPE_OF[entry.dtype]):
            tensor = torch.empty(entry.sizes, dtype=DTYPE_OF[entry.dtype])
        out.tensors[name] = tensor
        place = (tensor.data_ptr(), entry.data_offset)
        if entry.nbytes and place not in filled:  # tied here too: its bytes come once
            filled[place] = name
            out.targets.append(_target(out, tensor, entry))
    out.leaves = {name: decode_leaf(leaf, format_path(layout.paths[name])) for name, leaf in leaves.leaves.items()}
    return out


def _target(out: Fit, tensor: torch.Tensor, entry: TensorEntry) -> Target:
    plain = tensor.detach()
    if plain.device.type != "cpu" or not plain.is_contiguous() or plain.is_conj() or plain.is_neg():
        scratch = torch.empty(entry.sizes, dtype=tensor.dtype)
        out.through.append((scratch, plain))
        plain = scratch
    return Target(entry.data_offset, entry.nbytes, plain.data_ptr())


def _differences(
    flat: Flat, here: dict[str, Any], entries: dict[str, TensorEntry], leaves: Leaves, layout: Layout
) -> list[str]:
    """What differs outside of Statefuls, in words."""
    prefixes = [prefix for prefix, _ in flat.statefuls]
    paths = dict(zip(flat.names, flat.paths, strict=True))
    differences = [
        f"{format_path(prefix)}: {type(stateful).__name__} in the state, nothing in the checkpoint"
        for prefix, stateful in flat.statefuls
        if not any(_within(path, prefix) for path in layout.paths.values())
    ]
    for name in [*flat.names, *(n for n in layout.paths if n not in here)]:
        path = paths.get(name) or layout.paths[name]
        if any(_within(path, prefix) for prefix in prefixes):
            continue
        difference = _difference(name, here, entries, leaves)
        if difference:
            differences.append(f"{format_path(path)}: {difference}")
    return differences


def _difference(name: str, here: dict[str, Any], entries: dict[str, TensorEntry], leaves: Leaves) -> str:
    saved = entries.get(name)
    if name not in here:
        return "in the checkpoint, not in the state"
    value = here[name]
    if not is_tensor(value):
        if saved is not None:
            return f"a tensor in the checkpoint, {type(value).__name__} in the state"
        return "" if name in leaves.leaves else "in the state, not in the checkpoint"
    if saved is None:
        return "a tensor in the state, none in the checkpoint"
    code, sizes = describe(value, name)
    if (code, sizes) != (saved.dtype, saved.sizes):
        return f"{saved.dtype} {list(saved.sizes)} in the checkpoint, {code} {list(sizes)} in the state"
    return "its elements share memory, as after expand()" if _shares_elements(value) else ""


def _shares_elements(tensor: torch.Tensor) -> bool:
    """Whether some elements of a tensor are the same memory, so that it cannot be filled."""
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
