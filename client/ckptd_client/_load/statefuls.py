"""Calls load_state_dict of objects with their saved values, and turns refusals into errors with hints."""

import inspect
from collections.abc import Collection
from typing import Any

import torch

from ckptd.shared.base.errors import CkptdError, MismatchError
from ckptd.shared.base.wording import cut, told
from ckptd.shared.format.layout import Path
from ckptd_client._load.misfit import LENIENT
from ckptd_client._load.verify import is_kept, optimizers_in
from ckptd_client._state.tree import format_path, unflatten

Content = list[tuple[Path, Any]]  # paths are below the object
_KEYS_DIFFER = "key(s) in state_dict"  # in errors of torch's modules
_SIZES_DIFFER = "size mismatch"


def takes_strict(stateful: Any) -> bool:
    """Whether this is a module whose load_state_dict has the argument strict."""
    if not isinstance(stateful, torch.nn.Module):
        return False
    try:
        return "strict" in inspect.signature(stateful.load_state_dict).parameters
    except (TypeError, ValueError):  # not a Python function
        return False


def load_into(prefix: Path, stateful: Any, content: Content, has: Collection[Path], *, strict: bool) -> None:
    """Calls load_state_dict with the content. has: the paths for which the object has a value.

    strict=False: a module ignores other keys; another object that refuses the content gets only the paths that it has,
    and an optimizer's state. Raises MismatchError if it refuses.
    """
    try:
        if not strict and takes_strict(stateful):
            stateful.load_state_dict(_nested(content), strict=False)
            return
        stateful.load_state_dict(_nested(content))
    except CkptdError:
        raise
    except Exception as error:  # a class may raise anything for unexpected values
        optimizers = optimizers_in(path for path, _ in content)
        fewer = [item for item in content if item[0] in has or is_kept(item[0], optimizers)]
        if strict or len(fewer) == len(content) or not fewer:
            refused = _not_taken(prefix, stateful, error, strict=strict)
            if str(error).startswith(_OF_MODULES):  # the traceback of torch has no further information
                raise refused from None
            raise refused from error
        load_into(prefix, stateful, fewer, has, strict=False)


def _nested(content: Content) -> Any:
    """The state_dict() with these leaves; it may be a leaf itself, such as {}."""
    return content[0][1] if len(content) == 1 and not content[0][0] else unflatten(content)


_OF_MODULES = "Error(s) in loading state_dict for "
_INCOMPLETE = "until a load succeeds, do not train on: some of what was saved is in the state already"


def _not_taken(prefix: Path, stateful: Any, error: Exception, *, strict: bool) -> MismatchError:
    what = cut(error, 2000) if isinstance(error, RuntimeError | ValueError) else told(error)
    place = format_path(prefix)
    text = f"{place}: {type(stateful).__name__} does not take what was saved: {what}"
    lacks = isinstance(error, KeyError) or (_KEYS_DIFFER in what and _SIZES_DIFFER not in what)
    leave = f"leave {place} out of the state{', with strict=False' if strict else ''}"
    hint = LENIENT if strict and lacks else f"make it as it was when it was saved, or {leave}"
    if isinstance(stateful, torch.optim.Optimizer):
        hint = f"its state is matched by position: {leave}, or make it as it was"
    return MismatchError(text, hint=f"{hint}; {_INCOMPLETE}")
