"""Chooses the tensors of a plan, and 2 MiB units of their memory, that a save may copy late. Copies nothing.

Tensors must be in memory of attached optimizers. The result for a plan is kept while all addresses stay the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ckptd_client._image.plan import Plan, Values
from ckptd_client._local.copy_engines import by_engine
from ckptd_client._local.page_division import Division, divide
from ckptd_client._local.page_guard import Range, whole_units, without
from ckptd_client._save.optimizers import addresses, storage_of

_GAP_NBYTES = 8 << 10  # of other memory between tensors: data of malloc, and the rest of a page
_MAX_KEPT = 8  # plans
_cuda: Any = torch.cuda  # much of it is untyped


class Rules(NamedTuple):
    """Which kinds of tensors may be late."""

    proof: bool  # memory of the host, with a proof
    devices: bool  # tensors of devices
    trusted: bool  # all tensors of the host, without a proof
    written: frozenset[str]  # names of tensors that other code writes


class Units(NamedTuple):
    """Units of 2 MiB, in order of addresses; adjacent ones are one range."""

    own: tuple[Range, ...] = ()  # completely inside tensors
    shared: tuple[Range, ...] = ()  # with some other memory
    all: tuple[Range, ...] = ()  # both


class Choice(NamedTuple):
    """The choice for a plan's tensors, by position."""

    whole: list[int]  # completely late: on devices, or without a proof
    spans: list[tuple[int, Range]]  # in the host's memory, late where pages are armed, in order of addresses
    read: list[Range]  # in the host's memory, only digested

    def units(self, *, read: bool) -> Units:
        """The units of the choice. read: with memory that is only digested; else writes to that do not matter."""
        ranges = [*(span for _, span in self.spans), *(self.read if read else ())]
        own, units = whole_units(ranges), whole_units(ranges, _GAP_NBYTES)
        return Units(tuple(own), tuple(without(units, own)), tuple(units))


class Basis(NamedTuple):
    """The input of a choice."""

    rules: Rules
    lie: list[int]  # addresses of the plan's tensors
    owned: list[int]  # of the optimizers'


@dataclass(slots=True)
class Chosen:
    """A choice for one plan."""

    names: list[str]
    basis: Basis
    read: list[int]  # addresses of tensors with digests; a rank copies only its rows of these
    choice: Choice
    plain: Units  # for a save without digests
    with_read: Units
    division: tuple[Any, Division] | None = None  # the last one, and its input

    def divided(
        self, offsets: Sequence[int], *, armed: Sequence[Range], own: Sequence[Range], shared: Sequence[Range],
        watched: Sequence[Range],
    ) -> Division:  # fmt: skip
        """The division of the plan's tensors. offsets: the plan's. The same object while its input is unchanged."""
        basis = ([*armed], [*own], [*shared], [*watched])
        if self.division is None or self.division[0] != basis:
            found = divide(
                self.choice.spans, offsets, self.choice.whole, armed=armed, own=own, shared=shared, watched=watched
            )
            self.division = basis, found
        return self.division[1]


def _chosen(names: list[str], basis: Basis, read: list[int], choice: Choice) -> Chosen:
    return Chosen(names, basis, read, choice, choice.units(read=False), choice.units(read=True))


class Choices:
    """The choices of one client."""

    def __init__(self) -> None:
        self._kept: dict[str, Chosen] = {}

    def of(self, plan: Plan, values: Values, owned: Sequence[torch.Tensor], rules: Rules) -> Chosen:
        """The choice for these tensors at their current addresses. owned: the optimizers' tensors."""
        shared = [one for digest in values.digests for one in digest.tensors]
        basis, read = Basis(rules, addresses(values.tensors), addresses(owned)), addresses([one for _, one in shared])
        found = self._kept.get(plan.plan_id)
        if found is None or found.basis != basis or read not in ([], found.read):
            names = found.names if found is not None else [box.name for box in plan.image.boxes]
            found = _chosen(names, basis, read, _choice(names, values.tensors, shared, read, owned, basis))
            self._kept.pop(plan.plan_id, None)
            self._kept[plan.plan_id] = found
            while len(self._kept) > _MAX_KEPT:
                del self._kept[next(iter(self._kept))]
        if all_straight([values.tensors[i] for i, _ in found.choice.spans]):
            return found
        straight = [one for one in found.choice.spans if all_straight([values.tensors[one[0]]])]
        return _chosen(found.names, basis, read, found.choice._replace(spans=straight))  # for this save alone

    @property
    def units(self) -> list[Range]:
        """The units of all plans."""
        return [unit for chosen in self._kept.values() for unit in chosen.with_read.all]

    def forget(self) -> None:
        """Drops all choices."""
        self._kept = {}


def _choice(  # noqa: PLR0913, PLR0917 - one step of Choices.of
    names: Sequence[str], tensors: Sequence[torch.Tensor], shared: Sequence[tuple[str, torch.Tensor]],
    read: Sequence[int], owned: Sequence[torch.Tensor], basis: Basis,
) -> Choice:  # fmt: skip
    rules, lie = basis.rules, basis.lie
    begins, memory = set(basis.owned), {storage_of(tensor) for tensor in owned} - {0}

    def able(named: Sequence[str], found: Sequence[torch.Tensor], at: Sequence[int]) -> list[int]:
        """Positions of tensors in the memory of an owned one."""
        inside = [i for i, a in enumerate(at) if a and (a in begins or storage_of(found[i]) in memory)]
        return [i for i in inside if not found[i].is_inference() and named[i] not in rules.written]

    mine = able(names, tensors, lie)
    on_devices = {i for positions in by_engine(tensors).values() for i in positions}
    whole = [i for i in mine if (i in on_devices and rules.devices) or (rules.trusted and tensors[i].is_cpu)]
    if not rules.proof:
        return Choice(whole, [], [])
    spans = _spans(tensors, lie, [i for i in mine if i not in on_devices])
    others = [tensor for _, tensor in shared]
    only_read = _spans(others, read, able([name for name, _ in shared], others, read))
    return Choice(whole, spans, [span for _, span in only_read])


def _spans(tensors: Sequence[torch.Tensor], lie: Sequence[int], able: Sequence[int]) -> list[tuple[int, Range]]:
    found = [i for i in able if tensors[i].is_cpu and tensors[i].nbytes and all_straight([tensors[i]])]
    return sorted(((i, Range(lie[i], lie[i] + tensors[i].nbytes)) for i in found), key=lambda one: one[1])


def all_straight(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the tensors are contiguous as they are written, and no device is known to write to them."""
    kind = torch.Tensor
    if not all(map(kind.is_contiguous, tensors)) or any(map(kind.is_conj, tensors)) or any(map(kind.is_neg, tensors)):
        return False
    return not (_cuda.is_initialized() and any(map(kind.is_pinned, tensors)))
