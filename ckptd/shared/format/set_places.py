"""Where a redundancy set keeps its records in a checkpoint: a directory of its own, that no other node writes in.

Its nodes put their votes there, their parity, and files that are not whole yet. The name has the epoch and the nodes:
a node whose set has changed since votes in its new one.
"""

import re
from collections.abc import Iterable

import msgspec

from ckptd.shared.base.ids import SET_PATTERN, NodeName, SetName
from ckptd.shared.format.digest import digest

SETS_DIR = "sets"
_VOTE_SUFFIX = ".vote"
_SET_RE = re.compile(SET_PATTERN)


def set_folder(epoch: int, nodes: Iterable[str]) -> SetName:
    """The directory of these nodes' set, whatever order they come in. Later epochs are larger."""
    return f"e{epoch:08d}-{digest(msgspec.msgpack.encode(sorted(nodes))).hex()[:8]}"


def is_set_name(name: str) -> bool:
    """Whether a directory may be a set's."""
    return _SET_RE.match(name) is not None


def vote_place(of: SetName, node: NodeName) -> str:
    """Of a node's vote."""
    return f"{SETS_DIR}/{of}/{node}{_VOTE_SUFFIX}"


def voter(name: str) -> NodeName:
    """The node whose vote has this name in a set's directory; empty when it is no vote's."""
    node = name.removesuffix(_VOTE_SUFFIX)
    return "" if node == name or name.startswith(".") else node


def parity_place(of: SetName, name: str) -> str:
    """Of a node's parity."""
    return f"{SETS_DIR}/{of}/{name}"
