"""How a rank left the job, what its saves and loads come to, and what to type. Pure."""

import enum
from typing import NamedTuple

from ckptd.shared.base.errors import joined
from ckptd.shared.protocol.node_facts import RankDetached


class How(enum.Enum):
    """What is known of it."""

    ENDED = "has ended"
    CLOSED = "has closed its client"
    FAILED = "has closed its client at an exception"
    LEFT = "has left the job"  # before this daemon began


def how_closed(event: RankDetached) -> How:
    """Of a rank that has said so."""
    return How.FAILED if event.failed else How.CLOSED


_AGAIN = "no save or load succeeds without it: see why it ended, and start the job again"
_LAST = "every rank closes only after the last save and load of all"
_CALL = "every rank must call load (one rank alone: connect(alone=True))"


class Departure(NamedTuple):
    """Of one rank. pid 0: not known."""

    rank: int
    how: How = How.LEFT
    pid: int = 0

    @property
    def text(self) -> str:
        """Who has done what."""
        return f"rank {self.rank}{f' (pid {self.pid})' if self.pid else ''} {self.how.value}"

    @property
    def before_save(self) -> str:
        """Why a save that waits for it is over, and what to type."""
        return joined(f"{self.text} and has not saved this step", _LAST if self.how is How.CLOSED else _AGAIN)

    def of_load(self, *, called: bool) -> tuple[str, str]:
        """Why a load that waits for it is over, and what to type. called: whether it took part."""
        if self.how is How.CLOSED:
            return (f"{self.text} during the load", _LAST) if called else (f"{self.text} without calling load", _CALL)
        return f"{self.text} {'during the load' if called else 'without calling load'}", _AGAIN
