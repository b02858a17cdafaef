"""Tensors of one name that parts of a job hold, each part its own, such as the stages of a pipeline. Pure."""

from collections.abc import Sequence

from ckptd.shared.base.errors import DamagedError
from ckptd.shared.format.layout import Layout
from ckptd.shared.format.rank_members import NOBODY, check_members


def holders_of(layout: Layout, name: str) -> bytes:
    """The ranks that hold the rank's tensor of this name, tied or not, together; NOBODY: all, or that is not known."""
    return layout.holders.get(layout.aliases.get(name, name), NOBODY) if layout.holders else NOBODY


def holders_by_name(
    names: Sequence[str], held_by: Sequence[int], sets: Sequence[bytes], where: str
) -> dict[str, bytes]:
    """The sets of holders by tensor. held_by: of each name, or of none, the number of its set, from 1; 0: no set.

    Raises DamagedError, naming where.
    """
    if len(held_by) not in {0, len(names)} or max(held_by, default=0) > len(sets):
        raise DamagedError(f"{where}: layout: tensors of holders that are none of its {len(sets)} sets")
    for members in sets:
        try:
            check_members(members)
        except ValueError as error:
            raise DamagedError(f"{where}: layout: {error}") from error
    return {name: sets[number - 1] for name, number in zip(names, held_by, strict=False) if number}


class FirstHolders:
    """Of tensors of one name the one that was asked for first: boxes of two would make none."""

    def __init__(self) -> None:
        self._first: dict[str, bytes] = {}

    def takes(self, layout: Layout, name: str) -> bool:
        """Whether the rank's tensor of this name is that one."""
        members = holders_of(layout, name)
        return self._first.setdefault(name, members) == members
