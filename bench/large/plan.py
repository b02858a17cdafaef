"""What the measuring process and the one that plays nodes say to each other: a line of JSON each."""

from typing import TextIO, TypeVar

import msgspec

from ckptd.shared.base.ids import JobKey
from ckptd.shared.protocol.topology import Peer, Rendezvous

RANKS_PER_NODE = 8
STEP = 100
SEGMENT_NBYTES = 24 << 30  # as canned answers to a status have them
_T = TypeVar("_T")


class Plan(msgspec.Struct):
    """Members from ``first`` on; ``daemons`` are real ones, and those that ``coordinates`` name may coordinate.

    timeout_s: of a link.
    """

    job: JobKey
    daemons: list[Peer]
    first: int
    count: int
    timeout_s: float


class Command(msgspec.Struct, tag_field="do", tag=str.lower):
    """Each is answered by one ``Done``."""


class Connect(Command):
    """Ranks attach: rank r on the node homes[r]. Done when all that are on members are in."""

    session: str
    rendezvous: Rendezvous
    homes: list[str]


class Stage(Command):
    """They hand over a segment each. Done when that is said."""

    step: int


class Load(Command):
    """They load. Done when all have agreed."""


class Lose(Command):
    """A member is gone, with its memory, and a spare one of another name comes."""

    node: str
    spare: str


class End(Command):
    """All ranks end."""


Commands = Connect | Stage | Load | Lose | End


class Done(msgspec.Struct):
    """What became of a command."""

    seconds: float
    cpu_s: float  # of the process that plays
    downs: int = 0  # links that were lost meanwhile
    tiers: dict[str, int] = {}  # of a load: ranks by where they read
    problems: list[str] = []


def node_name(number: int) -> str:
    """A node of the job."""
    return f"gpu-{number:05d}"


def write(stream: TextIO, item: object) -> None:
    """One line."""
    stream.write(msgspec.json.encode(item).decode() + "\n")
    stream.flush()


def read(stream: TextIO, kind: type[_T]) -> _T:
    """One line. Raises EOFError when the other side has ended."""
    line = stream.readline()
    if not line:
        raise EOFError
    return msgspec.json.decode(line, type=kind)
