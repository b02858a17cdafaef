"""Process groups that carry nothing but gathers, so that none of their messages meets one of the training's.

Made at the first use, by all ranks alike, and kept.
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
def told_as_error() -> Iterator[None]:
    """What torch raises when another rank is gone or late, as GatherError."""
    try:
        yield
    except RuntimeError as error:
        raise GatherError(f"the gather broke off: {error}", hint=_GONE) from error


class Groups:
    """This process's groups for gathers. Not for several threads at a time."""

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        self._timeout = timedelta(seconds=timeout_s)
        self._world: Any = None  # that the others are of
        self._all: Any = None
        self._parts: dict[Members, Any] = {}
        self.busy = False  # a gather is on its way

    @property
    def all(self) -> Any:
        """Of all ranks, over gloo, so for tensors of CPUs only. Collective when it is made."""
        self._renew()
        if self._all is None:
            with told_as_error():
                self._all = dist.new_group(backend="gloo", timeout=self._timeout)
        return self._all

    def lacking(self, sets: Iterable[Members], rank: int) -> list[Members]:
        """Of those sets the ones that have no group yet, and of which this rank is the first member."""
        if not is_distributed():
            return []
        self._renew()
        return [members for members in sets if rank == members[0] and len(members) > 1 and members not in self._parts]

    def make(self, sets: Sequence[Members]) -> None:
        """Makes groups of some ranks, over what the job uses for its tensors. Collective of all ranks.

        (torch can also make one by its members alone, but hangs where these have not made equally many before.)
        """
        for members in sets:
            with told_as_error():
                self._parts[members] = dist.new_group(list(members), timeout=self._timeout)

    def of(self, members: Members) -> Any:
        """The group of some ranks, which was made."""
        return self._parts[members]

    def check_idle(self) -> None:
        """Raises UsageError while a gather is on its way here: the bytes of two would meet."""
        if self.busy:
            text = "a gather that was begun before is still on its way"
            raise UsageError(text, hint="wait() for it, or iterate over it to its end, on every rank")

    def exchange(self, word: bytes) -> list[bytes]:
        """Collective: what every rank gave, by rank."""
        if not is_distributed():
            return [word]
        words: list[Any] = [None] * dist.get_world_size()
        with told_as_error():
            dist.all_gather_object(words, word, group=self.all)
        return words

    def _renew(self) -> None:
        """Groups of a job's process groups that were destroyed since are gone with them."""
        if self._world is not dist.group.WORLD:
            self._world, self._all, self._parts = dist.group.WORLD, None, {}


def is_distributed() -> bool:
    """Whether torch.distributed knows of other ranks."""
    return dist.is_available() and dist.is_initialized()
