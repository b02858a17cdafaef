"""Process groups for gathers alone, so that their messages never mix with those of the training.

All ranks create them at the first use and keep them.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ckptd.shared.base.errors import GatherError, UsageError

Members = tuple[int, ...]
TIMEOUT_S = 600.0
_GONE = "a rank that ended, raised, or did not call gather leaves the others in it: look at its log"


@contextlib.contextmanager
def as_gather_error() -> Iterator[None]:
    """Turns the error that torch raises when another rank has ended or is late into GatherError."""
    try:
        yield
    except RuntimeError as error:
        raise GatherError(f"the gather broke off: {error}", hint=_GONE) from error


class Groups:
    """This process's groups for gathers. Not thread-safe."""

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        self._timeout = timedelta(seconds=timeout_s)
        self._world: Any = None  # to which the others belong
        self._all: Any = None
        self._parts: dict[Members, Any] = {}
        self.busy = False  # a gather is in progress

    @property
    def all(self) -> Any:
        """The group of all ranks, over gloo, so for CPU tensors only. Collective when it is created."""
        self._renew()
        if self._all is None:
            with as_gather_error():
                self._all = dist.new_group(backend="gloo", timeout=self._timeout)
        return self._all

    def missing(self, sets: Iterable[Members], rank: int) -> list[Members]:
        """The sets that have no group yet and of which this rank is the first member."""
        if not is_distributed():
            return []
        self._renew()
        return [members for members in sets if rank == members[0] and len(members) > 1 and members not in self._parts]

    def make(self, sets: Sequence[Members]) -> None:
        """Creates groups of some ranks, with the job's own backend. Collective of all ranks.

        (The members alone could create one, but torch hangs if they have not created equally many groups before.)
        """
        for members in sets:
            with as_gather_error():
                self._parts[members] = dist.new_group(list(members), timeout=self._timeout)

    def of(self, members: Members) -> Any:
        """The group of some ranks; make has created it."""
        return self._parts[members]

    def check_idle(self) -> None:
        """Raises UsageError while a gather is in progress here: the messages of two would mix."""
        if self.busy:
            text = "a gather that was begun before is still on its way"
            raise UsageError(text, hint="wait() for it, or iterate over it to its end, on every rank")

    def exchange(self, data: bytes) -> list[bytes]:
        """Gives every rank's bytes, by rank. Collective."""
        if not is_distributed():
            return [data]
        found: list[Any] = [None] * dist.get_world_size()
        with as_gather_error():
            dist.all_gather_object(found, data, group=self.all)
        return found

    def _renew(self) -> None:
        """Forgets groups that belong to a process group that the job has destroyed."""
        if self._world is not dist.group.WORLD:
            self._world, self._all, self._parts = dist.group.WORLD, None, {}


def is_distributed() -> bool:
    """Whether torch.distributed is initialized."""
    return dist.is_available() and dist.is_initialized()
