"""The saved values by name, in the image of one rank or of all ranks; tensors that were tied are tied again."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from ckptd.shared.base.errors import CkptdError
from ckptd.shared.format.layout import Layout, Leaves, Path, TensorEntry
from ckptd.shared.format.tensor_holders import holders_of
from ckptd_client._load.per_rank import Resized, resized
from ckptd_client._load.twins import Held, held_apart
from ckptd_client._state.naming import NOTHING_NAMED, Named
from ckptd_client._state.replica_choice import held_alike
from ckptd_client._state.reshard import Saved
from ckptd_client._state.tensors import shard_of

_NO_LEAVES: Mapping[int, Leaves] = {}


class Kind(NamedTuple):
    """Shape and dtype of a saved tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def ties_of(layouts: Sequence[Layout]) -> dict[str, str]:
    """By tied name the name with its bytes, from the first layout that has the name. Pure."""
    ties: dict[str, str] = {}
    if not any(layout.aliases for layout in layouts):
        return ties
    alone: set[str] = set()
    for layout in layouts:
        ties |= {name: owner for name, owner in layout.aliases.items() if name not in ties and name not in alone}
        alone.update(entry.name for entry in layout.tensors if entry.name not in ties)
    return ties


def groups_of(ties: Mapping[str, str], paths: Mapping[str, Path], prefix: Path) -> list[list[Path]]:
    """Paths, relative to prefix, that were one tensor. paths: of all loaded names. Pure."""
    groups: dict[str, list[Path]] = {}
    for name, owner in ties.items():
        group = groups.setdefault(owner, [paths[owner]] if owner in paths else [])
        group += [paths[name]] if name in paths else []
    inside = ([path[len(prefix) :] for path in group if path[: len(prefix)] == prefix] for group in groups.values())
    return [group for group in inside if len(group) > 1]


class Homes:
    """The tensor for the value of each name: one for all tied names that an object adopts.

    Tensors of the state stay as they are: a model whose weights are not tied any more gets two equal tensors. In the
    state of optimizers the checkpoint decides.

    common: names that are tied again even if the state has separate tensors. Keeps the tensors.
    """

    def __init__(self, ties: Mapping[str, str], common: Collection[str]) -> None:
        self._ties = ties
        self._common = common
        self._first: dict[tuple[str, Kind], torch.Tensor] = {}  # by the name with the bytes

    def of(self, name: str, kind: Kind, own: torch.Tensor | None, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The tensor for a name. own: the state's tensor if it can hold the value. make: creates one, and may raise."""
        owner = self._ties.get(name, name), kind
        first = self._first.get(owner)
        if first is not None and (own is None or name in self._common):
            return first.detach() if first.requires_grad else first
        tensor = make() if own is None else own
        self._first.setdefault(owner, tensor)
        return tensor


class OtherRanksNeededError(CkptdError):
    """Other ranks saved values that this rank wants: it must read their files too."""

    code = "reshard"


@dataclass(frozen=True, slots=True)
class Saves:
    """The saved values by name, in the images of one rank or of all ranks."""

    boxes: dict[str, list[Saved]]
    paths: dict[str, Path]
    expected: set[str]  # names that the state must have
    leaves: Leaves  # of the rank below
    rank: int  # from which this rank takes per-rank values
    whole: bool  # whether it has the layouts of all ranks
    inline: dict[str, torch.Tensor] = field(default_factory=dict)  # complete tensors from plain values
    me: int | None = None  # the rank that loads; None: as rank
    named: Named = NOTHING_NAMED
    resized: Resized | None = None
    ties: Mapping[str, str] = field(default_factory=dict)  # each tied name with the one that holds its bytes
    alike: dict[str, str] = field(default_factory=dict)  # how ranks held the names that every replica saved
    held: dict[str, Held] = field(default_factory=dict)  # names that parts of the job hold, each part its own tensor
    world_size: int = 1  # of the job that loads
    some: bool = False  # whether there are only boxes of which the index of the records says that the state wants them


class Common(NamedTuple):
    """What the images say together, whichever of them are read."""

    paths: dict[str, Path]
    expected: set[str]
    ties: Mapping[str, str]
    alike: dict[str, str]
    resized: Resized | None


def saves_of(  # noqa: PLR0913 - keyword-only
    layouts: Iterable[Layout], leaves: Leaves, *, rank: int, world_size: int, me: int | None = None,
    named: Named = NOTHING_NAMED, of_all: Mapping[int, Leaves] = _NO_LEAVES,
) -> Saves:  # fmt: skip
    """The saved values of one rank's layout, or of all, for a job of world_size. A tied name has its owner's boxes.

    If ranks have different tensors of one name, that of rank counts; of names that parts of the job held, that of its
    part, or in a job of another size of the lowest. Expected are the names that rank saved; in a job of another size
    only those that all ranks saved. me: the rank that loads, if it is not rank: of per-rank names it
    gets what it saved itself, or nothing. of_all: leaves by rank, to find those that differ in a job of another size.
    """
    ordered = in_order(layouts, rank)
    paths: dict[str, Path] = {}
    for layout in ordered:
        paths |= {name: path for name, path in layout.paths.items() if name not in paths}
    expected = set(ordered[0].paths)
    if ordered[0].world_size != world_size:
        expected = expected.intersection(*(layout.paths for layout in ordered))
    several = resized(ordered, of_all or {rank: leaves}, named, world_size)
    common = Common(paths, expected, ties_of(ordered), held_alike(ordered, world_size), several)
    saves = assembled(ordered, common, leaves, rank=rank, me=me, named=named, world_size=world_size)
    return replace(saves, whole=len(ordered) == ordered[0].world_size)


def in_order(layouts: Iterable[Layout], rank: int) -> list[Layout]:
    """In the order in which they count for a load: that of rank first."""
    return sorted(layouts, key=lambda layout: (layout.rank != rank, layout.rank))


def assembled(  # noqa: PLR0913 - keyword-only
    ordered: Sequence[Layout], common: Common, leaves: Leaves, *, rank: int, world_size: int, me: int | None,
    named: Named,
) -> Saves:  # fmt: skip
    """The saved values in these layouts, of what all images say together. As saves_of."""
    held = held_apart(ordered, rank if ordered[0].world_size == world_size else None)
    boxes: dict[str, list[Saved]] = {}
    for layout in ordered:
        own: dict[str, list[Saved]] = {}
        for entry in layout.tensors:
            own.setdefault(entry.name, []).append(Saved(layout.rank, entry))
        own |= {name: own[owner] for name, owner in layout.aliases.items() if owner in own}
        for name, found in own.items():
            if name in leaves.leaves:  # a plain value of this rank counts
                continue
            sets = held[name].sets if name in held else None
            alike = boxes.setdefault(name, []) if sets is None else sets.setdefault(holders_of(layout, name), [])
            alike += [saved for saved in found if kind_of(saved.entry) == kind_of((alike or found)[0].entry)]
    held = {name: one for name, one in held.items() if one.sets}
    boxes |= {name: one.usual for name, one in held.items()}
    saves = Saves(
        boxes, common.paths, common.expected, leaves, rank, whole=True, me=me, named=named,
        ties=common.ties, alike=common.alike, held=held, world_size=world_size,
    )  # fmt: skip
    saves = _own_alone(saves, ordered) if named.per_rank else saves
    several = common.resized
    if several is not None:
        known = saves.alike.keys() | saves.held.keys()
        unsure = {name: found for name, found in several.tensors.items() if name not in known}
        several = replace(several, tensors=unsure)
    return replace(saves, resized=several)


def _own_alone(saves: Saves, layouts: Sequence[Layout]) -> Saves:
    """Drops other ranks' values of per-rank names."""
    me = saves.rank if saves.me is None else saves.me
    mine = next((layout.paths.keys() for layout in layouts if layout.rank == me), ())
    own = {name for name in saves.paths if saves.named.is_own(name)}
    others = {name for name in own if name not in mine}
    boxes = {
        name: [saved for saved in found if saved.rank == me] if name in own else found
        for name, found in saves.boxes.items()
    }
    leaves = {name: leaf for name, leaf in saves.leaves.leaves.items() if name not in others}
    return replace(
        saves,
        boxes={name: found for name, found in boxes.items() if found},
        paths={name: path for name, path in saves.paths.items() if name not in others},
        expected=saves.expected - others,
        alike={name: how for name, how in saves.alike.items() if name not in own},
        held={name: found for name, found in saves.held.items() if name not in own},
        leaves=Leaves(saves.leaves.version, leaves),
    )


def kind_of(entry: TensorEntry) -> tuple[str, tuple[int, ...]]:
    """Dtype and complete shape of the tensor of a box."""
    return entry.dtype, entry.global_shape


def saved_kind(name: str, saves: Saves) -> tuple[str, tuple[int, ...]] | None:
    """Dtype and complete shape of the tensor that was saved under a name; None if there is none."""
    if name in saves.inline:
        shard = shard_of(saves.inline[name], name)
        return shard.code, shard.global_shape
    return kind_of(saves.boxes[name][0].entry) if name in saves.boxes else None
