"""The plans of one client's last states, and the values of a state by its plan."""

from typing import Any

from ckptd.shared.base.errors import UsageError
from ckptd.shared.format.save_metadata import Scalar
from ckptd_client._daemon.link import Link
from ckptd_client._image.plan import Plan, Values, gather, make_plan
from ckptd_client._image.stock_objects import StockLeaves
from ckptd_client._save.stats import Stats
from ckptd_client._state.replicas import warn_of_idle
from ckptd_client._state.sampling import Sample

_KEPT = 4  # a full save and one of the model may alternate


class Plans:
    """The plans of one client. Call its methods under the client's lock."""

    def __init__(self, link: Link, stats: Stats, *, dual: bool) -> None:
        """dual: images are for stock readers too."""
        self._link, self._stats, self._dual = link, stats, dual
        self._plans: list[Plan] = []  # the newest first
        self.stock = StockLeaves() if dual and link.group.rank == 0 else None

    def gather(
        self, state: dict[str, Any], sample: Sample | None = None, metadata: dict[str, Scalar] | None = None, *,
        balanced: bool = True,
    ) -> tuple[Plan, Values]:  # fmt: skip
        """The state's plan, a new one if its structure changed, and its current values.

        balanced: replicas save slices of replicated tensors, if the job has that setting. Raises UsageError for a state
        that cannot be saved.
        """
        balanced = balanced and self._link.balance
        said = metadata or {}
        for plan in [plan for plan in self._plans if plan.balanced is balanced]:
            values = gather(plan, state, self.stock, sample, said)
            if values is not None:
                break
        else:
            plan = self._made(state, balanced=balanced)
            values = gather(plan, state, self.stock, sample, said)
        self._plans = [plan, *(other for other in self._plans if other is not plan)][:_KEPT]
        if values is None:
            raise UsageError("the state changes while it is read", hint="save from the thread that trains")
        return plan, values

    def _made(self, state: dict[str, Any], *, balanced: bool) -> Plan:
        group, settings = self._link.group, self._link.settings
        plan = make_plan(
            state, rank=group.rank, world_size=group.world_size, dual=self._dual,
            pickle_keys=settings.pickle_keys, replicated=settings.named.replicated, balanced=balanced,
            integrity=settings.integrity, is_own=settings.named.is_own,
        )  # fmt: skip
        self._stats.plans += 1
        if self._stats.plans == 1 and group.rank == 0:
            warn_of_idle(settings.named.replicated, plan.names)
            settings.named.warn_of_idle(plan.names)
        return plan
