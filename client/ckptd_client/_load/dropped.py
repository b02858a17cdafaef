"""The error for a state that asks for what a checkpoint has no more: it was dropped, and is not another's name."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from ckptd.shared.base.errors import MismatchError
from ckptd.shared.format.dropped import dropped_of
from ckptd_client._state.tensors import is_tensor
from ckptd_client._state.tree import flatten

_HINT = "load a state without {}, or with strict=False, which leaves it as it is; newer checkpoints are whole"


@contextlib.contextmanager
def told_of_dropped(state: Any, dropped: Sequence[str]) -> Iterator[None]:
    """Says of a misfit what the checkpoint has lost of it. dropped: as its manifest says."""
    try:
        yield
    except MismatchError as error:
        asked = _asked(state, dropped)
        if not asked:
            raise
        gone = ", ".join(map(repr, asked))
        text = f"{error.message}\n  {gone} was dropped from this checkpoint, to save room (prune --drop)"
        raise MismatchError(text, hint=_HINT.format(gone)) from error


def _asked(state: Any, dropped: Sequence[str]) -> list[str]:
    if not dropped:
        return []
    flat = flatten(state, is_tensor)
    objects = [".".join(str(key) for _, key in prefix) for prefix, _ in flat.statefuls]
    return dropped_of([*flat.names, *objects], dropped)
