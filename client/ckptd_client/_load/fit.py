"""Fits a checkpoint to a state: assigns its bytes to tensors and its leaves to places, or lists the differences."""

import math
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from ckptd.shared.base.errors import CkptdError, DamagedError, MismatchError, RestoreError
from ckptd.shared.format.layout import Leaves, Path, Planned, TensorEntry
from ckptd_client._load.fit_keys import opened, settled
from ckptd_client._load.image_ranges import Images
from ckptd_client._load.lenient import shared
from ckptd_client._load.misfit import misfit
from ckptd_client._load.optimizer_kind import OptimizerKind, check_kinds
from ckptd_client._load.per_rank import Comparison, kept
from ckptd_client._load.reader import Target
from ckptd_client._load.saved_names import Homes, Kind, OtherRanksNeededError, Saves, groups_of
from ckptd_client._load.state_dicts import notes_of
from ckptd_client._load.statefuls import load_into
from ckptd_client._load.twins import Doubtful, Twins
from ckptd_client._load.verify import Marks, check, is_kept, optimizers_in
from ckptd_client._local.destination import bytes_of, engines_of
from ckptd_client._state.pickle import NO_PICKLE, PickleKeys, decode
from ckptd_client._state.replica_choice import Taken, of_the_lowest, taken_of
from ckptd_client._state.reshard import Box, Run, cover
from ckptd_client._state.tensors import DTYPE_OF, alias_key, copyable, is_tensor, shard_of
from ckptd_client._state.tree import Flat, assign, flatten, format_path, within

_SHOWN = 8
_NO_LEAVES: Mapping[int, Leaves] = {}


@dataclass(slots=True)
class Fit:
    """The destinations of all values. Keeps the tensors alive to which it points."""

    targets: dict[int, list[Target]] = field(default_factory=dict)  # by the rank whose image is read
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)  # by name: the tensor with the loaded value
    through: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)  # (read here, copy there)
    shared: list[tuple[str, str, torch.Tensor, torch.Tensor]] = field(default_factory=list)  # (name, sharer, as above)
    statefuls: list[tuple[Path, Any]] = field(default_factory=list)
    leaves: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)
    ties: Mapping[str, str] = field(default_factory=dict)  # as in Saves
    strict: bool = True  # whether a missing or additional key is an error
    has: list[Path] = field(default_factory=list)  # places that the state had a value for, if not strict
    notes: list[str] = field(default_factory=list)  # for the user
    own_notes: list[str] = field(default_factory=list)  # for the user, of this rank alone
    twins: Twins | None = None  # names of which it is not certain which tensor is meant
    comparison: Comparison | None = None  # of names that several ranks saved, in a job of another size
    taken: Taken = field(default_factory=dict)  # names that every replica saved and all ranks take from the lowest rank

    @property
    def nbytes(self) -> int:
        """Bytes that are read into the state."""
        return sum(target.nbytes for targets in self.targets.values() for target in targets)

    def settle(self) -> None:
        """Fills tensors that share memory, after the read. Raises MismatchError if their saved values differ."""
        with torch.no_grad():
            for _, _, scratch, tensor in self.shared:
                tensor.copy_(scratch)
        for name, other, scratch, tensor in self.shared:
            if not torch.equal(_bits(tensor), _bits(scratch)):
                mine, others = format_path(self.paths[name]), format_path(self.paths[other])
                raise MismatchError(f"{mine} and {others} share memory in the state, but differ in the checkpoint")

    def compare(self, images: Images) -> None:
        """Compares what several ranks, or parts of a job, saved under one name, for finish. Blocks.

        Raises MismatchError if parts of the job saved different tensors under a name that these ranks hold otherwise.
        """
        if self.twins is not None:
            self.twins.compare(images)
        if self.comparison is not None:
            self.comparison.compare(images)

    def finish(self, state: Any, *, strict: bool = True) -> list[str]:
        """Fills strided and device tensors and plain leaves, then calls load_state_dict of each Stateful.

        Compares each Stateful then with the saved values, see verify.check. Returns notes for the user. Raises
        MismatchError if a load_state_dict refuses or changes saved values.
        """
        with torch.no_grad():
            for scratch, tensor in self.through:
                tensor.copy_(scratch)
        plain = [
            (self.paths[name], value)
            for name, value in self.leaves.items()
            if not any(within(self.paths[name], prefix) for prefix, _ in self.statefuls)
        ]
        places = {name: format_path(path) for name, path in self.paths.items()}
        notes = [*self.notes, *(self.twins.notes() if self.twins is not None else [])]
        notes += [*(self.comparison.notes(places) if self.comparison is not None else [])]
        notes += notes_of(state, plain)
        for path, value in plain:
            assign(state, path, value)
        contents = {prefix: self._content(prefix) for prefix, _ in self.statefuls}
        marks = {prefix: Marks(stateful, contents[prefix]) for prefix, stateful in self.statefuls}
        for prefix, stateful in sorted(self.statefuls, key=lambda item: -len(item[0])):
            has = {path[len(prefix) :] for path in self.has if within(path, prefix)}
            kind = OptimizerKind(stateful)
            load_into(prefix, stateful, contents[prefix], has, strict=self.strict)
            kind.check(prefix)
        for prefix, stateful in self.statefuls:
            if not any(within(prefix, other) for other, _ in self.statefuls if other != prefix):
                tied = groups_of(self.ties, self.paths, prefix)
                exact = strict and self.strict
                notes += check(prefix, stateful, contents[prefix], strict=exact, tied=tied, marks=marks[prefix])
        return notes

    def _content(self, prefix: Path) -> list[tuple[Path, Any]]:
        """The saved values of a Stateful, with their paths below it."""
        return [
            (path[len(prefix) :], self.tensors[name] if name in self.tensors else self.leaves[name])
            for name, path in self.paths.items()
            if within(path, prefix)
        ]


class Wanted(NamedTuple):
    """Memory to be filled."""

    name: str
    local: torch.Tensor  # detached; this rank's elements
    runs: list[Run]


def fit(state: Any, saves: Saves, *, where: str, pickle_keys: PickleKeys = NO_PICKLE, strict: bool = True) -> Fit:
    """Matches names, shapes and dtypes, and plans the reads.

    Inside a Stateful the checkpoint defines the keys, and its load_state_dict checks them. Only dtypes are checked
    here: load_state_dict may convert them silently. A tensor of the saved shape and dtype is read in place. strict:
    both must have the same keys; else a key that only one has stays unchanged, with a note. Raises MismatchError with
    the first differences; for an incomplete tensor OtherRanksNeededError if saves are of one rank, DamagedError if of
    all ranks.
    """
    whole = flatten(state, is_tensor)
    saves = replace(saves, paths=settled(saves.paths, saves.leaves.leaves, whole))
    left = kept(whole, saves.paths, saves.named, saves.rank if saves.me is None else saves.me)
    flat, known = left.flat, saves.paths
    here = dict(zip(flat.names, flat.values, strict=True))
    saves = _relevant(flat, here, _opened(saves, flat))
    has, present, notes = list[Path](), left.values, list[str]()
    if not strict:
        has = flat.paths
        flat, saves, more, notes = shared(flat, saves, where)
        here, present = dict(zip(flat.names, flat.values, strict=True)), present | more
    check_kinds(flat.statefuls, known.values())
    error = misfit(state, flat, saves, known, where)
    if error is not None:
        raise error
    out = Fit(
        statefuls=flat.statefuls, paths=saves.paths, ties=saves.ties, strict=strict, has=has, notes=notes,
        own_notes=left.notes,
    )  # fmt: skip
    _check_held(flat, here, saves, where)
    _plan_reads(out, flat, here, saves, where)
    out.comparison = Comparison(saves.resized, out.tensors) if saves.resized else None
    _wait_for_devices(out)
    _copy_inline(out, here, saves)
    for name in saves.paths:
        if name not in out.tensors and name not in saves.leaves.leaves and is_tensor(here.get(name)):
            out.tensors[name] = here[name]  # this rank has no elements of it
    leaves = {name: leaf for name, leaf in saves.leaves.leaves.items() if name in saves.paths}
    out.leaves = {
        name: decode(leaf, name, format_path(saves.paths[name]), pickle_keys) for name, leaf in leaves.items()
    }
    _keep(out, whole, present)
    return out


def _plan_reads(out: Fit, flat: Flat, here: dict[str, Any], saves: Saves, where: str) -> None:
    """Chooses the tensor for each name, and adds the reads that fill it. Raises as fit does."""
    homes = Homes(saves.ties, _of_optimizers(flat, saves) if saves.ties else ())
    filled: set[tuple[Hashable, tuple[Run, ...]]] = set()
    wanted: list[Wanted] = []
    for name, boxes in saves.boxes.items():
        kind = _loadable(boxes[0].entry, f"{where}: {format_path(saves.paths[name])}")
        own = _fitting(here.get(name), kind)
        out.tensors[name] = homes.of(name, kind, own, partial(_home, name, flat, saves, where=where))
    saves = _meant(out, saves, where)
    lowest = _lowest(out, saves, where)
    for name, boxes in saves.boxes.items():
        shard = shard_of(out.tensors[name], name)
        for chunk in shard.chunks:
            runs = cover(Box(*chunk.box), boxes, prefer=None if name in lowest else saves.rank)
            if runs is None:
                raise _incomplete(saves, f"{where}: {format_path(saves.paths[name])} is not whole")
            place = (alias_key(chunk.local), tuple(runs))
            if runs and place not in filled:  # tied here too: read once
                filled.add(place)
                wanted.append(Wanted(name, copyable(chunk.local.detach()), runs))
    sharing = _sharing(wanted)
    for index, want in enumerate(wanted):
        _add_reads(out, want, sharing.get(index))


def _meant(out: Fit, saves: Saves, where: str) -> Saves:
    """The saves with one tensor of each name, where parts of the job saved several."""
    boxes = dict(saves.boxes)
    doubtful = list[Doubtful]()
    for name, held in saves.held.items():
        if name not in boxes:
            continue  # this rank does not want it
        if held.is_meant(out.tensors[name]):
            continue
        if not saves.whole:
            raise OtherRanksNeededError(f"{where}: {format_path(saves.paths[name])} is held by other ranks now")
        boxes[name] = held.sets[held.lowest]
        if len(held.sets) > 1 and not saves.named.is_common(name):
            doubtful.append(Doubtful(name, held))
    if doubtful:
        out.twins = Twins(doubtful, {one.name: format_path(saves.paths[one.name]) for one in doubtful}, where)
    return replace(saves, boxes=boxes)


def _of_optimizers(flat: Flat, saves: Saves) -> set[str]:
    """Names of optimizers' state of their parameters, inside Statefuls."""
    optimizers = optimizers_in(saves.paths.values())
    return {name for name, path in saves.paths.items() if is_kept(path, optimizers) and flat.in_stateful(path)}


def _loadable(entry: TensorEntry, place: str) -> Kind:
    dtype = DTYPE_OF.get(entry.dtype)
    if dtype is None:
        text = f"{place} is {entry.dtype}, which this torch does not have"
        raise RestoreError(text, hint="load with the release of torch that saved it")
    return Kind(entry.global_shape, dtype)


def _fitting(value: Any, kind: Kind) -> torch.Tensor | None:
    """The state's own tensor, if it has the saved shape and dtype."""
    return value if is_tensor(value) and (tuple(value.shape), value.dtype) == kind else None


def _lowest(out: Fit, saves: Saves, where: str) -> set[str]:
    """Names that every rank takes from the lowest rank, for which it needs all images."""
    names = of_the_lowest(saves.alike, out.tensors, saves.world_size)
    if names and not saves.whole:
        raise OtherRanksNeededError(f"{where}: the state is held otherwise than its replicas saved it")
    out.taken = taken_of(names, saves.boxes, {name: format_path(saves.paths[name]) for name in names})
    return names


def _keep(out: Fit, whole: Flat, values: dict[str, Any]) -> None:
    """Adds present values of objects for names that the checkpoint lacks, if it has other names of them."""
    for name, path in zip(whole.names, whole.paths, strict=True):
        if name in values and any(within(path, prefix) for prefix, _ in out.statefuls):
            out.paths[name] = path
            (out.tensors if is_tensor(values[name]) else out.leaves)[name] = values[name]


def _copy_inline(out: Fit, here: dict[str, Any], saves: Saves) -> None:
    for name in saves.inline.keys() & here.keys():
        for chunk in shard_of(here[name], name).chunks:
            box = tuple(slice(first, first + size) for first, size in zip(chunk.offsets, chunk.sizes, strict=True))
            out.through.append((saves.inline[name][box], chunk.local.detach()))


def _opened(saves: Saves, flat: Flat) -> Saves:
    """Replaces saved containers by their items where the state has the items as separate names."""
    paths, leaves, inline = dict(saves.paths), dict(saves.leaves.leaves), dict(saves.inline)
    expected = set(saves.expected)
    found = opened(paths, leaves, flat)
    for name, items in found.items():
        del paths[name], leaves[name]
        paths |= items.paths
        leaves |= items.leaves
        inline |= items.tensors
        if name in expected:
            expected = (expected - {name}) | set(items.paths)
    if not found:
        return saves
    return replace(saves, paths=paths, expected=expected, leaves=Leaves(saves.leaves.version, leaves), inline=inline)


def _relevant(flat: Flat, here: dict[str, Any], saves: Saves) -> Saves:
    """Drops names for which only other ranks have a place."""
    paths = {
        name: path
        for name, path in saves.paths.items()
        if name in saves.expected or name in here or (name in saves.leaves.leaves and flat.in_stateful(path))
    }
    return replace(saves, paths=paths, boxes={name: b for name, b in saves.boxes.items() if name in paths})


def _incomplete(saves: Saves, text: str) -> CkptdError:
    return DamagedError(text) if saves.whole and not saves.some else OtherRanksNeededError(text)


def _check_held(flat: Flat, here: dict[str, Any], saves: Saves, where: str) -> None:
    """Raises if there are tensors for which saves have only the name."""
    held = saves.boxes.keys() | saves.inline.keys()
    unknown = [name for name in saves.paths if name not in held and name not in saves.leaves.leaves]
    lost = [n for n in unknown if not is_tensor(here.get(n)) and flat.in_stateful(saves.paths[n])]
    missing = [
        name
        for name, value in here.items()
        if is_tensor(value) and name not in held and not shard_of(value, name).absent
    ]
    paths = dict(zip(flat.names, flat.paths, strict=True))
    for name in [n for n in missing if not flat.in_stateful(paths[n])] + lost:
        raise _incomplete(saves, f"{where}: {format_path(paths.get(name) or saves.paths[name])} is not there")


def _home(name: str, flat: Flat, saves: Saves, *, where: str) -> torch.Tensor:
    """A new tensor for a Stateful that has none of the saved shape and dtype."""
    boxes = saves.boxes[name]
    if DTYPE_OF.get(boxes[0].entry.dtype) is None:
        text = f"{where}: {format_path(saves.paths[name])} is {boxes[0].entry.dtype}"
        hint = "load with the release of torch that saved it"
        raise RestoreError(f"{text}, which this torch does not have", hint=hint)
    shape, dtype = boxes[0].entry.global_shape, DTYPE_OF[boxes[0].entry.dtype]
    like = parameter_of(saves.paths[name], flat)
    if like is not None and tuple(like.shape) == shape:
        return torch.empty_like(like, dtype=dtype, requires_grad=False)
    place = f"{where}: {format_path(saves.paths[name])}"
    if sum(math.prod(saved.entry.sizes) for saved in boxes) < math.prod(shape):  # else a bad shape would cost memory
        raise _incomplete(saves, f"{place} is not whole")
    try:
        return torch.empty(shape, dtype=dtype)
    except RuntimeError as error:  # no elements, but dimensions that torch cannot represent
        raise DamagedError(f"{place} has the impossible shape {list(shape)[:8]}") from error


def boxes_wanted(value: Any, planned: Planned, path: Path, flat: Flat) -> Iterator[Box]:
    """The boxes of a saved tensor that the state has, or will have, at this path: of the home that fit gives it."""
    if not is_tensor(value) or (tuple(value.shape), value.dtype) != (planned.global_shape, DTYPE_OF.get(planned.dtype)):
        value = parameter_of(path, flat)
        if value is None or tuple(value.shape) != planned.global_shape:
            yield Box((0,) * len(planned.global_shape), planned.global_shape)
            return
    yield from (Box(*chunk.box) for chunk in shard_of(value, planned.name).chunks)


def parameter_of(path: Path, flat: Flat) -> torch.Tensor | None:
    """The parameter of an entry of a torch optimizer's state: the entry gets its device and sharding."""
    for prefix, stateful in flat.statefuls:
        match path[len(prefix) :] if within(path, prefix) else ():
            case (("k", "state"), ("i", int(index)), ("k", _)) if isinstance(stateful, torch.optim.Optimizer):
                parameters = [p for group in stateful.param_groups for p in group["params"]]
                return parameters[index] if index < len(parameters) else None
    return None


def _sharing(wanted: list[Wanted]) -> dict[int, str]:
    """The wanted tensors that may overlap another in memory, with the name of that one; they were saved separately.

    Includes interleaved boxes of one tensor, for which it costs only a copy.
    """
    storages: dict[tuple[torch.device, int], list[tuple[int, int, int]]] = {}
    for index, (_, tensor, _) in enumerate(wanted):
        first = int(tensor.storage_offset()) * tensor.itemsize
        extent = 1 + sum(int(step) * (size - 1) for step, size in zip(tensor.stride(), tensor.shape, strict=True))
        storage = (tensor.device, tensor.untyped_storage().data_ptr())
        storages.setdefault(storage, []).append((first, first + extent * tensor.itemsize, index))
    sharing: dict[int, str] = {}
    for spans in storages.values():
        end, last = 0, -1
        for start, stop, index in sorted(spans):
            if start < end:
                sharing[index] = wanted[last].name
                sharing.setdefault(last, wanted[index].name)
            if stop > end:
                end, last = stop, index
    return sharing


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _add_reads(out: Fit, want: Wanted, sharer: str | None) -> None:
    """Adds the reads that fill a tensor. sharer: name of the tensor whose memory it shares, if any."""
    plain, device = want.local, None if sharer is not None else bytes_of(want.local)
    if device is not None:
        for run in want.runs:
            target = Target(run.source, run.nbytes, 0, device[run.target : run.target + run.nbytes])
            out.targets.setdefault(run.rank, []).append(target)
        return
    if sharer is not None:
        plain = torch.empty(plain.shape, dtype=plain.dtype)
        out.shared.append((want.name, sharer, plain, want.local))
    elif plain.device.type != "cpu" or not plain.is_contiguous() or plain.is_conj() or plain.is_neg():
        plain = torch.empty(plain.shape, dtype=plain.dtype)
        out.through.append((plain, want.local))
    for run in want.runs:
        target = Target(run.source, run.nbytes, plain.data_ptr() + run.target)
        out.targets.setdefault(run.rank, []).append(target)


def _wait_for_devices(out: Fit) -> None:
    """Waits for this thread's work on devices that get bytes, because other threads and streams write them."""
    places = (target.device for targets in out.targets.values() for target in targets if target.device is not None)
    for engine in engines_of(places):
        engine.now().wait()
