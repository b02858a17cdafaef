"""How far the nodes of a job protect each other, as values that the status shows. Pure.

The coordinator's half makes it, ``ckptd/daemon/status.py`` reads it.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, cast

import msgspec

from ckptd.core.redundancy_sets import redundancy_sets
from ckptd.shared.base.ids import SaveId
from ckptd.shared.format.schemes import Scheme
from ckptd.shared.protocol.topology import Topology

_FEW = 8


class NodeView(msgspec.Struct, frozen=True, gc=False):
    """One node of the job."""

    node: str
    domain: str
    ranks: list[int]
    reachable: bool
    set_index: int
    encoded_step: int | None  # the newest that this node has whole parity of
    problem: str = ""


class ProtectionView(msgspec.Struct, frozen=True, kw_only=True):
    """The job as its coordinator sees it."""

    scheme: Scheme = Scheme.NONE  # what is asked for
    set_size: int = 0
    coordinator: str = ""
    nodes: tuple[NodeView, ...] = ()
    protected: frozenset[SaveId] = frozenset()  # every set has encoded them
    degraded: tuple[str, ...] = ()  # what is less safe than it was asked to be, in words


def view_of(
    topology: Topology,
    *,
    unreachable: Collection[str] = (),
    encoded: Mapping[str, SaveId] | None = None,
    protected: Collection[SaveId] = (),
    problems: Mapping[str, str] | None = None,
) -> ProtectionView:
    """The view of a job that runs so. encoded and problems by node; a problem is what keeps it from its parity."""
    encoded, problems = encoded or {}, problems or {}
    steps = {node: save.step for node, save in encoded.items()}
    found = _fixed(topology)
    nodes = tuple(
        NodeView(node, domain, ranks, node not in unreachable, number, steps.get(node), problems.get(node, ""))
        for node, domain, ranks, number in found.nodes
    )
    return ProtectionView(
        scheme=topology.scheme,
        set_size=topology.set_size,
        coordinator=topology.coordinator,
        nodes=nodes,
        protected=frozenset(protected),
        degraded=(*less_than_asked(topology, found.sets), *_degraded(topology.scheme, found.sets, nodes)),
    )


class _Fixed(NamedTuple):
    """Of a topology. nodes: name, domain, ranks, number of the set."""

    sets: list[tuple[str, ...]]
    nodes: list[tuple[str, str, list[int], int]]


def _fixed(topology: Topology) -> _Fixed:
    """Made once: a status of thousands of nodes is asked for again and again."""
    if (known := topology.__dict__.get("fixed")) is not None:
        return cast("_Fixed", known)
    ranks: list[list[int]] = [[] for _ in topology.peers]
    for rank, home in enumerate(topology.homes):
        ranks[home].append(rank)
    sets = redundancy_sets(topology.peers, topology.set_size)
    index = {node: number for number, members in enumerate(sets) for node in members}
    nodes = [(peer.node, peer.domain, ranks[place], index[peer.node]) for place, peer in enumerate(topology.peers)]
    topology.__dict__["fixed"] = found = _Fixed(sets, nodes)
    return found


def less_than_asked(topology: Topology, sets: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """What the scheme cannot do for nodes so few, and what to type. Of a scheme that nobody chose a lone node has none.

    It is the same as long as the session lasts: rank 0 receives it once.
    """
    scheme, nodes = topology.scheme, len(topology.peers)
    if scheme is Scheme.NONE or (nodes == 1 and not topology.asked):
        return ()
    way_out = f"run the job on {scheme.losses + 1} nodes or more, or connect(redundancy='{{}}')"
    if nodes == 1:
        return (f"redundancy {scheme} protects nothing: all ranks run on one node; {way_out.format(Scheme.NONE)}",)
    small: dict[int, list[int]] = {}  # sets that cannot carry the scheme, by how many members they have
    for number, members in enumerate(sets):
        if scheme.among(len(members)) is not scheme:
            small.setdefault(len(members), []).append(number)
    return tuple(
        f"{_sets(numbers)} {count} nodes: {force} in place of {scheme}; {way_out.format(force)}"
        for count, numbers in small.items()
        for force in (scheme.among(count),)
    )


def _sets(numbers: Sequence[int]) -> str:
    return f"set {numbers[0]} has" if len(numbers) == 1 else f"sets {few_names([*map(str, numbers)])} have"


def _degraded(scheme: Scheme, sets: Sequence[tuple[str, ...]], nodes: Sequence[NodeView]) -> list[str]:
    """Sets that do not protect now, and why."""
    if scheme is Scheme.NONE or len(nodes) == 1:
        return []
    out: list[list[str]] = [[] for _ in sets]
    lost: dict[int, list[str]] = {}
    for view in nodes:
        if not view.reachable:
            lost.setdefault(view.set_index, []).append(view.node)
        elif view.problem:
            out[view.set_index].append(f"set {view.set_index}: node {view.node}: {view.problem}")
    for number, names in lost.items():
        out[number].insert(0, f"set {number} makes no parity while it hears nothing of {few_names(names)}")
    return [text for of_set in out for text in of_set]


def few_names(names: Sequence[str]) -> str:
    """The first of many names, for a sentence."""
    more = f" and {len(names) - _FEW} more" if len(names) > _FEW else ""
    return ", ".join(names[:_FEW]) + more
