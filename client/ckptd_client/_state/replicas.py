"""Finds the tensors of a state that other ranks hold too, where that is certain."""

import fnmatch
import logging
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ckptd.shared.format.layout import Path
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

    ranks: dict[int, tuple[int, ...]]  # that hold each replicated tensor, by position
    grounds: tuple["Ground", ...]


def replicas_of(flat: Flat, patterns: Sequence[str], group: Group) -> Replicas:
    """For each replicated tensor the ranks that hold it, where that is certain.

    Placements of DTensors show it. Plain tensors count if the user named them, if they are parameters of a
    DistributedDataParallel in the state, or if one of torch's optimizers keeps them for such parameters alone. Only
    meshes and process groups of all ranks count: two parts of the job may hold different tensors of one name.
    """
    everybody = tuple(range(group.world_size))
    known = _numbers_agree(group)
    ddp, grounds = _ddp_of(flat, group.world_size) if known else ([], ())
    found: dict[int, tuple[int, ...]] = {}
    for position, (name, path, value) in enumerate(zip(flat.names, flat.paths, flat.values, strict=True)):
        if not is_tensor(value):
            continue
        ranks: tuple[int, ...] = ()
        if is_dtensor(value):
            ranks = _mesh_replicas(value, group.world_size) if known else ()
        elif any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns) or any(
            _is_inside(path, prefix, inside) for prefix, inside in ddp
        ):
            ranks = everybody
        if len(ranks) > 1:
            found[position] = ranks
    return Replicas(found, grounds)


def _numbers_agree(group: Group) -> bool:
    """Whether the ranks of torch's meshes and process groups are those of the job."""
    dist = torch.distributed
    if not (dist.is_available() and dist.is_initialized()):
        return False
    return (dist.get_rank(), dist.get_world_size()) == (group.rank, group.world_size)


def _mesh_replicas(tensor: Any, world_size: int) -> tuple[int, ...]:
    mesh, coordinate = tensor.device_mesh.mesh, tensor.device_mesh.get_coordinate()
    if coordinate is None or mesh.numel() != world_size:
        return ()
    if any(hasattr(placement, "split_factor") for placement in tensor.placements):
        return ()
    where = tuple(
        slice(None) if placement.is_replicate() else coordinate[d] for d, placement in enumerate(tensor.placements)
    )
    return tuple(sorted(int(rank) for rank in mesh[where].flatten().tolist()))


Inside = frozenset[str] | None  # names below a prefix; None: the tensors of an optimizer's state


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


def _ddp_of(flat: Flat, world_size: int) -> tuple[list[tuple[Path, Inside]], tuple[Ground, ...]]:
    """Paths of DDP modules and of optimizers of their parameters, with the names there that count."""
    from torch.nn.parallel import DistributedDataParallel  # noqa: PLC0415 - see sharded.py

    found: list[tuple[Path, Inside]] = []
    grounds: list[Ground] = []
    owned: set[int] = set()
    for path, stateful in flat.statefuls:
        if isinstance(stateful, DistributedDataParallel):
            grounds.append(Ground(weakref.ref(stateful), _trained(stateful)))
            names = _kept_equal(stateful, world_size)
            owned |= {id(parameter) for name, parameter in stateful.named_parameters() if name in names}
            found.append((path, names))
    optimizers = [(path, one) for path, one in flat.statefuls if isinstance(one, torch.optim.Optimizer)]
    for path, optimizer in optimizers:
        known = type(optimizer).__module__.startswith("torch.optim")  # others may keep values that differ between ranks
        if owned and known and all(id(p) in owned for group in optimizer.param_groups for p in group["params"]):
            found.append((path, None))
    return found, tuple(grounds)


def _kept_equal(module: Any, world_size: int) -> frozenset[str]:
    """Names of the parameters that a DDP keeps equal on all ranks of the job.

    It broadcasts all when it wraps a module, and then sums the gradients of those that required gradients at that time.
    Its logging data has their number; if another number of parameters requires gradients now, some were frozen,
    unfrozen or added since. With a user's hook it may sum gradients over some ranks only, as in post-local SGD.
    """
    if not all(_sums_for_all(hook) for hook, _ in module._comm_hooks):  # noqa: SLF001 - there is no public way
        return frozenset()
    if torch.distributed.get_world_size(module.process_group) != world_size:
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


def _is_inside(path: Path, prefix: Path, inside: Inside) -> bool:
    if path[: len(prefix)] != prefix or len(path) == len(prefix):
        return False
    rest = path[len(prefix) :]
    if inside is None:
        return rest[0] == ("k", "state")
    return len(rest) == 1 and rest[0][1] in inside


_HOOKS = {"allreduce_hook", "fp16_compress_hook", "bf16_compress_hook", "powerSGD_hook", "batched_powerSGD_hook"}


def _sums_for_all(hook: Any) -> bool:
    """Whether a communication hook is one of torch's own that gives all ranks the same gradients."""
    torchs = getattr(hook, "__module__", "").startswith("torch.distributed.algorithms.ddp_comm_hooks.")
    return torchs and getattr(hook, "__name__", "") in _HOOKS
