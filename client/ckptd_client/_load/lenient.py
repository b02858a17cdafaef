"""load(strict=False): what state and checkpoint both have is loaded as ever, and what only one of them has is named."""

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

_BY_KEY = ("k", "i")  # steps of paths that name a key of a dict; an index of a list means nothing without its list


class Shared(NamedTuple):
    """State and checkpoint without what only one of them has."""

    flat: Flat
    saves: Saves
    present: dict[str, Any]  # values that objects are given back, of which the checkpoint has nothing
    notes: list[str]


def check_load(state: object, strict: object) -> None:
    """Raises UsageError for a state that is no dict, and for what check_strict refuses."""
    if type(state) is not dict:
        text = f"the state must be a dict, not {type(state).__name__}"
        hint = 'load({"model": model, ...})'
        if isinstance(state, str | os.PathLike):
            path = repr(os.fspath(state))
            hint += " takes the newest of this job; from a path: load_from(" + path + ', {"model": model, ...})'
        raise UsageError(text, hint=hint)
    check_strict(strict)


def check_strict(strict: object) -> None:
    """Raises UsageError for what is no bool."""
    if type(strict) is not bool:
        raise UsageError(f"strict must be True or False, not {strict!r}", hint="load(state, strict=False)")


def shared(flat: Flat, saves: Saves, where: str) -> Shared:
    """Leaves out, outside of Statefuls, what only one side has; an object of which nothing was saved is left alone.

    Raises OtherRanksNeededError where other ranks' images may have it, MismatchError where the two share nothing.
    """
    here = dict(zip(flat.names, flat.values, strict=True))
    untold = [prefix for prefix, _ in flat.statefuls if not any(within(path, prefix) for path in saves.paths.values())]
    lacking = {name: path for name, path in zip(flat.names, flat.paths, strict=True) if name not in saves.paths}
    if not saves.whole and (untold or any(_has_elements(here[name], name) for name in lacking)):
        raise OtherRanksNeededError(f"{where}: other ranks may have saved what this rank did not")
    extra = {name for name, path in saves.paths.items() if name not in here and not flat.in_stateful(path)}
    present = _present(flat, lacking, saves, untold)
    dropped = {n for n, path in lacking.items() if _below(path, untold) or not flat.in_stateful(path)}
    if flat.names and len(extra) == len(saves.paths) and len(dropped) == len(here):
        text = f"the state and the checkpoint {where} have no key in common"
        raise MismatchError(text, hint="if nothing is to be loaded: load({}, strict=False)")
    objects = [format_path(prefix) for prefix in untold]
    alone = [format_path(path) for name, path in lacking.items() if name in dropped and not _below(path, untold)]
    return Shared(
        _state_without(flat, dropped, untold),
        _saves_without(saves, extra),
        {name: here[name] for name in present},
        [
            *_said([*objects, *alone], "not in the checkpoint, and kept as it was"),
            *_said(
                [format_path(lacking[name]) for name in present], "not in the checkpoint, and given its object again"
            ),
            *_said([format_path(saves.paths[n]) for n in saves.paths if n in extra], "not in the state, and left out"),
        ],
    )


def _said(places: list[str], what: str) -> list[str]:
    return [f"{listed(places)}: {what}"] if places else []


def _below(path: Path, prefixes: Iterable[Path]) -> bool:
    return any(within(path, prefix) for prefix in prefixes)


def _has_elements(value: Any, name: str) -> bool:
    return is_tensor(value) and not shard_of(value, name).absent


def _present(flat: Flat, lacking: Mapping[str, Path], saves: Saves, untold: Iterable[Path]) -> list[str]:
    """Keys that objects with a load_state_dict of their own have, and the checkpoint has not.

    Of an optimizer's state there is nothing to give again: what it has of other parameters is not to be kept. A module
    takes fewer keys by itself.
    """
    ends = set(saves.paths.values())
    inner = {path[:depth] for path in ends for depth in range(len(path))}
    optimizers = optimizers_in([*ends, *lacking.values()])
    judged = [
        prefix
        for prefix, stateful in flat.statefuls
        if not (isinstance(stateful, torch.optim.Optimizer) or takes_strict(stateful) or prefix in untold)
    ]
    return [
        name
        for name, path in lacking.items()
        if _below(path, judged) and not is_kept(path, optimizers) and _is_key_more(path, ends, inner)
    ]


def _is_key_more(path: Path, ends: set[Path], inner: set[Path]) -> bool:
    """Whether the place is in a dict of which other keys were saved, so that it can be added to these."""
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
