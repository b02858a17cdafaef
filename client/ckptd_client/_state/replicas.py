"""Finds the tensors of a state that other ranks hold too, where that is certain."""

import fnmatch
import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ckptd.shared.format.layout import Path
from ckptd.shared.format.rank_members import members_of
from ckptd_client._local.rank import Group
from ckptd_client._state.sharded import is_dtensor
from ckptd_client._state.tensors import is_tensor
from ckptd_client._state.tree import Flat

log = logging.getLogger("ckptd_client")


def warn_of_idle(patterns: Sequence[str], names: Sequence[str]) -> None:
    """Logs the patterns that match no name of a state: probably typing errors."""
    idle = [pattern for pattern in patterns if not any(fnmatch.fnmatchcase(name, pattern) for name in names)]
    if idle:
        keys = ", ".join(names[:3])
        log.warning("ckptd: replicated=%r names nothing in the state; its keys are %s, ...", idle, keys)


class Replicas(NamedTuple):
    """The replicated tensors of a state, and the DDP modules on which that depends."""

    ranks: dict[int, tuple[int, ...]]  # that hold each replicated tensor alike, by position
    holders: dict[int, bytes]  # members of the part of the job that holds a tensor together, by position
    grounds: tuple["Ground", ...]


def replicas_of(flat: Flat, patterns: Sequence[str], group: Group, is_own: Callable[[str], bool]) -> Replicas:
    """For each replicated tensor the ranks that hold it, where that is certain.

    Placements of DTensors show it. Plain tensors count if the user named them, if they are parameters of a
    DistributedDataParallel in the state, or if one of torch's optimizers keeps them for such parameters alone. Meshes
    and process groups may be of any ranks. Two parts of the job may hold different tensors of one name, so the ranks of
    the mesh or group are found too. is_own: whether each rank has its own value of a name, whatever it looks like.
    """
    everybody = tuple(range(group.world_size))
    known = _numbers_agree(group)
    ddp, grounds = _ddp_of(flat) if known else ([], ())
    meshes = _Meshes()
    found: dict[int, tuple[int, ...]] = {}
    holders: dict[int, bytes] = {}
    for position, (name, path, value) in enumerate(zip(flat.names, flat.paths, flat.values, strict=True)):
        if not is_tensor(value) or is_own(name):
            continue
        ranks: Ranks = ()
        held: Ranks = ()  # by these together
        if is_dtensor(value):
            ranks, held = meshes.of(value) if known else ((), ())
        elif any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            ranks = everybody
        else:
            ranks = held = next((part.ranks for part in ddp if _is_inside(path, part)), ())
        if len(ranks) > 1:
            found[position] = ranks
        if held and held != everybody:
            holders[position] = meshes.members(held)
    return Replicas(found, holders, grounds)


def _numbers_agree(group: Group) -> bool:
    """Whether the ranks of torch's meshes and process groups are those of the job."""
    dist = torch.distributed
    if not (dist.is_available() and dist.is_initialized()):
        return False
    return (dist.get_rank(), dist.get_world_size()) == (group.rank, group.world_size)


Ranks = tuple[int, ...]  # ascending


class _Meshes:
    """The ranks of the meshes of a state's tensors, each found once: a state has thousands, and a mesh as many ranks.

    Use it while the tensors live.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[int, tuple[int | None, ...]], Ranks] = {}
        self._members: dict[Ranks, bytes] = {}

    def of(self, tensor: Any) -> tuple[Ranks, Ranks]:
        """The ranks that hold the same part as this one, and those of the mesh; none where this one is not in it."""
        mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
        if coordinate is None:
            return (), ()
        held = self._at(mesh, (None,) * mesh.ndim)
        if any(hasattr(placement, "split_factor") for placement in tensor.placements):
            return (), held
        placed = zip(coordinate, tensor.placements, strict=True)
        return self._at(mesh, tuple(None if placement.is_replicate() else at for at, placement in placed)), held

    def members(self, ranks: Ranks) -> bytes:
        """The ranks as a layout names them."""
        if ranks not in self._members:
            self._members[ranks] = members_of(ranks)
        return self._members[ranks]

    def _at(self, mesh: Any, place: tuple[int | None, ...]) -> Ranks:
        """The ranks at a place of a mesh; None: anywhere along that dimension."""
        key = (id(mesh), place)
        if key not in self._found:
            where = tuple(slice(None) if at is None else at for at in place)
            self._found[key] = tuple(sorted(mesh.mesh[where].flatten().tolist()))
        return self._found[key]


class _Part(NamedTuple):
    """Tensors below a path that these ranks keep equal."""

    prefix: Path
    inside: frozenset[str] | None  # their names; None: the tensors of an optimizer's state
    ranks: Ranks


@dataclass(frozen=True, slots=True)
class Ground:
    """A DDP module whose parameters count as replicas, and which of them were trained then."""

    module: "weakref.ref[Any]"
    trained: tuple[bool, ...]

    def holds(self) -> bool:
        """Whether that is unchanged: DDP does not keep a parameter equal that is unfrozen later."""
        module = self.module()
        return module is not None and _trained(module) == self.trained


def _trained(module: Any) -> tuple[bool, ...]:
    return tuple(parameter.requires_grad for parameter in module.parameters())


def _ddp_of(flat: Flat) -> tuple[list[_Part], tuple[Ground, ...]]:
    """Paths of DDP modules and of optimizers of their parameters, with the names there that count."""
    from torch.nn.parallel import DistributedDataParallel  # noqa: PLC0415 - see sharded.py

    found: list[_Part] = []
    grounds: list[Ground] = []
    owned: dict[int, Ranks] = {}
    for path, stateful in flat.statefuls:
        if isinstance(stateful, DistributedDataParallel):
            grounds.append(Ground(weakref.ref(stateful), _trained(stateful)))
            names, ranks = _kept_equal(stateful), _ranks_of(stateful)
            owned |= {id(parameter): ranks for name, parameter in stateful.named_parameters() if name in names}
            found.append(_Part(path, names, ranks))
    optimizers = [(path, one) for path, one in flat.statefuls if isinstance(one, torch.optim.Optimizer)]
    for path, optimizer in optimizers:
        known = type(optimizer).__module__.startswith("torch.optim")  # others may keep values that differ between ranks
        sets = {owned.get(id(p), ()) for group in optimizer.param_groups for p in group["params"]}
        if known and len(sets) == 1 and () not in sets:
            found.append(_Part(path, None, sets.pop()))
    return found, tuple(grounds)


def _ranks_of(module: Any) -> Ranks:
    """The ranks between which a DDP sums gradients."""
    return tuple(sorted(torch.distributed.get_process_group_ranks(module.process_group)))


def _kept_equal(module: Any) -> frozenset[str]:
    """Names of the parameters that a DDP keeps equal on the ranks of its process group.

    It broadcasts all when it wraps a module, and then sums the gradients of those that required gradients at that time.
    Its logging data has their number; if another number of parameters requires gradients now, some were frozen,
    unfrozen or added since. With a user's hook it may sum gradients over some ranks only, as in post-local SGD.
    """
    if not all(_sums_for_all(hook) for hook, _ in module._comm_hooks):  # noqa: SLF001 - there is no public way
        return frozenset()
    parameters = dict(module.named_parameters(remove_duplicate=False))
    ignored = set(module.parameters_to_ignore)
    kept = {name: p for name, p in parameters.items() if name.removeprefix("module.") not in ignored}
    wrapped = {id(parameter) for parameter in module._module_parameters}  # noqa: SLF001 - there is no public way
    trained = {id(parameter) for parameter in kept.values() if parameter.requires_grad}
    summed = module._get_ddp_logging_data().get("num_parameter_tensors")  # noqa: SLF001 - as above
    if summed != len(trained) or not trained <= wrapped:
        return frozenset()
    return frozenset(name for name, parameter in kept.items() if id(parameter) in wrapped)


def _is_inside(path: Path, part: _Part) -> bool:
    count = len(part.prefix)
    if path[:count] != part.prefix or len(path) == count:
        return False
    rest = path[count:]
    if part.inside is None:
        return rest[0] == ("k", "state")
    return len(rest) == 1 and rest[0][1] in part.inside


_HOOKS = {"allreduce_hook", "fp16_compress_hook", "bf16_compress_hook", "powerSGD_hook", "batched_powerSGD_hook"}


def _sums_for_all(hook: Any) -> bool:
    """Whether a communication hook is one of torch's own that gives all ranks the same gradients."""
    torchs = getattr(hook, "__module__", "").startswith("torch.distributed.algorithms.ddp_comm_hooks.")
    return torchs and getattr(hook, "__name__", "") in _HOOKS
