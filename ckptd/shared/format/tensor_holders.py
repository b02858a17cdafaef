"""Tensors of one name that parts of a job hold, each part its own, such as the stages of a pipeline. Pure."""

from ckptd.shared.format.layout import Layout
from ckptd.shared.format.rank_members import NOBODY


def holders_of(layout: Layout, name: str) -> bytes:
    """The ranks that hold the rank's tensor of this name, tied or not, together; NOBODY: all, or that is not known."""
    return layout.holders.get(layout.aliases.get(name, name), NOBODY) if layout.holders else NOBODY


class FirstHolders:
    """Of tensors of one name the one that was asked for first: boxes of two would make none."""

    def __init__(self) -> None:
        self._first: dict[str, bytes] = {}

    def takes(self, layout: Layout, name: str) -> bool:
        """Whether the rank's tensor of this name is that one."""
        members = holders_of(layout, name)
        return self._first.setdefault(name, members) == members
