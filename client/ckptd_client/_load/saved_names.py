"""The saved values by name, in the image of one rank or of all ranks."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from ckptd.shared.base.errors import CkptdError
from ckptd.shared.format.layout import Layout, Leaves, Path, TensorEntry
from ckptd_client._load.per_rank import Resized, resized
from ckptd_client._load.ties import ties_of
from ckptd_client._state.naming import NOTHING_NAMED, Named
from ckptd_client._state.replica_choice import held_alike
from ckptd_client._state.reshard import Saved
from ckptd_client._state.tensors import shard_of

_NO_LEAVES: Mapping[int, Leaves] = {}


class OtherRanksNeededError(CkptdError):
    """Other ranks saved values that this rank wants: it must read all files."""

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
    world_size: int = 1  # of the job that loads


def saves_of(  # noqa: PLR0913 - keyword-only
    layouts: Iterable[Layout], leaves: Leaves, *, rank: int, world_size: int, me: int | None = None,
    named: Named = NOTHING_NAMED, of_all: Mapping[int, Leaves] = _NO_LEAVES,
) -> Saves:  # fmt: skip
    """The saved values of one rank's layout, or of all, for a job of world_size. A tied name has its owner's boxes.

    If ranks have different tensors of one name, that of rank counts. Expected are the names that rank saved; in a job
    of another size only those that all ranks saved. me: the rank that loads, if it is not rank: of per-rank names it
    gets what it saved itself, or nothing. of_all: leaves by rank, to find those that differ in a job of another size.
    """
    ordered = sorted(layouts, key=lambda layout: (layout.rank != rank, layout.rank))
    boxes: dict[str, list[Saved]] = {}
    paths: dict[str, Path] = {}
    for layout in ordered:
        paths |= {name: path for name, path in layout.paths.items() if name not in paths}
        own: dict[str, list[Saved]] = {}
        for entry in layout.tensors:
            own.setdefault(entry.name, []).append(Saved(layout.rank, entry))
        own |= {name: own[owner] for name, owner in layout.aliases.items()}
        for name, found in own.items():
            if name in leaves.leaves:  # a plain value of this rank counts
                continue
            alike = boxes.setdefault(name, [])
            alike += [saved for saved in found if kind_of(saved.entry) == kind_of((alike or found)[0].entry)]
    expected = set(ordered[0].paths)
    if ordered[0].world_size != world_size:
        expected = expected.intersection(*(layout.paths for layout in ordered))
    whole = len(ordered) == ordered[0].world_size
    saves = Saves(
        boxes, paths, expected, leaves, rank, whole, me=me, named=named,
        ties=ties_of(ordered), alike=held_alike(ordered, world_size), world_size=world_size,
    )  # fmt: skip
    saves = _own_alone(saves, ordered) if named.per_rank else saves
    several = resized(ordered, of_all or {rank: leaves}, named, world_size)
    if several is not None:
        unsure = {name: held for name, held in several.tensors.items() if name not in saves.alike}
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
