"""The nodes of the demo: all on this machine, each with its own daemon and arena."""

import shutil
from dataclasses import dataclass

from ckptd_client.demo.workspace import Workspace

ADDRESS = "127.0.0.1"  # other machines cannot reach the demo


@dataclass(frozen=True, slots=True)
class Node:
    """A node: a name and an arena, which distinguish two daemons on one machine."""

    name: str
    arena: str

    def settings(self) -> dict[str, str]:
        """Environment of the node's ranks, and of the daemon that the first of them starts."""
        return {"CKPTD_NODE": self.name, "CKPTD_PEER_ADDRESS": ADDRESS}

    def lose_memory(self) -> None:
        """Removes the arena, as a loss of power does. The node's processes must have ended. Raises OSError."""
        shutil.rmtree(self.arena)


def nodes(space: Workspace, names: str) -> list[Node]:
    """One node for each letter."""
    return [Node(name=f"node-{name}", arena=space.arena(name)) for name in names]
