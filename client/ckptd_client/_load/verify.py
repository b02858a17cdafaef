"""Compares an object's state_dict() after load_state_dict with the saved values: dtype, shape and bits.

load_state_dict may convert: torch's optimizers cast their state to the dtype of the parameters, and rebuild lists and
text in it. An optimizer's state is restored to the saved values; other differences are errors or notes, also tied
tensors of that state that are separate now.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import xxhash

from ckptd.shared.base.errors import CkptdError, MismatchError, UsageError
from ckptd.shared.base.wording import told
from ckptd.shared.format.layout import Path, PathStep
from ckptd_client._load.optimizer_kind import GROUPS, is_torchs_own
from ckptd_client._state.leaves import encode_leaf
from ckptd_client._state.naming import listed
from ckptd_client._state.tensors import CODE_OF, Shard, alias_key, is_tensor, local_of, shard_of
from ckptd_client._state.tree import assign, flatten, format_path, unflatten

_SHOWN = 8
_STATE: PathStep = ("k", "state")
_MISSING = object()


class Item(NamedTuple):
    """A saved value, and its path below the object."""

    path: Path
    value: Any


def optimizers_in(paths: Iterable[Path]) -> set[Path]:
    """Paths of dicts that look like the state_dict() of an optimizer."""
    return {path[:at] for path in paths for at, step in enumerate(path) if step == GROUPS}


def is_kept(path: Path, optimizers: Iterable[Path]) -> bool:
    """Whether a path is in the state that one of these optimizers keeps of its parameters."""
    return any(_below(path, (*top, _STATE)) for top in optimizers)


class Marks:
    """Digests of the arguments of a load_state_dict that might write to them: see check.

    No digests for torch's own, of a module or an optimizer without hooks: it does not write to its arguments.
    """

    def __init__(self, stateful: Any, content: Iterable[tuple[Path, Any]]) -> None:
        tensors = [] if is_torchs_own(stateful) else [(_name(path), item) for path, item in content if is_tensor(item)]
        self._digests = {name: _digest(tensor) for name, tensor in tensors}

    def changed(self, name: str, tensor: Any) -> bool:
        """Whether this tensor of the content was written since."""
        return name in self._digests and _digest(tensor) != self._digests[name]


def _digest(tensor: torch.Tensor) -> bytes:
    return b"".join(
        xxhash.xxh3_128_digest(bytes_of(chunk.local.detach()).cpu().numpy().data)
        for chunk in shard_of(tensor, "it").chunks
    )


def check(  # noqa: PLR0913 - keyword-only
    prefix: Path, stateful: Any, content: Iterable[tuple[Path, Any]], *, strict: bool,
    tied: Sequence[Sequence[Path]] = (), marks: Marks | None = None,
) -> list[str]:  # fmt: skip
    """Compares a Stateful with the content that its load_state_dict got. Returns notes.

    Restores an optimizer's state, also inside another object's state_dict(), where load_state_dict changed it. Calls
    state_dict(), two or three more times after a change. Compares bits of tensors that load_state_dict copied; for
    others, which are the same memory, digests before and after: marks. strict: a saved tensor that the object lacks is
    an error, else a note. tied: paths that were one tensor; in an optimizer's state they must be one again. Raises
    MismatchError with the keys.
    """
    saved = {_name(path): Item(path, value) for path, value in content}
    tops = optimizers_in(item.path for item in saved.values())
    kept = {name for name, item in saved.items() if is_kept(item.path, tops)}
    looked = {name: item for name, item in saved.items() if name in kept or is_tensor(item.value)}
    if not looked:  # the state_dict() of an object without tensors, such as a data loader, may be slow
        return []
    found = _found(prefix, stateful, looked.values())
    ties = [[name for name in map(_name, group) if name in kept] for group in tied]
    separated = _separated(ties, found)
    changed = {
        name: item
        for name, item in looked.items()
        if name in kept and (name in separated or _difference(item.value, found.get(name, _MISSING)))
    }
    if changed:
        _restore(stateful, changed, found)
        found = _found(prefix, stateful, looked.values())
    lost = [name for name in looked if name not in found]
    differences = [
        f"{format_path((*prefix, *item.path))}: {difference}"
        for name, item in looked.items()
        if name in found and (difference := _difference(item.value, found[name]) or _written(name, item, marks))
    ]
    pairs = _separated(ties, found)
    places = {name: format_path((*prefix, *saved[name].path)) for pair in pairs.items() for name in pair}
    differences += [
        f"{places[name]}: another tensor than {places[first]}, they were one"
        for name, first in pairs.items()
        if name != first
    ]
    lines = [f"{format_path((*prefix, *looked[name].path))}" for name in lost]
    what = f"{type(stateful).__name__}.load_state_dict"
    if differences or (strict and lost):
        raise _mismatch(prefix, what, differences + [f"{line}: saved, and not there" for line in lines if strict])
    groups = [
        name for name in saved if name not in looked and any(_below(saved[name].path, (*t, GROUPS)) for t in tops)
    ]
    reset = [name for name in groups if name in found and not same_plain(saved[name].value, found[name])]
    added = [name for name, value in found.items() if name not in saved and is_tensor(value)]
    return [
        *_note(f"{what} left out", lines),
        *_note(f"{what} set otherwise than saved", [format_path((*prefix, *saved[name].path)) for name in reset]),
        *_note(f"{what} was given nothing for", [f"{format_path(prefix)}: {name}" for name in added]),
    ]


def _mismatch(prefix: Path, what: str, differences: list[str]) -> MismatchError:
    shown = "\n  ".join(differences[:_SHOWN])
    more = f"\n  ... and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
    text = f"{format_path(prefix)}: {what} changed what was saved:\n  {shown}{more}"
    return MismatchError(text, hint="pass load what this object wraps, or keep values as load_state_dict is given them")


def _note(what: str, places: list[str]) -> list[str]:
    return [f"{what} {listed(places)}"] if places else []


def _name(path: Path) -> str:
    return ".".join(str(key) for _, key in path)


def _below(path: Path, top: Path) -> bool:
    return path[: len(top)] == top


def _found(prefix: Path, stateful: Any, saved: Iterable[Item]) -> dict[str, Any]:
    """The values of the object's state_dict() now, by name. Raises MismatchError if it is no valid state.

    A value that was saved as one plain value, such as a defaultdict, stays one here, even if the object has a dict now.
    """
    try:
        flat = flatten({"": stateful}, is_tensor)
    except CkptdError as error:
        raise MismatchError(f"{format_path(prefix)}: after load_state_dict: {error.message}") from error
    except Exception as error:  # a user's state_dict() may raise any exception
        text = f"{format_path(prefix)}: state_dict() after load_state_dict: {told(error)}"
        raise MismatchError(text) from error
    found = {_name(path[1:]): value for path, value in zip(flat.paths, flat.values, strict=True)}
    for item in saved:
        if isinstance(item.value, dict | list | tuple) and _name(item.path) not in found:
            pairs = zip(flat.paths, flat.values, strict=True)
            below = [(path[1 + len(item.path) :], value) for path, value in pairs if _below(path[1:], item.path)]
            if below:
                found[_name(item.path)] = unflatten(below)
    return found


def _restore(stateful: Any, changed: Mapping[str, Item], found: Mapping[str, Any]) -> None:
    """Assigns saved values in the containers of state_dict(); no effect if these are copies.

    On the device that load_state_dict chose.
    """
    live = stateful.state_dict()
    moved: dict[tuple[int, torch.device], torch.Tensor] = {}  # so that tied tensors stay tied
    for name, item in changed.items():
        value, there = item.value, found.get(name)
        if is_tensor(value) and is_tensor(there):
            key = id(value), there.device
            if key not in moved:
                moved[key] = value.to(there.device)
            value = moved[key]
        try:
            assign(live, item.path, value)
        except CkptdError:
            continue  # the next comparison reports it


def _separated(ties: Iterable[Sequence[str]], found: Mapping[str, Any]) -> dict[str, str]:
    """Names that were one tensor and are several now, each with the first of them; includes the first one."""
    out: dict[str, str] = {}
    for group in ties:
        there = [name for name in group if is_tensor(found.get(name))]
        if len({alias_key(local_of(found[name])) for name in there}) > 1:
            out |= dict.fromkeys(there, there[0])
    return out


# --- one value


def _written(name: str, item: Item, marks: Marks | None) -> str:
    changed = marks is not None and is_tensor(item.value) and marks.changed(name, item.value)
    return "other values than were saved" if changed else ""


def _difference(saved: Any, found: Any) -> str:
    """A text for the difference from the saved value; empty: equal."""
    if found is saved:
        return ""
    if is_tensor(saved):
        return _tensors_differ(saved, found)
    if is_tensor(found) and found.numel() == 1 and isinstance(saved, int | float):
        return "" if found.item() == saved else f"{found.item()}, {saved!r} was saved"  # torch converts old steps
    return "" if same_plain(saved, found) else "another value than was saved"


def _tensors_differ(saved: torch.Tensor, found: Any) -> str:
    if not is_tensor(found):
        return f"{type(found).__name__}, a tensor was saved"
    if (saved.dtype, saved.shape) != (found.dtype, found.shape):
        return f"{_kind(found)}, {_kind(saved)} was saved"
    try:
        pairs = _pairs(saved, shard_of(saved, "it"), shard_of(found, "it"))
        return "" if all(_same_bits(*pair) for pair in pairs) else "other values than were saved"
    except UsageError as error:
        return error.message


def _kind(tensor: torch.Tensor) -> str:
    return f"{CODE_OF.get(tensor.dtype, tensor.dtype)} {list(tensor.shape)}"


def _pairs(tensor: torch.Tensor, saved: Shard, found: Shard) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of equal elements of both; none if their boxes differ."""
    boxes = {chunk.box: chunk.local for chunk in saved.chunks}
    whole = boxes.get(((0,) * tensor.dim(), tuple(tensor.shape)))
    for chunk in found.chunks:
        if chunk.box in boxes:
            yield boxes[chunk.box], chunk.local
        elif whole is not None:
            part = tuple(slice(first, first + size) for first, size in zip(chunk.offsets, chunk.sizes, strict=True))
            yield whole[part], chunk.local


def _same_bits(saved: torch.Tensor, found: torch.Tensor) -> bool:
    saved, found = saved.detach(), found.detach()
    key = alias_key(saved)
    if not saved.numel() or key == alias_key(found):
        return True
    return torch.equal(bytes_of(saved.to(found.device)), bytes_of(found))


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def same_plain(left: Any, right: Any) -> bool:
    """Whether two plain values are equal, also in types and NaNs. True for values that can only be pickled."""
    if left is right:
        return True
    if type(left) is not type(right):
        return False
    try:
        return encode_leaf(left, "").data == encode_leaf(right, "").data
    except UsageError:
        return True  # it can only be pickled, and pickles are not compared
