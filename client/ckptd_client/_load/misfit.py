"""The error for a state that does not fit a checkpoint: its differences, and a hint."""

import difflib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ckptd.shared.base.errors import MismatchError
from ckptd.shared.format.layout import Path
from ckptd_client._load.saved_names import Saves, saved_kind
from ckptd_client._load.state_dicts import hint_of as hint_of_dicts
from ckptd_client._state.tensors import CODE_OF, is_tensor, shard_of
from ckptd_client._state.tree import Flat, format_path, within

_SHOWN = 8
_NAMES_SHOWN = 5
LENIENT = "add strict=False to load what both have: the notes of what it returns list the rest"


class Difference(NamedTuple):
    """One difference. ``lacks``: one side has no value there, which strict=False allows."""

    text: str
    lacks: bool = False


def misfit(state: Any, flat: Flat, saves: Saves, known: Mapping[str, Path], where: str) -> MismatchError | None:
    """The error with the first differences, and dtypes that Statefuls would convert; None: the state fits.

    known: all names of the checkpoint, with their places.
    """
    here = dict(zip(flat.names, flat.values, strict=True))
    unsaved = [one for one in flat.statefuls if not any(within(path, one[0]) for path in saves.paths.values())]
    differences = [
        Difference(f"{format_path(prefix)}: {type(stateful).__name__} in the state, nothing in the checkpoint", True)
        for prefix, stateful in unsaved
    ]
    differences += _differences(flat, here, saves)
    if not differences:
        return None
    missing = {name: path for name, path in zip(flat.names, flat.paths, strict=True) if name not in known}
    extra = [path for name, path in saves.paths.items() if name not in here and not flat.in_stateful(path)]
    hint = hint_of_dicts(state, [*extra, *missing.values()], known.values())
    if not hint:
        paths = zip(flat.names, flat.paths, strict=True)
        converts = any(flat.in_stateful(path) and _conversion(name, here, saves) for name, path in paths)
        leave = f"leave {format_path(unsaved[0][0])} out of the state" if unsaved else ""
        lenient = LENIENT if all(difference.lacks for difference in differences) else ""
        hint = "; or ".join(filter(None, (hint_of([*missing], known, converts=converts), leave, lenient)))
    return MismatchError(_listed([difference.text for difference in differences], where), hint=hint)


def _listed(differences: Sequence[str], where: str) -> str:
    shown = "\n  ".join(differences[:_SHOWN])
    more = f"\n  ... and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
    return f"the state does not fit the checkpoint {where}:\n  {shown}{more}"


def _differences(flat: Flat, here: dict[str, Any], saves: Saves) -> Iterable[Difference]:
    paths = dict(zip(flat.names, flat.paths, strict=True))
    extra = [name for name in saves.paths if name not in here]
    ours = {path[:1] for path in flat.paths} | {prefix[:1] for prefix, _ in flat.statefuls}
    gone = Counter(saves.paths[name][:1] for name in extra)
    whole = {top: count for top, count in gone.items() if count > 1 and top not in ours}
    for top, count in whole.items():  # one line, not hundreds, for an optimizer that was left out
        text = f"{format_path(top)}: in the checkpoint, not in the state: {count} values"
        yield Difference(text, lacks=True)
    extra = [name for name in extra if saves.paths[name][:1] not in whole]
    for name in [*flat.names, *extra]:
        path = paths.get(name) or saves.paths[name]
        inside = flat.in_stateful(path)
        found = _conversion(name, here, saves) if inside else _difference(name, here, saves)
        if found:
            yield found._replace(text=f"{format_path(path)}: {found.text}")


def _conversion(name: str, here: dict[str, Any], saves: Saves) -> Difference | None:
    """A tensor that load_state_dict would convert."""
    value, saved = here.get(name), saved_kind(name, saves)
    if saved is None or not is_tensor(value) or CODE_OF.get(value.dtype) == saved[0]:
        return None
    ours = CODE_OF.get(value.dtype, value.dtype)
    return Difference(f"{saved[0]} {list(saved[1])} in the checkpoint, {ours} {list(value.shape)} in the state")


def _difference(name: str, here: dict[str, Any], saves: Saves) -> Difference | None:
    if name not in here:
        return Difference("in the checkpoint, not in the state", lacks=True)
    value, saved, plain = here[name], saved_kind(name, saves), name in saves.leaves.leaves
    if not is_tensor(value):
        if saved is not None:
            return Difference(f"a tensor in the checkpoint, {type(value).__name__} in the state")
        return None if plain else Difference("in the state, not in the checkpoint", lacks=True)
    if saved is None:
        sure = saves.whole or plain  # else other ranks may have it
        return Difference("a tensor in the state, none in the checkpoint", lacks=not plain) if sure else None
    shard = shard_of(value, name)
    if (shard.code, shard.global_shape) != saved:
        theirs, ours = f"{saved[0]} {list(saved[1])}", f"{shard.code} {list(shard.global_shape)}"
        return Difference(f"{theirs} in the checkpoint, {ours} in the state")
    shared = any(_shares_elements(chunk.local) for chunk in shard.chunks)
    return Difference("its elements share memory, as after expand()") if shared else None


def _shares_elements(tensor: torch.Tensor) -> bool:
    """Whether some elements of a tensor are the same memory, so that it cannot be filled."""
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def hint_of(missing: Sequence[str], known: Collection[str], *, converts: bool) -> str:
    """The hint. missing: names of the state, also of Statefuls, that the checkpoint lacks; known: its names.

    converts: whether load_state_dict would convert elements.
    """
    if converts:
        return "load into the dtype that was saved, such as model.float(), and convert afterwards"
    if not missing:
        return ""
    if not known:
        return "the checkpoint holds nothing"
    known = dict.fromkeys(known)
    return _nested(missing, known, known.__contains__) or _similar(missing, known)


def _nested(missing: Sequence[str], known: Iterable[str], has: Callable[[str], bool]) -> str:
    """The hint if one side has its names one level deeper."""
    for name in missing:
        top, _, rest = name.partition(".")
        if rest and has(rest) and not has(top):
            return f"the checkpoint has {rest!r} without {top!r}: try load_from(path, {top}.state_dict())"
    ends = {name.partition(".")[2]: name.partition(".")[0] for name in known if "." in name}
    top = next((ends[name] for name in missing if name in ends), "")
    return f"the checkpoint has it under {top!r}: give {{{top!r}: ...}} as the state" if top else ""


def _similar(missing: Sequence[str], known: Iterable[str]) -> str:
    """The hint with similar names and the top-level names of the checkpoint."""
    tops = list(dict.fromkeys(name.partition(".")[0] for name in known))
    meant: dict[str, str] = {}
    for name in missing:
        top = name.partition(".")[0]
        pool, wanted = (tops, top) if top not in tops else ([*known], name)
        found = difflib.get_close_matches(wanted, pool, n=1)
        if found:
            meant[wanted] = found[0]
    shown = [f"{right!r} instead of {wrong!r}" for wrong, right in list(meant.items())[:_NAMES_SHOWN]]
    more = f" and {len(tops) - _NAMES_SHOWN} more" if len(tops) > _NAMES_SHOWN else ""
    has = f"the checkpoint has {', '.join(map(repr, tops[:_NAMES_SHOWN]))}{more}"
    return f"{has}; did you mean {', '.join(shown)}?" if shown else has
