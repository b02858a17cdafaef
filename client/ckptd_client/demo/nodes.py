"""The nodes of the demo: all on this machine, each with a daemon and an arena of its own."""

import shutil
from dataclasses import dataclass

from ckptd_client.demo.workspace import Workspace

ADDRESS = "127.0.0.1"  # nothing of the demo can be reached from outside


@dataclass(frozen=True, slots=True)
class Node:
    """What makes two daemons on one machine two nodes: other names, other memory."""

    name: str
    arena: str

    def settings(self) -> dict[str, str]:
        """Environment of the node's ranks, and through them of the daemon that the first of them starts."""
        return {"CKPTD_NODE": self.name, "CKPTD_PEER_ADDRESS": ADDRESS}

    def lose_memory(self) -> None:
        """What is left of a node that lost power: nothing. Its processes must be gone. Raises OSError."""
        shutil.rmtree(self.arena)


def nodes(space: Workspace, names: str) -> list[Node]:
    """One node for each letter."""
    return [Node(name=f"node-{name}", arena=space.arena(name)) for name in names]
