"""What a daemon that ends, and that nobody will start again, still owes: the newest checkpoint, on the store. Pure."""

from dataclasses import dataclass

from ckptd.core.coordinator import Coordinator
from ckptd.core.node import JobNode
from ckptd.protocol.ids import SaveId


@dataclass(frozen=True, slots=True)
class Left:
    """The newest checkpoint of a job that is in memory and not on the store; the newest that is, if any."""

    step: int
    durable: int | None
    why: str


class Farewell:
    """One job's, from the moment at which its daemon was asked to end. What is saved after that holds nobody up."""

    def __init__(self, coordinator: Coordinator, node: JobNode) -> None:
        self._coordinator = coordinator
        self._node = node
        self._newest = self._staged()

    @property
    def _coordinates(self) -> bool:
        return self._node.coordinator == self._node.node

    def _staged(self) -> SaveId | None:
        if not self._coordinates:
            return self._node.keeps.newest_staged
        newest = self._coordinator.saves.newest_staged
        return newest.save if newest is not None else None

    @property
    def _durable(self) -> SaveId | None:
        if not self._coordinates:
            return self._node.keeps.durable
        return max(self._coordinator.saves.on_store, default=None)

    @property
    def _safe(self) -> bool:
        durable = self._durable
        return self._newest is None or (durable is not None and self._newest <= durable)

    @property
    def waits(self) -> bool:
        """Whether the newest checkpoint may still become durable, or a drain that nothing newer replaces runs."""
        if self._coordinates:
            saves = self._coordinator.saves
            if self._newest is None:
                return saves.active is not None
            return not self._safe and (saves.active is not None or any(r.waits for r in saves.records.values()))
        reachable = self._node.coordinator not in self._node.membership.down
        return not self._safe and (reachable or self._node.drain.at_work)

    @property
    def left(self) -> Left | None:
        """What is not durable, for whoever reads the log; None: all is as it should be."""
        if self._newest is None or self._safe:
            return None
        if self._coordinates:
            record = self._coordinator.saves.records.get(self._newest)
            why = (record.error or record.reason) if record is not None else ""
        else:
            why = "" if self.waits else f"node {self._node.coordinator} does not answer: it coordinates the job"
        return Left(self._newest.step, self._durable.step if self._durable is not None else None, why)
