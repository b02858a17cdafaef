"""Reports of how far a save is wait at the leader of a group for those of its other nodes: all leave together. Pure.

Nothing depends on it: a packet that waited too long, or for a node that is gone, leaves; one that is lost with its
leader is sent again by its link. What is known here is forgotten with the process.
"""

import zlib
from collections import OrderedDict

from ckptd.core import events as ev

SIGN = 1  # ``waits`` of a sign of life; 0: of a packet that does not wait; more: what a report says, of which save
_LATELY = 4  # reports that a node may leave out before it is not waited for: as many as there are of a save
_MOST = 16  # reports that are known as made by some nodes and not by others


def waits_of(message: ev.Message) -> int:
    """The number of what it reports, the same at all nodes; 0: it waits for nobody."""
    progress = ev.progress(message)
    return 1 + SIGN + zlib.crc32(repr(progress).encode()) if progress is not None else 0


class Group:
    """The nodes whose packets for one other daemon go by this one.

    A node that nothing came from for half of timeout_s is none of it: it goes another way, or is lost. Nor is one that
    made none of the last reports of the others: it has no part in their saves, until it makes one.
    """

    def __init__(self, timeout_s: float) -> None:
        self._patience_s = timeout_s / 2
        self._heard: dict[str, float] = {}
        self._took_part: dict[str, int] = {}  # the count of reports at its last one, or when the first packet came
        self._count = 0
        self._reported: OrderedDict[int, set[str]] = OrderedDict()

    def passes(self, node: str, waits: int, now: float) -> bool:
        """A packet of the node is here. Whether it is the last that the others wait for."""
        self._heard[node] = now
        self._took_part.setdefault(node, self._count)
        if waits <= SIGN:
            return False
        nodes = self._nodes_of(waits)
        nodes.add(node)
        self._took_part[node] = self._count
        if len(nodes) < len(self._heard):
            self._heard = {one: at for one, at in self._heard.items() if at + self._patience_s > now}
            self._took_part = {one: self._took_part[one] for one in self._heard}
        if any(count + _LATELY >= self._count and one not in nodes for one, count in self._took_part.items()):
            return False
        self._reported.pop(waits, None)
        return True

    def _nodes_of(self, waits: int) -> set[str]:
        """Those that have made the report."""
        if waits not in self._reported:
            self._reported[waits] = set()
            self._count += 1
            if len(self._reported) > _MOST:
                self._reported.popitem(last=False)
        return self._reported[waits]
