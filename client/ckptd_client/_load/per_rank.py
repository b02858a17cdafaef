"""Values per rank, such as the state of a random generator, when the number of ranks changes.

A checkpoint does not record whether ranks that saved the same name had one value or several. So the saved bytes are
compared, and a note names those that differ. Large tensors are compared as far as digests of their blocks decide; the
note says which were not compared.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from ckptd.shared.format.layout import Layout, Leaves, Path, TensorEntry
from ckptd_client._load.alike import compare, questions_of
from ckptd_client._load.image_ranges import Images
from ckptd_client._state.naming import Named, listed, ranks_of
from ckptd_client._state.reshard import Saved
from ckptd_client._state.sharded import is_dtensor
from ckptd_client._state.tree import Flat, format_path

log = logging.getLogger("ckptd_client")
_OR_ALIKE = "; what all ranks hold alike connect(replicated=[...]) names"

Holders = tuple[int, ...]  # ranks that saved a name


@dataclass(frozen=True, slots=True)
class Resized:
    """Names that several ranks of a job of another size saved."""

    saved: int
    world_size: int
    tensors: dict[str, list[Saved]] = field(default_factory=dict)  # complete ones, of each rank that has it
    differing: dict[str, Holders] = field(default_factory=dict)  # names with different values
    dropped: dict[str, Holders] = field(default_factory=dict)  # per-rank names of ranks that do not exist any more
    holders: dict[str, Holders] = field(default_factory=dict)  # of tensors, where only some of them are compared

    def of(self, name: str, held: Iterable[Saved]) -> Holders:
        """The ranks that have a tensor, of which these were read."""
        return self.holders.get(name) or _ranks_of(held)


def resized(layouts: Sequence[Layout], leaves: Mapping[int, Leaves], named: Named, world_size: int) -> Resized | None:
    """The names of all images; None for a job of the same size, and if some images are missing."""
    saved = layouts[0].world_size
    if saved == world_size or len(layouts) < saved:
        return None
    out = Resized(saved, world_size)
    for layout in sorted(layouts, key=lambda layout: layout.rank):
        for name, entry in whole_in(layout).items():
            if not named.is_common(name):
                out.tensors.setdefault(name, []).append(Saved(layout.rank, entry))
        for name in layout.paths if layout.rank >= world_size else ():
            if named.is_own(name):
                out.dropped[name] = (*out.dropped.get(name, ()), layout.rank)
    for name in [n for n, held in out.tensors.items() if len(held) == 1 or named.is_own(n)]:
        del out.tensors[name]
    out.differing.update(_differing(leaves, named))
    return out


def whole_in(layout: Layout) -> dict[str, TensorEntry]:
    """The tensors of which an image has all, tied ones too."""
    whole = {entry.name: entry for entry in layout.tensors if entry.sizes == entry.global_shape}
    return whole | {name: whole[owner] for name, owner in layout.aliases.items() if owner in whole}


def _differing(leaves: Mapping[int, Leaves], named: Named) -> dict[str, Holders]:
    """Plain values that differ between ranks."""
    if all(one is leaves[min(leaves)] for one in leaves.values()):
        return {}
    found: dict[str, dict[int, bytes]] = {}
    for rank in sorted(leaves):
        for name, leaf in leaves[rank].leaves.items():
            found.setdefault(name, {})[rank] = leaf.data
    return {
        name: tuple(values)
        for name, values in found.items()
        if len(set(values.values())) > 1 and not named.is_own(name) and not named.is_common(name)
    }


class Comparison:
    """The names that several ranks saved with different values, or perhaps so. Reads nothing before compare."""

    def __init__(self, found: Resized, tensors: Mapping[str, torch.Tensor]) -> None:
        self.found = found
        self._differing = dict(found.differing)
        self._open: dict[str, list[Saved]] = {}
        for name, held in found.tensors.items():
            if name not in tensors or is_dtensor(tensors[name]):
                continue
            if len({(saved.entry.dtype, saved.entry.global_shape) for saved in held}) > 1:
                self._differing[name] = found.of(name, held)
            elif name not in self._differing:
                self._open[name] = held

    def compare(self, images: Images) -> None:
        """Compares tensors by the digests of the images, and reads some of them. Blocks. Raises nothing."""
        questions = questions_of(self._open, images.tables)
        compare(questions.values(), images)
        self._differing |= {n: self.found.of(n, one.held) for n, one in questions.items() if one.alike is False}
        self._open = {
            name: held
            for name, held in self._open.items()
            if questions[name].alike is None or (questions[name].alike and name in self.found.holders)
        }

    def notes(self, places: Mapping[str, str]) -> list[str]:
        """Notes for the user. places: of this rank's names, in Python notation."""
        unsure = {name: self.found.of(name, held) for name, held in self._open.items()}
        return [
            *self._lines(self._differing, places, "each a value of its own"),
            *self._lines(unsure, places, "perhaps each a value of its own: they were not compared", _OR_ALIKE),
            *_of_dropped(self.found),
        ]

    def _lines(self, names: Mapping[str, Holders], places: Mapping[str, str], what: str, more: str = "") -> list[str]:
        groups: dict[Holders, list[str]] = {}
        for name, holders in names.items():
            if name in places:
                groups.setdefault(holders, []).append(name)
        out = []
        for holders, found in groups.items():
            parts = []
            if {*range(self.found.world_size)} - {*holders}:
                parts.append(f"ranks without one take that of rank {holders[0]}")
            dropped = [rank for rank in holders if rank >= self.found.world_size]
            parts += [f"those of {ranks_of(dropped)} are dropped"] if dropped else []
            if not parts:
                continue
            text = f"{ranks_of(holders)} saved {listed([places[name] for name in found])}, {what}; {', '.join(parts)}"
            out.append(f"{text}; to have each rank only ever get its own: connect(per_rank=[{found[0]!r}]){more}")
        return out


def _ranks_of(held: Iterable[Saved]) -> Holders:
    return tuple(saved.rank for saved in held)


def _of_dropped(found: Resized) -> list[str]:
    groups: dict[Holders, list[str]] = {}
    for name, holders in found.dropped.items():
        groups.setdefault(holders, []).append(name)
    return [
        f"{listed(names)}: each rank has its own; those of {ranks_of(holders)} are dropped, for the job has "
        f"{found.world_size} ranks now, and had {found.saved}"
        for holders, names in groups.items()
    ]


class Kept(NamedTuple):
    """Per-rank values of a state that this rank did not save, and the state without them."""

    flat: Flat
    values: dict[str, Any]
    notes: list[str]


def kept(flat: Flat, known: Mapping[str, Path], named: Named, rank: int) -> Kept:
    """Values that a rank keeps unchanged: per-rank names that this rank did not save.

    known: names of the checkpoint. An object with only such names is not touched; for others load_state_dict gets the
    present values. If this rank saved any name of an object, the checkpoint defines the names of that object.
    """
    if not named.per_rank:
        return Kept(flat, {}, [])
    saved = [path for name, path in known.items() if named.is_own(name)]
    present = [prefix for prefix, _ in flat.statefuls if any(path[: len(prefix)] == prefix for path in saved)]
    lone = {
        i
        for i, (name, path) in enumerate(zip(flat.names, flat.paths, strict=True))
        if name not in known and named.is_own(name) and not any(path[: len(prefix)] == prefix for prefix in present)
    }
    if not lone:
        return Kept(flat, {}, [])
    paths = _without(flat.paths, lone)
    statefuls = [one for one in flat.statefuls if any(path[: len(one[0])] == one[0] for path in paths)]
    left = replace(
        flat, names=_without(flat.names, lone), paths=paths, values=_without(flat.values, lone), statefuls=statefuls
    )
    places = [format_path(flat.paths[i]) for i in sorted(lone)]
    note = f"the checkpoint has nothing that rank {rank} itself saved of {listed(places)}: it keeps its present value"
    return Kept(left, {flat.names[i]: flat.values[i] for i in sorted(lone)}, [note])


def _without(items: Sequence[Any], left_out: set[int]) -> list[Any]:
    return [item for i, item in enumerate(items) if i not in left_out]
