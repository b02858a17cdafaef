"""One file as torch.save writes it: a pickle of references and one entry per storage."""

from collections.abc import Mapping
from typing import Any

from ckptd.checkpoint.export.names import Chosen
from ckptd.checkpoint.export.plan import FilePlan, Tensor
from ckptd.shared.base.errors import UsageError
from ckptd.shared.format.layout import Path
from ckptd.shared.torchfile.pickling import TensorRef, dumps
from ckptd.shared.torchfile.zip_write import Archive

_MAX_ROW = 1 << 20  # items of a list; what claims more stays a dict


def plan_file(name: str, chosen: list[Chosen], paths: Mapping[str, Path] | None = None) -> FilePlan:
    """The file. paths: places in the nesting, by the name in the checkpoint; None for one flat dict.

    Tied names share a storage. Torch reads it with weights_only=True.
    """
    keys: dict[str, int] = {}
    refs: dict[str, TensorRef] = {}
    for one in chosen:
        key = keys.setdefault(one.tensor.name, len(keys))
        refs[one.source] = TensorRef(key, one.dtype, one.tensor.shape, one.nbytes)
    flat: Any = {one.name: refs[one.source] for one in chosen}
    zipped = Archive()
    zipped.add("data.pkl", dumps(flat if paths is None else nest(refs, paths)))
    zipped.add("byteorder", b"little")
    targets: list[tuple[Tensor, str, int]] = []
    for one in chosen:
        if keys.get(one.tensor.name) == len(targets):
            targets.append((one.tensor, one.dtype, zipped.reserve(f"data/{len(targets)}", one.nbytes)))
    zipped.add("version", b"3\n")
    zipped.close()
    return FilePlan(name, zipped.nbytes, tuple(zipped.blobs), tuple(targets), tuple(one.name for one in chosen))


class _Node:
    """A container being filled: its kind and its items by key."""

    def __init__(self) -> None:
        self.kind = "k"
        self.items: dict[str | int, _Node | TensorRef] = {}

    def built(self) -> Any:
        """As plain containers; elements of a list or tuple other than tensors become None."""
        items = {key: item.built() if isinstance(item, _Node) else item for key, item in self.items.items()}
        if self.kind not in "lt":
            return items
        last = max((key for key in items if isinstance(key, int)), default=-1)
        if last >= _MAX_ROW or any(isinstance(key, str) for key in items):
            return items
        row = [items.get(i) for i in range(last + 1)]
        return row if self.kind == "l" else tuple(row)


def nest(refs: Mapping[str, TensorRef], paths: Mapping[str, Path]) -> Any:
    """The tensors at their places in nested containers."""
    root = _Node()
    for name, ref in refs.items():
        path = paths.get(name) or (("k", name),)
        node = root
        for i, (kind, key) in enumerate(path):
            node.kind = kind
            if i == len(path) - 1:
                node.items[key] = ref
                break
            below = node.items.setdefault(key, _Node())
            if isinstance(below, TensorRef):
                raise UsageError(f"{name!r} lies below a tensor", hint="export without --nested")
            node = below
    return root.built()
