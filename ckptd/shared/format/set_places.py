"""Where a redundancy set keeps its records in a checkpoint: a directory of its own, that no other node writes in.

Its nodes put their votes there, their parity, and files that are not whole yet. The name has the epoch and the nodes:
a node whose set has changed since votes in its new one. A vote's name has the digest of its file: a node that votes
again, and says something else, does not touch the vote that a commit has read.
"""

import re
from collections.abc import Iterable

import msgspec

from ckptd.shared.base.ids import SET_PATTERN, NodeName, SetName
from ckptd.shared.format.digest import digest

SETS_DIR = "sets"
_DIGITS = 16  # of a vote's digest, in its name
_VOTE_RE = re.compile(rf"^(?P<node>[^.].*)\.[0-9a-f]{{{_DIGITS}}}\.vote\Z")
_SET_RE = re.compile(SET_PATTERN)


def set_folder(epoch: int, nodes: Iterable[str]) -> SetName:
    """The directory of these nodes' set, whatever order they come in. Later epochs are larger."""
    return f"e{epoch:08d}-{digest(msgspec.msgpack.encode(sorted(nodes))).hex()[:8]}"


def is_set_name(name: str) -> bool:
    """Whether a directory may be a set's."""
    return _SET_RE.match(name) is not None


def epoch_of(of: SetName) -> int:
    """The epoch in a set's name."""
    return int(of[1:9])


def vote_place(of: SetName, node: NodeName, file_digest: bytes) -> str:
    """Of a node's vote. file_digest: of its whole file."""
    return f"{SETS_DIR}/{of}/{node}.{file_digest.hex()[:_DIGITS]}.vote"


def voter(name: str) -> NodeName:
    """The node whose vote has this name in a set's directory; empty when it is no vote's."""
    found = _VOTE_RE.match(name)
    return found["node"] if found else ""


def parity_place(of: SetName, name: str) -> str:
    """Of a node's parity."""
    return f"{SETS_DIR}/{of}/{name}"
