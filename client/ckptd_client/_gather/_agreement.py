"""Checks that all ranks are about to gather the same: ranks exchange their plans, and all reach the same verdict.

A rank sends an error in place of its plan, so that all ranks raise instead of waiting for it.
"""

import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import msgspec

from ckptd.shared.base.errors import CkptdError, UsageError
from ckptd.shared.format.boxes import tile
from ckptd.shared.format.digest import digest
from ckptd_client._gather._cuts import Box, Shape
from ckptd_client._gather._leaves import Leaf

Exchange = Callable[[bytes], list[bytes]]
Members = tuple[int, ...]
_HINT = "call gather on all ranks with states of the same structure and the same arguments"
_MAX_TEXT = 1000


class SetPlan(msgspec.Struct, frozen=True, array_like=True):
    """A rank's plan for the tensors that it holds together with the same other ranks."""

    members: bytes  # digest of these ranks
    count: int
    lines: bytes  # digest of names, shapes, dtypes, placements
    ties: bytes  # digest of which of them are one tensor
    announced: list[tuple[Shape, list[Box]]]  # boxes that do not follow from placements, in order


class RankPlan(msgspec.Struct, frozen=True, array_like=True):
    """One rank's plan for a gather."""

    settings: str = ""
    sets: list[SetPlan] = []
    orphans: list[str] = []  # names of tensors here that no holder receives
    groups: list[tuple[int, ...]] = []  # sets that need a process group, of which this rank is the first member
    error: str = ""
    hint: str = ""


class Agreed(NamedTuple):
    """The result of all plans, equal on all ranks."""

    orphans: list[str]
    groups: list[Members]


class Listed(msgspec.Struct, frozen=True, array_like=True):
    """A set as one rank has it; the other ranks look for differences from theirs."""

    members: tuple[int, ...]
    lines: dict[str, str]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(RankPlan)
_names = msgspec.msgpack.Decoder(list[str])
_listed = msgspec.msgpack.Decoder(Listed)


def failed_plan(error: Exception) -> bytes:
    """Encodes an error of this rank, to be sent in place of its plan."""
    text = error.message if isinstance(error, CkptdError) else f"{type(error).__name__}: {error}"
    hint = error.hint if isinstance(error, CkptdError) else ""
    return _encoder.encode(RankPlan(error=text[:_MAX_TEXT], hint=hint[:_MAX_TEXT]))


def agree(sets: Mapping[Members, list[Leaf]], plan: RankPlan, exchange: Exchange, rank: int) -> Agreed:
    """Makes one list of each set, equal on all members, and gives every leaf its boxes. Collective.

    Removes a tied leaf from the list and records which leaf it is tied to, if all members have that tie. plan: the rest
    of this rank's plan. Raises UsageError, on all ranks, with the first difference.
    """
    ties = {members: _ties(leaves) for members, leaves in sets.items()}
    own = [_set_plan(members, leaves, ties[members]) for members, leaves in sets.items()]
    plans = [_decoder.decode(found) for found in exchange(_encoder.encode(msgspec.structs.replace(plan, sets=own)))]
    _check_calls(plans)
    found: dict[bytes, dict[int, SetPlan]] = defaultdict(dict)
    for other, ranks_plan in enumerate(plans):
        for one in ranks_plan.sets:
            found[one.members][other] = one
    for key, by_rank in found.items():
        count = next(iter(by_rank.values())).count
        if len(by_rank) != count or len({one.lines for one in by_rank.values()}) != 1:
            _raise_difference(sets, key, min(by_rank), exchange, rank)
    for by_rank in found.values():
        _check_announced(by_rank)
    for members, leaves in sets.items():
        _settle(leaves, found[_key(members)], ties[members])
    orphans = sorted({name for plan in plans for name in plan.orphans})
    return Agreed(orphans, sorted(group for plan in plans for group in plan.groups))


def check_reached(orphans: Sequence[str], names: Collection[str], exchange: Exchange) -> None:
    """Checks that some rank that receives tensors has, by name, each tensor that none of its holders receives.

    Collective. Tensors that tensor parallelism leaves whole pass: every column of the mesh holds them. names: of this
    rank's tensors, if it receives some. Raises UsageError on all ranks.
    """
    missing = set(orphans)
    for absent in exchange(_encoder.encode([name for name in orphans if name not in names])):
        missing &= set(_names.decode(absent))
    if missing:
        text = f"{min(missing)!r} lies on no rank that it is gathered to, nor do {len(missing) - 1} others"
        raise UsageError(text, hint="name a rank that holds it in to, too")


def _key(members: Members) -> bytes:
    return digest(repr(members).encode())


def _set_plan(members: Members, leaves: Sequence[Leaf], ties: Mapping[int, Leaf]) -> SetPlan:
    lines = "\n".join([f"{leaf.name}: {leaf.line}" for leaf in leaves])
    tied = "\n".join(f"{i} {leaf.name}" for i, leaf in ties.items())
    announced = [(leaf.box_shape, list(leaf.own)) for leaf in leaves if leaf.place.boxes is None]
    return SetPlan(_key(members), len(members), digest(lines.encode()), digest(tied.encode()), announced)


def _ties(leaves: Sequence[Leaf]) -> dict[int, Leaf]:
    """By index in the list: the earlier leaf of which a leaf is another name."""
    first: dict[object, Leaf] = {}
    pairs = ((i, first.setdefault((leaf.identity, leaf.line), leaf)) for i, leaf in enumerate(leaves) if leaf.identity)
    return {i: owner for i, owner in pairs if owner is not leaves[i]}


def _check_calls(plans: Sequence[RankPlan]) -> None:
    for other, plan in enumerate(plans):
        if plan.error:
            raise UsageError(f"rank {other} cannot gather: {plan.error}", hint=plan.hint)
    for other, plan in enumerate(plans):
        if plan.settings != plans[0].settings:
            text = f"rank {other} gathers with {plan.settings}, rank 0 with {plans[0].settings}"
            raise UsageError(text, hint=_HINT)


def _check_announced(plans: Mapping[int, SetPlan]) -> None:
    """Checks that the boxes that ranks announced make up their tensors. Raises UsageError."""
    for number, (shape, _) in enumerate(next(iter(plans.values())).announced):
        boxes = [box for one in plans.values() for box in one.announced[number][1]]
        if not tile(shape, boxes):
            text = f"the parts that ranks {sorted(plans)} have of a tensor of {list(shape)} do not make it up"
            raise UsageError(text, hint="give each element of the tensor to one rank")


def _settle(leaves: list[Leaf], plans: Mapping[int, SetPlan], ties: Mapping[int, Leaf]) -> None:
    order = sorted(plans)
    announced = 0
    for leaf in leaves:
        if leaf.place.boxes is None:
            boxes = tuple(tuple(plans[other].announced[announced][1]) for other in order)
            leaf.place = leaf.place._replace(boxes=boxes)
            announced += 1
    if len({one.ties for one in plans.values()}) == 1:
        for i, owner in ties.items():
            leaves[i].tied = owner
        leaves[:] = [leaf for leaf in leaves if leaf.tied is None]


# --- errors ---


def _raise_difference(
    sets: Mapping[Members, Sequence[Leaf]], key: bytes, reference: int, exchange: Exchange, rank: int
) -> None:
    """Finds the first difference from one rank's list of a set. Collective; raises UsageError on all ranks."""
    own = {leaf.name: leaf.line for members, leaves in sets.items() if _key(members) == key for leaf in leaves}
    every = {leaf.name: leaf.line for leaves in sets.values() for leaf in leaves}
    members = next((members for members in sets if _key(members) == key), ())
    listed = Listed(members, own)
    sent = exchange(zlib.compress(_encoder.encode(listed)) if rank == reference else b"")[reference]
    listed = _listed.decode(zlib.decompress(sent))
    concerned = rank in listed.members and rank != reference
    text = _difference(every, own, listed.lines, rank, reference) if concerned else ""
    texts = exchange(text.encode())
    found = next((text.decode() for text in texts if text), "the order of their tensors")
    raise UsageError(f"the ranks gather different states: {found}", hint=_HINT)


def _difference(
    every: Mapping[str, str], own: Mapping[str, str], listed: Mapping[str, str], rank: int, reference: int
) -> str:
    """The first tensor that is not the same on this rank and on the reference rank."""
    nothing = "not there, or not sharded"
    for name, line in listed.items():
        mine = every.get(name, nothing)
        if mine != line:
            return f"{name!r} is {mine} on rank {rank}, and {line} on rank {reference}"[:_MAX_TEXT]
    for name in own:
        if name not in listed:
            return f"{name!r} is {own[name]} on rank {rank}, and {nothing} on rank {reference}"[:_MAX_TEXT]
    return ""
