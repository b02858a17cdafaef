"""A network of its own: a bridge in one network namespace, a namespace and a cable per machine. Nothing leaves it."""

import subprocess
from typing import Self


def ip(*words: str, inside: str = "") -> None:
    """The ip command, in a namespace if one is named."""
    where = ["-n", inside] if inside else []
    subprocess.run(["ip", *where, *words], check=True)


class Network:
    """Machines by their index from 1, at 10.87.0.<index>. A context manager."""

    def __init__(self, name: str, count: int) -> None:
        self.hub = f"{name}-hub"
        self.count = count
        self._name = name

    def namespace(self, index: int) -> str:
        """Of the machine."""
        return f"{self._name}-{index}"

    def address(self, index: int) -> str:
        """Of the machine."""
        return f"10.87.0.{index}"

    def __enter__(self) -> Self:
        ip("netns", "add", self.hub)
        ip("link", "add", "bridge", "type", "bridge", inside=self.hub)
        ip("address", "add", "10.87.0.254/24", "dev", "bridge", inside=self.hub)
        for device in ("lo", "bridge"):
            ip("link", "set", device, "up", inside=self.hub)
        for index in range(1, self.count + 1):
            self._plug(index)
        return self

    def _plug(self, index: int) -> None:
        theirs = self.namespace(index)
        ip("netns", "add", theirs)
        ip("link", "add", f"cable{index}", "type", "veth", "peer", "name", "eth0", "netns", theirs, inside=self.hub)
        ip("link", "set", f"cable{index}", "master", "bridge", "up", inside=self.hub)
        ip("address", "add", f"{self.address(index)}/24", "dev", "eth0", inside=theirs)
        for device in ("lo", "eth0"):
            ip("link", "set", device, "up", inside=theirs)

    def cut(self, index: int) -> None:
        """Pulls the machine's cable."""
        ip("link", "set", f"cable{index}", "down", inside=self.hub)

    def mend(self, index: int) -> None:
        """Plugs it in again."""
        ip("link", "set", f"cable{index}", "up", inside=self.hub)

    def __exit__(self, *_exception: object) -> None:
        for namespace in [self.hub, *(self.namespace(index) for index in range(1, self.count + 1))]:
            subprocess.run(["ip", "netns", "del", namespace], check=False, stderr=subprocess.DEVNULL)
