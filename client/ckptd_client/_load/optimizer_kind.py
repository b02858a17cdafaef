"""Checks that an optimizer is of the saved kind: its step needs the settings of its kind.

torch's load_state_dict accepts the settings of an AdamW for an SGD, whose next step then raises a KeyError.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ckptd.shared.base.errors import MismatchError
from ckptd.shared.format.layout import Path, PathStep
from ckptd_client._state.tree import format_path

GROUPS: PathStep = ("k", "param_groups")


def check_kinds(statefuls: Iterable[tuple[Path, Any]], saved: Iterable[Path]) -> None:
    """Compares the optimizers of a state with the saved paths, before any read. Raises MismatchError.

    Only those whose load_state_dict is torch's own; OptimizerKind checks the others afterwards.
    """
    optimizers = {at: one for at, one in statefuls if isinstance(one, torch.optim.Optimizer) and is_torchs_own(one)}
    groups: dict[Path, dict[PathStep, set[str]]] = {}
    for path in saved if optimizers else ():
        for at, step in enumerate(path[:-2]):
            if step == GROUPS and path[:at] in optimizers:
                groups.setdefault(path[:at], {}).setdefault(path[at + 1], set()).add(str(path[at + 2][1]))
    for prefix, found in groups.items():
        one = optimizers[prefix]
        _refuse(prefix, one, _settings_of(one) - _completed(one, found))


class OptimizerKind:
    """The settings of an optimizer, or of one inside an object, before load_state_dict, for a later comparison."""

    def __init__(self, stateful: Any) -> None:
        self._optimizer = _optimizer_of(stateful)
        self._settings, self._was = set[str](), dict[str, Any]()
        if self._optimizer is not None:
            has = vars(self._optimizer)
            self._settings = _settings_of(self._optimizer)
            self._was = {name: has[name] for name in ("param_groups", "state") if name in has}  # a load replaces them

    def check(self, prefix: Path) -> None:
        """Raises MismatchError if the optimizer lost settings of its kind, after restoring what it had."""
        if self._optimizer is None:
            return
        lost = self._settings - _settings_of(self._optimizer)
        if lost:
            vars(self._optimizer).update(self._was)
        _refuse(prefix, self._optimizer, lost)


def _optimizer_of(stateful: Any) -> torch.optim.Optimizer | None:
    """The object itself if it is an optimizer, or the one that it wraps, as Accelerate's do."""
    for one in (getattr(stateful, "__dict__", {}).get("optimizer"), stateful):
        if isinstance(one, torch.optim.Optimizer):
            return one
    return None


def is_torchs_own(stateful: Any) -> bool:
    """Whether only code of torch runs in this object's load_state_dict."""
    if isinstance(stateful, torch.optim.Optimizer):
        hooks = stateful._optimizer_load_state_dict_pre_hooks, stateful._optimizer_load_state_dict_post_hooks  # noqa: SLF001
        return not any(hooks) and _torchs(stateful, "load_state_dict", "__setstate__")
    if not isinstance(stateful, torch.nn.Module) or not _torchs(stateful, "load_state_dict"):
        return False
    return all(
        not module._load_state_dict_pre_hooks  # noqa: SLF001 - there is no public way
        and not module._load_state_dict_post_hooks  # noqa: SLF001 - as above
        and _torchs(module, "_load_from_state_dict", "set_extra_state")
        for module in stateful.modules()
    )


def _torchs(stateful: Any, *methods: str) -> bool:
    """Whether torch defines these methods of the object."""
    found = (getattr(getattr(stateful, name), "__func__", None) for name in methods)
    return all(one is not None and one.__module__.split(".")[0] == "torch" for one in found)


def _refuse(prefix: Path, optimizer: torch.optim.Optimizer, lost: set[str]) -> None:
    """Raises MismatchError if the saved state lacks settings that the optimizer needs."""
    if not lost:
        return
    place, kind = format_path(prefix), type(optimizer).__name__
    text = f"{place}: another kind of optimizer was saved: it has no {', '.join(sorted(lost))}, which {kind} needs"
    hint = f"load into an optimizer of the kind that was saved, or leave {place} out of the state, with strict=False"
    raise MismatchError(text, hint=hint)


def _settings_of(optimizer: torch.optim.Optimizer) -> set[str]:
    """The settings that each group has from the start, such as the momentum: a step reads all of them."""
    return {key for key in optimizer.defaults if all(key in group for group in optimizer.param_groups)}


def _completed(optimizer: torch.optim.Optimizer, groups: Mapping[PathStep, set[str]]) -> set[str]:
    """The settings of all groups after torch has added those that the saving release lacked."""
    like = object.__new__(type(optimizer))
    vars(like).update(vars(optimizer), defaults={**optimizer.defaults})
    filled: list[dict[str, Any]] = [{**dict.fromkeys(keys), "params": []} for keys in groups.values()]
    like.__setstate__({"state": {}, "param_groups": filled})
    return set.intersection(*(set(group) for group in filled))
