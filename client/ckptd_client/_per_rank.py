"""Values that each rank has for itself, such as the state of its random generator, when the number of ranks changes.

A checkpoint does not say whether ranks that saved the same name had one value or several. So of plain values the saved
bytes are compared, in small jobs also those of a few small tensors. What differs, or was not compared, is named in a
note.
"""

import fnmatch
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from ckptd.protocol.digest import BLOCK_NBYTES
from ckptd.protocol.errors import DamagedError
from ckptd.protocol.layout import Layout, Leaves, Path, itemsize
from ckptd_client._reshard import Saved
from ckptd_client._restore import Target
from ckptd_client._sharded import is_dtensor
from ckptd_client._tree import Flat, format_path
from ckptd_client._verify import bytes_of, listed

log = logging.getLogger("ckptd_client")
_COMPARED_RANKS = 16  # each rank of the job reads blocks of each rank that saved
_COMPARED_BLOCKS = 32  # at most so many
_COMPARED_NBYTES = 8 << 20

Holders = tuple[int, ...]  # ranks that saved a name


@dataclass(frozen=True, slots=True)
class Named:
    """Patterns, as of fnmatch, of names that each rank has for itself, and of names that are equal on all ranks."""

    per_rank: tuple[str, ...] = ()
    replicated: tuple[str, ...] = ()

    def is_own(self, name: str) -> bool:
        """Whether each rank has this for itself: a pattern fits the name, or that of a container it is in.

        An object whose state_dict() is still empty has the name that ``loader.*`` begins with.
        """
        return any(
            name == p.removesuffix(".*") or fnmatch.fnmatchcase(name, p) or fnmatch.fnmatchcase(name, f"{p}.*")
            for p in self.per_rank
        )

    def is_common(self, name: str) -> bool:
        """Whether the user said that all ranks hold it alike."""
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.replicated) and not self.is_own(name)

    def warn_of_idle(self, names: Sequence[str]) -> None:
        """Logs the patterns of per_rank that fit no name of a state."""
        idle = [p for p in self.per_rank if not any(replace(self, per_rank=(p,)).is_own(name) for name in names)]
        if idle:
            keys = ", ".join(names[:3])
            log.warning("ckptd: per_rank=%r names nothing in the state; its keys are %s, ...", idle, keys)


NOTHING_NAMED = Named()


@dataclass(frozen=True, slots=True)
class Resized:
    """What several ranks of a job of another size saved under one name."""

    saved: int
    world_size: int
    tensors: dict[str, list[Saved]] = field(default_factory=dict)  # whole ones, of each rank that has it
    apart: dict[str, Holders] = field(default_factory=dict)  # of differing values
    gone: dict[str, Holders] = field(default_factory=dict)  # of ranks that are no more, and said to be their own


def resized(layouts: Sequence[Layout], leaves: Mapping[int, Leaves], named: Named, world_size: int) -> Resized | None:
    """What the images of all ranks say; None for a job of the same size, and where some images are missing."""
    saved = layouts[0].world_size
    if saved == world_size or len(layouts) < saved:
        return None
    out = Resized(saved, world_size)
    for layout in sorted(layouts, key=lambda layout: layout.rank):
        whole = {entry.name: entry for entry in layout.tensors if entry.sizes == entry.global_shape}
        whole |= {name: whole[owner] for name, owner in layout.aliases.items() if owner in whole}
        for name, entry in whole.items():
            if not named.is_common(name):
                out.tensors.setdefault(name, []).append(Saved(layout.rank, entry))
        for name in layout.paths if layout.rank >= world_size else ():
            if named.is_own(name):
                out.gone[name] = (*out.gone.get(name, ()), layout.rank)
    for name in [n for n, held in out.tensors.items() if len(held) == 1 or named.is_own(n)]:
        del out.tensors[name]
    out.apart.update(_apart(leaves, named))
    return out


def _apart(leaves: Mapping[int, Leaves], named: Named) -> dict[str, Holders]:
    """Plain values that differ from rank to rank."""
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


class Compared(NamedTuple):
    """A tensor as this rank gets it, and as another rank saved it."""

    name: str
    tensor: torch.Tensor
    other: torch.Tensor  # its bytes
    target: Target


class Comparison:
    """Which tensors that several ranks saved differ: some are read as others saved them and compared."""

    def __init__(self, found: Resized, tensors: Mapping[str, torch.Tensor], prefer: int) -> None:
        self.found = found
        self._apart = dict(found.apart)
        self._unsure: dict[str, Holders] = {}
        self._compared: dict[int, list[Compared]] = {}  # by the rank that is read
        few = max(found.saved, found.world_size) <= _COMPARED_RANKS
        self._left = _COMPARED_NBYTES if few else 0
        self._blocks: set[tuple[int, int]] = set()
        for name, held in found.tensors.items():
            if name in tensors and not is_dtensor(tensors[name]):
                self._add(name, tensors[name], held, prefer)

    def _add(self, name: str, tensor: torch.Tensor, held: list[Saved], prefer: int) -> None:
        used = next((saved for saved in held if saved.rank == prefer), held[0])
        if any((s.entry.dtype, s.entry.global_shape) != (used.entry.dtype, used.entry.global_shape) for s in held):
            self._apart[name] = self._holders(name)
            return
        nbytes = tensor.numel() * itemsize(used.entry.dtype)
        others = [saved for saved in held if saved is not used] if nbytes else []
        blocks = {(saved.rank, at) for saved in others for at in _blocks(saved, nbytes)} | self._blocks
        if nbytes * len(others) > self._left or len(blocks) > _COMPARED_BLOCKS:
            self._unsure[name] = self._holders(name)
            return
        self._blocks, self._left = blocks, self._left - nbytes * len(others)
        for saved in others:
            memory = torch.empty(nbytes, dtype=torch.uint8)
            target = Target(saved.entry.data_offset, nbytes, memory.data_ptr())
            self._compared.setdefault(saved.rank, []).append(Compared(name, tensor, memory, target))

    def read(self, read: Callable[[int, list[Target]], None]) -> None:
        """Reads what others saved of the tensors that are compared. What cannot be read fails no load."""
        for rank, compared in self._compared.items():
            try:
                read(rank, [one.target for one in compared])
            except (DamagedError, OSError):
                self._unsure |= {one.name: self._holders(one.name) for one in compared}
                compared.clear()

    def _holders(self, name: str) -> Holders:
        return tuple(saved.rank for saved in self.found.tensors[name])

    def notes(self, places: Mapping[str, str]) -> list[str]:
        """What to say, once the tensors are filled. places: of the names that this rank has, in Python notation."""
        for one in (one for compared in self._compared.values() for one in compared):
            if one.name not in self._apart and not torch.equal(bytes_of(one.tensor.detach().cpu()), one.other):
                self._apart[one.name] = self._holders(one.name)
        unsure = {name: held for name, held in self._unsure.items() if name not in self._apart}
        return [
            *self._said(self._apart, places, "each a value of its own"),
            *self._said(unsure, places, "perhaps each a value of its own: they were not compared"),
            *_of_gone(self.found),
        ]

    def _said(self, names: Mapping[str, Holders], places: Mapping[str, str], what: str) -> list[str]:
        groups: dict[Holders, list[str]] = {}
        for name, holders in names.items():
            if name in places:
                groups.setdefault(holders, []).append(name)
        out = []
        for holders, found in groups.items():
            parts = []
            if {*range(self.found.world_size)} - {*holders}:
                parts.append(f"ranks without one take that of rank {holders[0]}")
            gone = [rank for rank in holders if rank >= self.found.world_size]
            parts += [f"those of {ranks_of(gone)} are dropped"] if gone else []
            if not parts:
                continue
            text = f"{ranks_of(holders)} saved {listed([places[name] for name in found])}, {what}; {', '.join(parts)}"
            out.append(f"{text}. No rank gets that of another with connect(per_rank=[{found[0]!r}])")
        return out


def _of_gone(found: Resized) -> list[str]:
    groups: dict[Holders, list[str]] = {}
    for name, holders in found.gone.items():
        groups.setdefault(holders, []).append(name)
    return [
        f"{listed(names)}: each rank has its own; those of {ranks_of(holders)} are dropped, for the job has "
        f"{found.world_size} ranks now, and had {found.saved}"
        for holders, names in groups.items()
    ]


def _blocks(saved: Saved, nbytes: int) -> range:
    first = saved.entry.data_offset
    return range(first // BLOCK_NBYTES, (first + nbytes - 1) // BLOCK_NBYTES + 1)


def ranks_of(ranks: Collection[int]) -> str:
    """Ranks in words: "rank 3", "ranks 0 to 3", "ranks 0, 2, 5"."""
    ordered = sorted(ranks)
    if len(ordered) == 1:
        return f"rank {ordered[0]}"
    if ordered[-1] - ordered[0] == len(ordered) - 1:
        return f"ranks {ordered[0]} to {ordered[-1]}"
    return f"ranks {listed([*map(str, ordered)])}"


class Kept(NamedTuple):
    """Values of a state for which this rank finds none of its own, and the state without them."""

    flat: Flat
    values: dict[str, Any]
    notes: list[str]


def kept(flat: Flat, known: Mapping[str, Path], named: Named, rank: int) -> Kept:
    """What a rank keeps as it is: names that each rank has for itself, and that this one did not save.

    known: what it finds in the checkpoint. An object all of whose names are such is left alone; of others the present
    values go to load_state_dict again. What an object has is for the checkpoint to say if this rank saved any of it.
    """
    if not named.per_rank:
        return Kept(flat, {}, [])
    saved = [path for name, path in known.items() if named.is_own(name)]
    told = [prefix for prefix, _ in flat.statefuls if any(path[: len(prefix)] == prefix for path in saved)]
    lone = {
        i
        for i, (name, path) in enumerate(zip(flat.names, flat.paths, strict=True))
        if name not in known and named.is_own(name) and not any(path[: len(prefix)] == prefix for prefix in told)
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
