"""A state that a stager has put into a slot, on its way to the writer."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from ckptd.shared.base.errors import UsageError
from ckptd.shared.format.layout import Leaf
from ckptd_client._save.segment import Segment
from ckptd_client._state.tensors import is_tensor, shard_of
from ckptd_client.client import Client, staging_of


class StagedState(dict[str, Any]):
    """What stage returns. The slot that its tensors lie in is its own until a writer takes it, and ends with it."""


class Unstaged:
    """Stands for a state that could not be staged: any planner that asks what to write of it hears why.

    So a writer that knows nothing of the stager fails on all ranks, instead of writing what training changes meanwhile.
    """

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __create_write_items__(self, _fqn: str, _object: Any) -> NoReturn:
        raise self._error

    def __reduce__(self) -> NoReturn:
        raise self._error


@dataclass(slots=True)
class Staged:
    """One save: the slot that holds it, or why there is none."""

    number: tuple[int, int]
    segment: Segment | None = None
    leaves: dict[str, Leaf] = field(default_factory=dict)
    seconds: float = 0.0
    error: Exception | None = None
    state: Callable[[], StagedState | None] = lambda: None  # a weak reference to what stage returned

    @property
    def waits(self) -> bool:
        """Whether somebody may still write it: it is held, and no other writer was given it."""
        return self.state() is not None and (self.segment is None or self.segment.owner() is not None)

    def taken_by(self, owner: Any) -> None:
        """From here on the slot is that of the writer, and outlives the state."""
        if self.segment is not None:
            self.segment.owner = weakref.ref(owner)

    def check(self, planner: Any) -> None:
        """Raises UsageError when the planner holds another state than the staged one."""
        address = _first_address(planner)
        if self.segment is None or address is None or self.segment.holds(address):
            return
        text = "dcp.save was called while an asynchronous save of the same writer was still to be written"
        raise UsageError(text, hint="wait for the future of dcp.async_save first, or use a second writer")


def check_unstaged(client: Client, planner: Any) -> None:
    """Raises UsageError when the planner holds a state that lies in a slot of the client: another writer's."""
    address = _first_address(planner)
    segment = staging_of(client).holder(address) if address is not None else None
    if segment is None:
        return
    error = UsageError("this stager belongs to another writer", hint="pass CkptdStager(writer), of this writer")
    owner = segment.owner()
    if isinstance(owner, StagedState):  # nobody will write it: its slot is free, also while a traceback keeps the state
        owner.clear()
        owner["refused"] = Unstaged(error)
        staging_of(client).release(segment)
    raise error


def _first_address(planner: Any) -> int | None:
    """Of the first tensor of the planner's state that has elements here."""
    state = getattr(planner, "state_dict", None)
    for value in state.values() if isinstance(state, dict) else ():
        chunks = shard_of(value, "").chunks if is_tensor(value) else ()
        if chunks and chunks[0].local.numel():
            return chunks[0].local.data_ptr()
    return None
