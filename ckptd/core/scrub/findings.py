"""What scrubs have found: the damage that is still there, by place, and how much there was. Pure."""

from collections.abc import Collection
from typing import NamedTuple

from ckptd.core import events as ev
from ckptd.core.actions import Action, Note
from ckptd.core.node.node import JobNode
from ckptd.shared.base.ids import SaveId
from ckptd.shared.protocol.messages import Tier

_MOST = 256  # places that are remembered
WHERE = {Tier.ARENA: "in memory", Tier.REBUILT: "in memory", Tier.PFS: "on the store"}


class Spot(NamedTuple):
    """Where damage is."""

    node: str
    tier: Tier
    save: SaveId
    rank: int | None
    what: str = ""  # of no rank: there are many such files


def _spot(node: str, found: ev.ScrubFound) -> Spot:
    return Spot(node, found.tier, found.save, found.rank, "" if found.rank is not None else found.what)


class Findings:
    """Of one job. On its coordinator those of all nodes, elsewhere those of this one."""

    def __init__(self, node: JobNode) -> None:
        self._node = node
        self.damaged: dict[Spot, ev.ScrubFound] = {}
        self.found = 0  # of this node's scrubs
        self.mended = 0

    def say(self, found: ev.ScrubFound) -> list[Action]:
        """This node's scrub has found it: for the log, the status, and the coordinator. Said once while it lasts."""
        if not found.mended and _spot(self._node.node, found) in self.damaged:
            return []
        self.found += _spot(self._node.node, found) not in self.damaged
        self.mended += bool(found.mended)
        self.heard(self._node.node, found)
        return [Note(job=found.job, text=text_of(found)), self._node.membership.report(found)]

    def heard(self, node: str, found: ev.ScrubFound) -> None:
        """A node has found it."""
        spot = _spot(node, found)
        if found.mended:
            self.damaged.pop(spot, None)
        elif spot in self.damaged or len(self.damaged) < _MOST:
            self.damaged[spot] = found

    def sound(self, tier: Tier, save: SaveId, ranks: Collection[int | None] | None = None) -> None:
        """What was damaged here is not, by whatever has happened. ranks: whose; None: all of the save."""
        here = (self._node.node, tier, save)
        spots = [spot for spot in self.damaged if spot[:3] == here and (ranks is None or spot.rank in ranks)]
        for spot in spots:
            del self.damaged[spot]


def text_of(found: ev.ScrubFound) -> str:
    """In a line."""
    whose = f"rank {found.rank} of step {found.save.step}" if found.rank is not None else f"step {found.save.step}"
    what = "parity of " if found.tier is Tier.REBUILT else ""
    state = f"made good from {found.mended}" if found.mended else "not made good"
    return f"scrub: {what}{whose} is damaged {WHERE[found.tier]}: {found.what}; {state}"
