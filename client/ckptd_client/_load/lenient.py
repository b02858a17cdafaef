"""load(strict=False): loads what state and checkpoint both have, and notes what only one of them has."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ckptd.shared.base.errors import MismatchError, UsageError
from ckptd.shared.format.layout import Leaves, Path
from ckptd_client._load.saved_names import OtherRanksNeededError, Saves
from ckptd_client._load.statefuls import takes_strict
from ckptd_client._load.verify import is_kept, optimizers_in
from ckptd_client._state.naming import listed
from ckptd_client._state.tensors import is_tensor, shard_of
from ckptd_client._state.tree import Flat, format_path, within

_BY_KEY = ("k", "i")  # steps of paths that are keys of dicts; an index needs its list


class Shared(NamedTuple):
    """State and checkpoint without the names that only one of them has."""

    flat: Flat
    saves: Saves
    present: dict[str, Any]  # present values of objects for names that the checkpoint lacks
    notes: list[str]


def check_load(state: object, strict: object) -> None:
    """Raises UsageError for a state that is no dict, and as check_strict does."""
    if type(state) is not dict:
        text = f"the state must be a dict, not {type(state).__name__}"
        hint = 'load({"model": model, ...})'
        if isinstance(state, str | os.PathLike):
            path = repr(os.fspath(state))
            hint += " takes the newest of this job; from a path: load_from(" + path + ', {"model": model, ...})'
        raise UsageError(text, hint=hint)
    check_strict(strict)


def check_strict(strict: object) -> None:
    """Raises UsageError if strict is not a bool."""
    if type(strict) is not bool:
        raise UsageError(f"strict must be True or False, not {strict!r}", hint="load(state, strict=False)")


def shared(flat: Flat, saves: Saves, where: str) -> Shared:
    """Drops names outside Statefuls that only one side has, and objects of which nothing was saved.

    Raises OtherRanksNeededError if other ranks' images may have them, MismatchError if no name is common.
    """
    here = dict(zip(flat.names, flat.values, strict=True))
    unsaved = [prefix for prefix, _ in flat.statefuls if not any(within(path, prefix) for path in saves.paths.values())]
    lacking = {name: path for name, path in zip(flat.names, flat.paths, strict=True) if name not in saves.paths}
    if not saves.whole and (unsaved or any(_has_elements(here[name], name) for name in lacking)):
        raise OtherRanksNeededError(f"{where}: other ranks may have saved what this rank did not")
    extra = {name for name, path in saves.paths.items() if name not in here and not flat.in_stateful(path)}
    present = _present(flat, lacking, saves, unsaved)
    dropped = {n for n, path in lacking.items() if _below(path, unsaved) or not flat.in_stateful(path)}
    if flat.names and len(extra) == len(saves.paths) and len(dropped) == len(here):
        text = f"the state and the checkpoint {where} have no key in common"
        raise MismatchError(text, hint="if nothing is to be loaded: load({}, strict=False)")
    objects = [format_path(prefix) for prefix in unsaved]
    alone = [format_path(path) for name, path in lacking.items() if name in dropped and not _below(path, unsaved)]
    return Shared(
        _state_without(flat, dropped, unsaved),
        _saves_without(saves, extra),
        {name: here[name] for name in present},
        [
            *_lines([*objects, *alone], "not in the checkpoint, and kept as it was"),
            *_lines(
                [format_path(lacking[name]) for name in present], "not in the checkpoint, and given its object again"
            ),
            *_lines([format_path(saves.paths[n]) for n in saves.paths if n in extra], "not in the state, and left out"),
        ],
    )


def _lines(places: list[str], what: str) -> list[str]:
    return [f"{listed(places)}: {what}"] if places else []


def _below(path: Path, prefixes: Iterable[Path]) -> bool:
    return any(within(path, prefix) for prefix in prefixes)


def _has_elements(value: Any, name: str) -> bool:
    return is_tensor(value) and not shard_of(value, name).absent


def _present(flat: Flat, lacking: Mapping[str, Path], saves: Saves, unsaved: Iterable[Path]) -> list[str]:
    """Keys of objects with their own load_state_dict that the checkpoint lacks.

    Not for an optimizer's state, because its values of other parameters must not stay. A module accepts fewer keys
    itself.
    """
    ends = set(saves.paths.values())
    inner = {path[:depth] for path in ends for depth in range(len(path))}
    optimizers = optimizers_in([*ends, *lacking.values()])
    judged = [
        prefix
        for prefix, stateful in flat.statefuls
        if not (isinstance(stateful, torch.optim.Optimizer) or takes_strict(stateful) or prefix in unsaved)
    ]
    return [
        name
        for name, path in lacking.items()
        if _below(path, judged) and not is_kept(path, optimizers) and _is_key_more(path, ends, inner)
    ]


def _is_key_more(path: Path, ends: set[Path], inner: set[Path]) -> bool:
    """Whether the path is in a dict of which other keys were saved, so that the key can be added."""
    at = next(depth for depth in reversed(range(len(path))) if path[:depth] in inner or not depth)
    return path[at][0] in _BY_KEY and path[: at + 1] not in ends


def _state_without(flat: Flat, names: set[str], prefixes: list[Path]) -> Flat:
    left = [i for i, name in enumerate(flat.names) if name not in names]
    return replace(
        flat,
        names=[flat.names[i] for i in left],
        paths=[flat.paths[i] for i in left],
        values=[flat.values[i] for i in left],
        statefuls=[one for one in flat.statefuls if one[0] not in prefixes],
    )


def _saves_without(saves: Saves, names: set[str]) -> Saves:
    leaves = {name: leaf for name, leaf in saves.leaves.leaves.items() if name not in names}
    return replace(
        saves,
        paths={name: path for name, path in saves.paths.items() if name not in names},
        boxes={name: boxes for name, boxes in saves.boxes.items() if name not in names},
        expected=saves.expected - names,
        leaves=Leaves(saves.leaves.version, leaves),
    )
