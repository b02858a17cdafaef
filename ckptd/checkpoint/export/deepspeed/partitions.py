"""What each rank's optimizer file holds: flat tensors, and which range of them is whose.

A rank has flat tensors by group, the fp32 weights and each state of the optimizer, all laid out alike. ZeRO-1 and 2 cut
a group's parameters, end to end, into one range per rank, and each rank notes what fell into its own. ZeRO-3 cuts every
parameter by itself into equal ranges, the last ones padded, and a rank's lie end to end in the order of `param_shapes`.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from ckptd.checkpoint.export.deepspeed.archives import Archive, Range
from ckptd.shared.base.errors import CkptdError, DamagedError, UsageError
from ckptd.shared.format.dtypes import itemsize
from ckptd.shared.format.placement import Shape
from ckptd.shared.torchfile.pickle_read import Made, Stored

WEIGHTS = ""  # among the states of the optimizer: the fp32 weights themselves
MAX_STAGE = 3
_STAGES = {"optimizer_states": 1, "gradients": 2, "weights": 3}
_MAX_COUNT = 1 << 53
_MAX_ROW = 64  # items of a setting, such as the two betas
Shapes = Sequence[dict[str, Shape]]  # of the parameters, by name, a dict for each group


class Slice(NamedTuple):
    """What one rank has of one parameter, in one group."""

    group: int
    start: int  # element of the group's flat tensors
    elements: int


class Partition(NamedTuple):
    """What one rank has. flat: by group and state; single: what a group has once, such as its count of steps."""

    archive: Archive
    flat: list[dict[str, Range]]
    single: list[dict[str, Range | float]]
    slices: dict[str, list[Slice]]
    param_groups: list[tuple[dict[str, Any], list[int]]]  # plain settings of the optimizer, and for which groups


def stage_of(archive: Archive) -> int:
    """1 to 3. The BF16 optimizer, which is ZeRO-1, notes none. Raises UsageError for what is no ZeRO checkpoint."""
    optimizer = archive.at("optimizer_state_dict")
    if isinstance(optimizer, dict):
        stage = optimizer.get("zero_stage", 1)
        if isinstance(stage, Made) and isinstance(stage.args, tuple):  # a member of an enumeration, by value or name
            stage = next((_STAGES.get(arg, arg) for arg in stage.args if type(arg) in (int, str)), None)
        if type(stage) is int and 1 <= stage <= MAX_STAGE:
            return stage
    raise UsageError(f"{archive.path} is no file of ZeRO's", hint="export the directory that save_checkpoint wrote")


def ranks_of(archive: Archive) -> int:
    """How many ranks saved. Raises UsageError when groups were cut for different numbers, as those of experts are."""
    counts = archive.at("optimizer_state_dict", "partition_count")
    counts = counts if isinstance(counts, list) else [counts]
    same = counts and type(counts[0]) is int and counts[0] > 0 and counts.count(counts[0]) == len(counts)
    if not same or archive.at("optimizer_state_dict", "ds_zero_partition_groups"):
        raise UsageError(
            f"{archive.path}: its groups of parameters are cut for different numbers of ranks (experts?)",
            hint="that is not exported; DeepSpeed's ds_to_universal.py converts it",
        )
    return int(counts[0])


def partition_of(archive: Archive, shapes: Shapes, ranks: int) -> Partition:
    """What the rank of this file has. Raises DamagedError or UsageError, naming the file."""
    third = stage_of(archive) == MAX_STAGE
    weights = archive.field("optimizer_state_dict", "fp32_flat_groups" if third else "single_partition_of_fp32_groups")
    base = archive.field("optimizer_state_dict", "optimizer_state_dict" if third else "base_optimizer_state")
    if not isinstance(weights, list) or len(weights) != len(shapes) or not isinstance(base, dict | list):
        raise _unfit(archive, "the groups of parameters and of flat weights differ in number")
    flat = [{WEIGHTS: _flat(archive, tensor)} for tensor in weights]
    single: list[dict[str, Range | float]] = [{} for _ in weights]
    for group, state, value in _states(archive, base, len(weights)):
        count = _count(value)
        if isinstance(value, Stored) and not value.shape:
            single[group][state] = archive.range_of(value, f"the optimizer's {state}")
        elif isinstance(value, Stored) and value.shape >= (flat[group][WEIGHTS].elements,) and len(value.shape) == 1:
            flat[group][state] = _flat(archive, value)  # of another length it is nothing of the weights' layout
        elif count is not None:
            single[group][state] = count
    param_groups = list(_param_groups(archive, base, len(weights))) if isinstance(base, dict) else []
    for settings, groups in param_groups:
        step = _count(settings.pop("step", None))  # some optimizers count by group, the rest by parameter
        if step is not None:
            for group in groups:
                single[group].setdefault("step", step)
    slices = _equal_slices(archive, shapes, flat, ranks) if third else _noted_slices(archive)
    return Partition(archive, flat, single, slices, param_groups)


def ranges(partitions: Sequence[Partition], name: str, state: str) -> Iterator[Range]:
    """All ranks' ranges of a parameter's weights or of a state of its optimizer, in the order of its elements."""
    for partition in partitions:
        for one in partition.slices.get(name, ()):
            flat = partition.flat[one.group].get(state)
            if flat is None or one.start + one.elements > flat.elements:
                raise _unfit(partition.archive, f"{state or 'the weights'} of {name!r} are not where it says")
            yield flat._replace(start=flat.start + one.start * itemsize(flat.dtype), elements=one.elements)


def _states(archive: Archive, base: dict[Any, Any] | list[Any], groups: int) -> Iterator[tuple[int, str, object]]:
    """Group, name and value of all states of the optimizer. An elastic checkpoint lists groups, others number them."""
    by_group = base.get("state") if isinstance(base, dict) else dict(enumerate(base))
    by_group = by_group if isinstance(by_group, dict) else {}
    check_distinct(archive, by_group.values())
    for group in range(groups):
        own = by_group.get(group)
        for state, value in own.items() if isinstance(own, dict) else ():
            if isinstance(state, str):
                yield group, state, value


def _flat(archive: Archive, tensor: object) -> Range:
    if not isinstance(tensor, Stored) or len(tensor.shape) != 1:
        raise _unfit(archive, "what should be a flat tensor is none")
    return archive.range_of(tensor, "a flat tensor")


def _unfit(archive: Archive, what: str) -> CkptdError:
    return DamagedError(f"{archive.path}: {what}", hint="zero_to_fp32.py, in the directory above, may know it")


def check_distinct(archive: Archive, parts: Iterable[object]) -> None:
    """Raises DamagedError when several places share one object: visited in each, few bytes would become many."""
    ids = [id(part) for part in parts]
    if len(set(ids)) != len(ids):
        raise _unfit(archive, "several groups are one")


def _param_groups(archive: Archive, base: dict[Any, Any], count: int) -> Iterator[tuple[dict[str, Any], list[int]]]:
    """Settings of each group of the optimizer, plain values only, and the numbers of the flat tensors that it has."""
    groups = base.get("param_groups")
    owned = 0
    check_distinct(archive, groups if isinstance(groups, list) else ())
    for group in groups if isinstance(groups, list) else ():
        members = group.get("params") if isinstance(group, dict) else None
        members = members if isinstance(members, list) else [None]
        owned += len(members)
        if owned > count or not all(type(n) is int and 0 <= n < count for n in members):
            raise _unfit(archive, "the optimizer's groups are not those of the weights")
        yield {k: v for k, v in group.items() if isinstance(k, str) and k != "params" and _is_plain(v)}, members


def _count(value: object) -> float | None:
    """A count of steps that is no tensor."""
    return float(value) if type(value) in (int, float) and abs(value) < _MAX_COUNT else None  # type: ignore[arg-type]


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return len(value) <= _MAX_ROW and all(type(item) in (bool, int, float, str) for item in value)
    return value is None or type(value) in (bool, int, float, str)


def _noted_slices(archive: Archive) -> dict[str, list[Slice]]:
    """ZeRO-1 and 2: as the rank noted them."""
    found: dict[str, list[Slice]] = {}
    notes = archive.at("optimizer_state_dict", "param_slice_mappings")
    if notes is None:
        raise _unfit(archive, "which parameter lies where (param_slice_mappings) is not noted; DeepSpeed was too old")
    check_distinct(archive, notes if isinstance(notes, list) else ())
    for group, noted in enumerate(notes if isinstance(notes, list) else ()):
        for name, address in noted.items() if isinstance(noted, dict) else ():
            state = address.state if isinstance(address, Made) and isinstance(address.state, dict) else {}
            start, elements = state.get("start"), state.get("numel")
            if type(start) is not int or type(elements) is not int or start < 0 or elements < 0 or name in found:
                raise _unfit(archive, f"where {name!r} lies is not noted, or twice")
            found[name] = [Slice(group, start, elements)]
    return found


def _equal_slices(archive: Archive, shapes: Shapes, flat: list[dict[str, Range]], ranks: int) -> dict[str, list[Slice]]:
    """ZeRO-3: every parameter's, one after the other, through all groups."""
    found: dict[str, list[Slice]] = {}
    group, at = 0, 0
    for name, shape in ((name, shape) for named in shapes for name, shape in named.items()):
        left = -(-math.prod(shape) // ranks)
        while left:
            while group < len(flat) and at == flat[group][WEIGHTS].elements:
                group, at = group + 1, 0
            if group == len(flat):
                raise _unfit(archive, f"the flat weights end before {name!r}")
            taken = min(left, flat[group][WEIGHTS].elements - at)
            found.setdefault(name, []).append(Slice(group, at, taken))
            at, left = at + taken, left - taken
    if sum(one[WEIGHTS].elements for one in flat) != sum(s.elements for slices in found.values() for s in slices):
        raise _unfit(archive, "the flat weights go on after the last parameter")
    return found
