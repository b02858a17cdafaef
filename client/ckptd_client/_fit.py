"""Fits a checkpoint onto a state: which bytes go to which tensor, which leaf to which place, or what differs."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch

from ckptd.protocol.errors import MismatchError
from ckptd.protocol.layout import Layout, Leaves, Path, TensorEntry
from ckptd_client._leaves import decode_leaf
from ckptd_client._restore import Target
from ckptd_client._tensors import DTYPE_OF, alias_key, describe, is_tensor
from ckptd_client._tree import Flat, assign, flatten, format_path, unflatten

_SHOWN = 8


@dataclass(slots=True)
class Fit:
    """Where everything goes. Keeps the tensors it points into alive."""

    targets: list[Target] = field(default_factory=list)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)  # by name: what holds the value afterwards
    through: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)  # (read here, copy there)
    shared: list[tuple[str, str, torch.Tensor, torch.Tensor]] = field(default_factory=list)  # (name, of whom, as above)
    statefuls: list[tuple[Path, Any]] = field(default_factory=list)
    leaves: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)

    def settle_shared(self) -> None:
        """After the bytes are in: tensors that share memory here get theirs. Raises MismatchError when those differ."""
        with torch.no_grad():
            for _, _, scratch, tensor in self.shared:
                tensor.copy_(scratch)
        for name, other, scratch, tensor in self.shared:
            if not torch.equal(_bits(tensor), _bits(scratch)):
                mine, others = format_path(self.paths[name]), format_path(self.paths[other])
                raise MismatchError(f"{mine} and {others} share memory in the state, but differ in the checkpoint")

    def finish(self, state: Any) -> None:
        """After the bytes are in: strided and device tensors, plain leaves, and load_state_dict of each Stateful."""
        with torch.no_grad():
            for scratch, tensor in self.through:
                tensor.copy_(scratch)
        for name, value in self.leaves.items():
            if not any(_within(self.paths[name], prefix) for prefix, _ in self.statefuls):
                assign(state, self.paths[name], value)
        for prefix, stateful in sorted(self.statefuls, key=lambda item: -len(item[0])):
            try:
                stateful.load_state_dict(self._content(prefix))
            except (RuntimeError, ValueError) as error:
                text = f"{format_path(prefix)}: {type(stateful).__name__} does not take what was saved: {error}"
                raise MismatchError(text) from error

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
    filled: set[tuple[Hashable, int]] = set()
    wanted: list[tuple[str, torch.Tensor, TensorEntry]] = []
    for name, entry in entries.items():
        tensor = here.get(name)
        if not is_tensor(tensor) or (tuple(tensor.shape), tensor.dtype) != (entry.sizes, DTYPE_OF[entry.dtype]):
            tensor = torch.empty(entry.sizes, dtype=DTYPE_OF[entry.dtype])
        out.tensors[name] = tensor
        place = (alias_key(tensor), entry.data_offset)
        if entry.nbytes and place not in filled:  # tied here too: its bytes come once
            filled.add(place)
            wanted.append((name, tensor, entry))
    sharing = _sharing(wanted)
    for name, tensor, entry in wanted:
        if name in sharing:
            scratch = torch.empty(entry.sizes, dtype=tensor.dtype)
            out.shared.append((name, sharing[name], scratch, tensor.detach()))
            out.targets.append(Target(entry.data_offset, entry.nbytes, scratch.data_ptr()))
        else:
            out.targets.append(_target(out, tensor, entry))
    out.leaves = {name: decode_leaf(leaf, format_path(layout.paths[name])) for name, leaf in leaves.leaves.items()}
    return out


def _sharing(wanted: list[tuple[str, torch.Tensor, TensorEntry]]) -> dict[str, str]:
    """Tensors whose memory overlaps that of another, and of which: they were saved apart."""
    storages: dict[tuple[torch.device, int], list[tuple[int, int, str]]] = {}
    for name, tensor, _ in wanted:
        first = int(tensor.storage_offset()) * tensor.itemsize
        extent = 1 + sum(int(step) * (size - 1) for step, size in zip(tensor.stride(), tensor.shape, strict=True))
        storage = (tensor.device, tensor.untyped_storage().data_ptr())
        storages.setdefault(storage, []).append((first, first + extent * tensor.itemsize, name))
    sharing: dict[str, str] = {}
    for spans in storages.values():
        end, last = 0, ""
        for start, stop, name in sorted(spans):
            if start < end:
                sharing[name] = last
                sharing.setdefault(last, name)
            if stop > end:
                end, last = stop, name
    return sharing


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


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
