"""What this node contributes to the parity of its set: the seals of its segments, once all are digested. Pure."""

from ckptd.core import events as ev
from ckptd.core.actions import Action
from ckptd.core.node.membership import Membership
from ckptd.core.node.parity import Protection
from ckptd.core.node.slots import SlotTable
from ckptd.shared.base.ids import JobKey
from ckptd.shared.protocol.parity_types import DataColumn


class OwnDataColumn:
    """Offered for the save that ``protection`` waits for."""

    def __init__(
        self, job: JobKey, node: str, slots: SlotTable, membership: Membership, protection: Protection
    ) -> None:
        self._job = job
        self._node = node
        self._slots = slots
        self._membership = membership
        self._protection = protection

    def offer(self, _: object = None) -> list[Action]:
        """This node's column for its set, once every segment of the save has its digests."""
        save, topology = self._protection.waits, self._membership.topology
        if save is None or topology is None:
            return []
        seals = {slot.rank: slot.seal for slot in self._slots.holding(save)}
        ranks = topology.ranks_of(self._node)
        missing = [rank for rank in ranks if rank not in seals]
        if missing:
            return [self.failed(f"the segment of rank {missing[0]} does not lie at {self._node}")]
        column = DataColumn(self._node, tuple(seal for rank in ranks if (seal := seals[rank]) is not None))
        return self._protection.offer(column) if len(column.seals) == len(ranks) else []

    def failed(self, problem: str) -> Action:
        """Reports to the coordinator why the awaited save cannot be encoded here."""
        save = self._protection.waits
        assert save is not None  # noqa: S101 - the caller looked
        failed = ev.Encoded(job=self._job, save=save, epoch=self._membership.epoch, problem=problem)
        return self._membership.report(failed)
