"""Attached optimizers: the tensors that only their step() writes, and a notification before it does."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from ckptd.shared.base.errors import UsageError
from ckptd_client._local.copy_engines import is_capturing
from ckptd_client._state.tensors import local_of, locals_of

BeforeStep = Callable[[], None]
# Attributes of a parameter that other code writes too, with a description of that code.
_MARKS = {
    "_in_backward_optimizers": "its parameters are stepped during backward (apply_optimizer_in_backward)",
    "_is_flat_param": "its parameters are FSDP1's, which moves their memory in forward",
    "_fsdp_flattened": "its parameters are FSDP1's, which moves their memory in forward",
    "ds_id": "its parameters are partitioned by DeepSpeed, which gathers into them in forward",
}


class Attached:
    """One optimizer. Its step() calls before_step before it writes, until detach."""

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
        except AttributeError:  # a wrapper in a subclass that did not create hooks
            raise UsageError(f"attach was given a {type(optimizer).__qualname__} without hooks", hint=hint) from None

    def _about_to_step(self, *_: Any) -> None:
        self._captured = self._captured or is_capturing()
        self._before_step()

    def detach(self) -> None:
        """Ends the notifications."""
        self._hook.remove()

    def tensors(self) -> list[torch.Tensor]:
        """The current tensors of parameters and state."""
        found = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        states = [state.values() for state in self.optimizer.state.values() if isinstance(state, dict)]
        found += [value for values in states for value in values if isinstance(value, torch.Tensor)]
        return locals_of(found)

    def objection(self) -> str:
        """Why other code may write the tensors, or step() may run without notification; empty: neither is possible."""
        if not getattr(type(self.optimizer).step, "hooked", False):
            return f"{type(self.optimizer).__qualname__}.step calls no hooks"
        if not _is_the_class_own(self.optimizer):
            return f"step of this {type(self.optimizer).__qualname__} was replaced on the instance"
        if self._captured:
            return "its step was captured in a CUDA graph, which steps unheard when it is replayed"
        for group in self.optimizer.param_groups:
            if group.get("capturable") and any(parameter.is_cuda for parameter in group["params"]):
                return "it is capturable: a CUDA graph that is replayed steps unheard"
            if not any(map(vars, group["params"])):  # fast path: parameters without attributes have no marks
                continue
            for parameter in group["params"]:
                for mark in _MARKS.keys() & vars(parameter).keys():
                    if getattr(parameter, mark):
                        return _MARKS[mark]
        return ""


def _is_the_class_own(optimizer: torch.optim.Optimizer) -> bool:
    """Whether step is the class's own, or a torch scheduler's wrapper of it that counts steps."""
    own = vars(optimizer).get("step")
    if own is None:
        return True
    inner = getattr(own, "__wrapped__", None)
    inside = inner is not None and getattr(inner, "__func__", inner) is type(optimizer).step
    return inside and getattr(own, "_wrapped_by_lr_sched", False) is True


def addresses(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Addresses of each tensor's first byte on this rank; 0 if it has none, or torch does not give it."""
    found = list(tensors)
    try:
        return list(map(torch.Tensor.data_ptr, found))  # the usual case: half the time of a call of _address for each
    except (NotImplementedError, RuntimeError):
        return [_address(tensor) for tensor in found]


def _address(tensor: torch.Tensor) -> int:
    try:
        return local_of(tensor).data_ptr()
    except (NotImplementedError, RuntimeError):  # a subclass without memory of its own
        return 0


def storage_of(tensor: torch.Tensor) -> int:
    """Address of the tensor's storage; 0 if it has none, or torch does not give it."""
    try:
        return local_of(tensor).untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return 0
