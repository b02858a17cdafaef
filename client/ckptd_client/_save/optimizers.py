"""Optimizers that were attached: the tensors that only their step() writes, and a word before it does."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from ckptd.shared.base.errors import UsageError
from ckptd_client._local.copy_engines import is_capturing
from ckptd_client._state.tensors import local_of, locals_of

BeforeStep = Callable[[], None]
# What marks a parameter that others write too, and who they are.
_MARKS = {
    "_in_backward_optimizers": "its parameters are stepped during backward (apply_optimizer_in_backward)",
    "_is_flat_param": "its parameters are FSDP1's, which moves their memory in forward",
    "_fsdp_flattened": "its parameters are FSDP1's, which moves their memory in forward",
    "ds_id": "its parameters are partitioned by DeepSpeed, which gathers into them in forward",
}


class Attached:
    """One optimizer. before_step is called in step(), before anything is written, until detach."""

    def __init__(self, optimizer: Any, before_step: BeforeStep) -> None:
        hint = "attach(optimizer) takes a torch.optim.Optimizer; of a wrapper, the optimizer inside"
        if not isinstance(optimizer, torch.optim.Optimizer):
            kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
            raise UsageError(f"attach was given a {kind}", hint=hint)
        self.optimizer = optimizer
        self._before_step = before_step
        self._captured = False
        try:
            self._hook = optimizer.register_step_pre_hook(self._about_to_step)
        except AttributeError:  # a wrapper that is a subclass, and made no hooks
            raise UsageError(f"attach was given a {type(optimizer).__qualname__} without hooks", hint=hint) from None

    def _about_to_step(self, *_: Any) -> None:
        self._captured = self._captured or is_capturing()
        self._before_step()

    def detach(self) -> None:
        """No more words."""
        self._hook.remove()

    def tensors(self) -> list[torch.Tensor]:
        """Parameters and state as they are now."""
        found = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        states = [state.values() for state in self.optimizer.state.values() if isinstance(state, dict)]
        found += [value for values in states for value in values if isinstance(value, torch.Tensor)]
        return locals_of(found)

    def objection(self) -> str:
        """Why somebody else may write them, or step() may run unheard; empty when it is as it should be."""
        if not getattr(type(self.optimizer).step, "hooked", False):
            return f"{type(self.optimizer).__qualname__}.step calls no hooks"
        if not _is_the_class_own(self.optimizer):
            return f"step of this {type(self.optimizer).__qualname__} was replaced on the instance"
        if self._captured:
            return "its step was captured in a CUDA graph, which steps unheard when it is replayed"
        for group in self.optimizer.param_groups:
            if group.get("capturable") and any(parameter.is_cuda for parameter in group["params"]):
                return "it is capturable: a CUDA graph that is replayed steps unheard"
            if not any(map(vars, group["params"])):  # of each save: marks are attributes, and parameters have none
                continue
            for parameter in group["params"]:
                for mark in _MARKS.keys() & vars(parameter).keys():
                    if getattr(parameter, mark):
                        return _MARKS[mark]
        return ""


def _is_the_class_own(optimizer: torch.optim.Optimizer) -> bool:
    """Whether step is that of the class, or what a torch scheduler puts around it to count steps."""
    own = vars(optimizer).get("step")
    if own is None:
        return True
    inner = getattr(own, "__wrapped__", None)
    inside = inner is not None and getattr(inner, "__func__", inner) is type(optimizer).step
    return inside and getattr(own, "_wrapped_by_lr_sched", False) is True


def addresses(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Of each tensor's first byte here; 0 when it has none, or torch does not tell."""
    found = list(tensors)
    try:
        return list(map(torch.Tensor.data_ptr, found))  # nearly always: a call for each would take twice the time
    except (NotImplementedError, RuntimeError):
        return [_address(tensor) for tensor in found]


def _address(tensor: torch.Tensor) -> int:
    try:
        return local_of(tensor).data_ptr()
    except (NotImplementedError, RuntimeError):  # a subclass that only describes memory
        return 0


def storage_of(tensor: torch.Tensor) -> int:
    """Address of the memory that the tensor is a view of; 0 when it has none, or torch does not tell."""
    try:
        return local_of(tensor).untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return 0
