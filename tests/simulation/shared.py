"""What all simulated nodes have alike, kept once: on machines each daemon has a copy of its own.

A topology names every node, so copies at each node grow with the square of the nodes, in memory and in time. The time
that a daemon would take for its own counts for it all the same (``SPARED``).
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from ckptd.core.groups import leaders
from ckptd.core.node import kept_links
from ckptd.shared.protocol.topology import Topology


@dataclass(slots=True)
class Spared:
    """CPU seconds that were not spent again, since somebody set them to zero."""

    seconds: float = 0.0


SPARED = Spared()


class _Once:
    """A function of which each result is made once. The arguments are its key, by ``key_of``."""

    def __init__(self, make: Callable[..., Any], key_of: Callable[..., Any]) -> None:
        self._make, self._key_of = make, key_of
        self._made: dict[Any, tuple[Any, float]] = {}

    def __call__(self, *args: Any) -> Any:
        key = self._key_of(*args)
        if key not in self._made:
            began = time.thread_time()
            made = self._make(*args)
            self._made[key] = (made, time.thread_time() - began)
            return made
        found, took_s = self._made[key]
        SPARED.seconds += took_s
        return found


@contextmanager
def once_in_all() -> Iterator[None]:
    """Meanwhile equal bytes of topologies are read once in this process, and the leaders of each are found once."""
    read = _Once(Topology.unpacked, lambda packed: packed)
    found = _Once(leaders, lambda topology, relayed_from: (topology.digest, relayed_from))
    with patch.object(Topology, "unpacked", staticmethod(read)), patch.object(kept_links, "leaders", found):
        yield
