"""Names under which several parts of the job, such as the stages of a pipeline, each saved a tensor.

A rank that holds a name with the same ranks as when it was saved gets their tensor. Else nothing says which one is
meant: every rank takes that of the lowest ranks, and the others must have the same bytes.
"""

import contextlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import xxhash

from ckptd.shared.base.errors import DamagedError, MismatchError
from ckptd.shared.format.layout import Layout
from ckptd.shared.format.rank_members import NOBODY, ranks_in
from ckptd.shared.format.tensor_holders import holders_of
from ckptd_client._load.image_ranges import Images, ReadAt
from ckptd_client._state.naming import listed, ranks_of
from ckptd_client._state.reshard import Box, Run, Saved, cover
from ckptd_client._state.sharded import is_dtensor

log = logging.getLogger("ckptd_client")
MAX_NBYTES = 256 << 20  # that one rank reads in one load
MAX_READS = 32_768
_CHUNK_NBYTES = 1 << 20
_HINT = (
    "load on as many ranks, in meshes and process groups of the same ranks; or give the tensors of each part of the "
    "job a name of their own before they are saved"
)


@dataclass(slots=True)
class Held:
    """The tensors of one name. mine: the holders of this rank's own one; None: it has none, or is another rank now."""

    mine: bytes | None
    sets: dict[bytes, list[Saved]] = field(default_factory=dict)  # the boxes of each, by holders

    @property
    def lowest(self) -> bytes:
        """The holders that the lowest rank is of."""
        return min(self.sets, key=lambda members: min(saved.rank for saved in self.sets[members]))

    @property
    def usual(self) -> list[Saved]:
        """The boxes for a rank of which no more is known."""
        return self.sets[self.mine if self.mine in self.sets else self.lowest]

    def is_meant(self, tensor: Any) -> bool:
        """Whether the usual one is what these ranks hold now: the only one, or this rank's, held by no other ranks."""
        if self.mine not in self.sets:
            return False
        now = tensor.device_mesh.mesh.flatten().tolist() if is_dtensor(tensor) else ()
        return {*now} <= {*ranks_in(self.mine)}


def held_apart(layouts: Sequence[Layout], rank: int | None) -> dict[str, Held]:
    """Every name that a part of the job holds, without boxes. rank: as which this one saved; None: as none."""
    names = {id(layout.holders): layout.holders for layout in layouts if layout.holders}
    found = {name: Held(None) for holders in names.values() for name in holders}
    tied = [(layout, name) for layout in layouts for name, owner in layout.aliases.items() if owner in layout.holders]
    found |= {name: Held(None) for _, name in tied if name not in found}
    own = next((layout for layout in layouts if layout.rank == rank), None)
    if own is None:
        return found
    for name in found.keys() & own.paths.keys():
        found[name].mine = holders_of(own, name)
    for layout, name in tied:  # a rank whose slice has nothing of the bytes does not say to which name it is tied
        members = holders_of(layout, name)
        if found[name].mine == NOBODY and own.holders.get(layout.aliases[name]) == members:
            found[name].mine = members
    return found


class Doubtful(NamedTuple):
    """A name of which it is not certain which tensor is meant: the one that is taken, and the others, by holders."""

    name: str
    held: Held

    @property
    def taken(self) -> list[Saved]:
        """The boxes of the lowest ranks."""
        return self.held.sets[self.held.lowest]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor that is taken."""
        return sum(saved.entry.nbytes for saved in self.taken)

    def ranks(self, members: bytes) -> str:
        """The holders in words; where they are not known, those that saved something of it."""
        return ranks_of(ranks_in(members) or {saved.rank for saved in self.held.sets[members]})


class Twins:
    """The names of a load of which it is not certain which tensor is meant."""

    def __init__(self, doubtful: Iterable[Doubtful], places: Mapping[str, str], where: str) -> None:
        """places: of the names, in Python notation."""
        self._doubtful, self._places, self._where = list(doubtful), places, where
        self._open: list[Doubtful] = []

    def compare(self, images: Images) -> None:
        """Reads the tensors of each name. Blocks. Raises MismatchError where they differ."""
        nbytes, reads = MAX_NBYTES, MAX_READS
        for one in sorted(self._doubtful, key=lambda one: one.nbytes):
            runs = {members: _runs(boxes) for members, boxes in one.held.sets.items()}
            nbytes, reads = nbytes - one.nbytes * len(runs), reads - sum(map(len, runs.values()))
            readable = min(nbytes, reads) >= 0
            found = {members: _digest(some, images) if readable else b"" for members, some in runs.items()}
            taken = found[one.held.lowest]
            for members, digest in found.items():
                if _kind(one.held.sets[members]) != _kind(one.taken) or (taken and digest and digest != taken):
                    raise self._differ(one, members)
            self._open += [one] if b"" in found.values() else []

    def notes(self) -> list[str]:
        """Notes for the user: what was not compared."""
        groups: dict[str, list[str]] = {}
        for one in self._open:
            groups.setdefault(one.ranks(one.held.lowest), []).append(self._places[one.name])
        what = "perhaps other ranks saved another tensor of the name: they were not compared"
        return [
            f"{listed(places)}: the tensor of {ranks} was taken, on every rank; {what}; what all ranks hold "
            "alike connect(replicated=[...]) names"
            for ranks, places in groups.items()
        ]

    def _differ(self, one: Doubtful, other: bytes) -> MismatchError:
        ours, theirs = one.ranks(one.held.lowest), one.ranks(other)
        text = f"{self._where}: {self._places[one.name]} is one tensor on {ours}, and another on {theirs}"
        return MismatchError(f"{text}: nothing says which of them these ranks want", hint=_HINT)


def _kind(boxes: Sequence[Saved]) -> tuple[str, tuple[int, ...]]:
    return boxes[0].entry.dtype, boxes[0].entry.global_shape


def _runs(boxes: Sequence[Saved]) -> list[Run]:
    """The bytes of a whole tensor in their order; none if some are missing."""
    shape = boxes[0].entry.global_shape
    runs = cover(Box((0,) * len(shape), shape), boxes, prefer=None)
    return sorted(runs or (), key=lambda run: run.target)


def _digest(runs: Sequence[Run], images: Images) -> bytes:
    """Of the bytes of these runs; empty where some cannot be read."""
    found = xxhash.xxh3_128()
    try:
        with contextlib.ExitStack() as stack:
            reading: dict[int, ReadAt] = {}
            for run in runs:
                if run.rank not in reading:
                    reading[run.rank] = stack.enter_context(images.reading(run.rank))
                for at in range(0, run.nbytes, _CHUNK_NBYTES):
                    found.update(reading[run.rank](run.source + at, min(_CHUNK_NBYTES, run.nbytes - at)))
    except (OSError, DamagedError) as error:
        log.debug("tensors of one name are not compared: %s", error)
        return b""
    return found.digest() if runs else b""
