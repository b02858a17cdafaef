"""The index of a checkpoint's records: what a reader that needs parts of few images would else read all votes for.

Ranks whose layouts agree but for their boxes, their number and their places are of one kind. The index has of each kind
its plan, how its tensors lie on meshes, its ranks, which of them have a box of a tensor that others lack, and one rank
for each part of the job that has meshes of its own: from these ``Holders`` names the ranks for a box. And the size of
each image, and the plain values that differ between ranks. It follows from the records alone, so all committers of one
version make the same bytes. Pure.
"""

import bisect
import collections
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, NamedTuple

import msgspec

from ckptd.shared.base.decoding import decoded
from ckptd.shared.base.errors import DamagedError
from ckptd.shared.base.ids import MAX_RANKS
from ckptd.shared.format.columns import column, numbers_in, parts_in, squeezed
from ckptd.shared.format.holders import Holders
from ckptd.shared.format.layout import decode_leaves
from ckptd.shared.format.layout_meshes import lying, tensors_in, without_boxes
from ckptd.shared.format.packed_layout import Known, Parts
from ckptd.shared.format.placement import REPLICATED, Shape
from ckptd.shared.format.runs import pairs, runs_of
from ckptd.shared.format.together import Alive, silent

VERSION = 1
_Index = Annotated[int, msgspec.Meta(ge=0)]
_Number = Annotated[int, msgspec.Meta(ge=0, le=MAX_RANKS)]
_Runs = list[_Number]  # first and end of each run of ranks
_SomeRuns = Annotated[list[_Number], msgspec.Meta(min_length=2)]


class _Kind(msgspec.Struct, frozen=True, array_like=True):
    plan: _Index  # of the parts that kinds have in common
    form: _Index  # without boxes
    runs: _Runs
    owns: Annotated[list[bytes], msgspec.Meta(min_length=1)]  # of one rank for each part of the job; first the lowest
    holders: dict[_Index, _Runs]  # by number of the tensor, the ranks that have a box of it, where not all have one


class _File(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    kinds: list[_Kind]  # by their lowest ranks
    shared: list[bytes]
    differing: dict[str, _SomeRuns]  # names of plain values that differ between ranks, to the ranks that have one


class Record(NamedTuple):
    """What the index has of a rank's record."""

    rank: int
    nbytes: int
    parts: Parts
    leaves: bytes


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_File)


# --- writing


def encode_index(records: Iterable[Record], alive: Alive = silent) -> bytes:
    """Content of the index of all ranks' records, in their order. Raises DamagedError for a layout nobody can read."""
    known, seen = Known(), collections.defaultdict[tuple[bytes, bytes, bytes], "_Found"](_Found)
    leaves: dict[bytes, list[int]] = {}
    sizes: list[int] = []
    for record in records:
        found = without_boxes(record.parts, where=f"rank {record.rank}", known=known)
        kind = seen[found.parts.plan, found.parts.form, found.alike]
        kind.ranks.append(record.rank)
        kind.tensors.setdefault(found.tensors, []).append(record.rank)
        fresh = [mesh for mesh in found.meshes if mesh not in kind.meshes]
        if fresh or not kind.owns:
            kind.meshes.update(fresh)
            kind.owns.append(found.parts.own)
        leaves.setdefault(record.leaves, []).append(record.rank)
        sizes.append(record.nbytes)
        alive()
    shared: dict[bytes, int] = {}
    kinds = [
        _Kind(
            shared.setdefault(plan, len(shared)), shared.setdefault(form, len(shared)), runs_of(kind.ranks), kind.owns,
            kind.holders(len(known.plan(plan, "index").tensors)),
        )
        for (plan, form, _), kind in seen.items()
    ]  # fmt: skip
    made = _File(version=VERSION, kinds=kinds, shared=list(shared), differing=_differing(leaves, alive))
    return squeezed([_encoder.encode(made), column(sizes)])


class _Found:
    def __init__(self) -> None:
        self.ranks: list[int] = []
        self.owns: list[bytes] = []
        self.meshes: set[tuple[int, int]] = set()
        self.tensors: dict[tuple[int, bytes], list[int]] = {}  # ranks with boxes of the same tensors

    def holders(self, count: int) -> dict[int, list[int]]:
        """Of tensors of which not all of the ranks have a box, those that have one."""
        groups = list(self.tensors.values())
        of: list[list[int]] = [[] for _ in range(count)]  # of each tensor the groups that have it
        for number, boxes in enumerate(self.tensors):
            for tensor in tensors_in(boxes, "index"):
                of[tensor].append(number)
        runs: dict[tuple[int, ...], list[int]] = {}
        found = {}
        for tensor, numbers in enumerate(map(tuple, of)):
            if len(numbers) < len(groups):
                if numbers not in runs:
                    runs[numbers] = runs_of(sorted(rank for number in numbers for rank in groups[number]))
                found[tensor] = runs[numbers]
        return found


def _differing(leaves: Mapping[bytes, list[int]], alive: Alive) -> dict[str, list[int]]:
    """leaves: the ranks that have the same, by their bytes."""
    if len(leaves) == 1:
        return {}
    values: dict[str, dict[bytes, list[int]]] = {}
    for raw, ranks in leaves.items():
        for name, leaf in decode_leaves(raw, where=f"rank {ranks[0]}").leaves.items():
            values.setdefault(name, {}).setdefault(leaf.data, []).extend(ranks)
        alive()
    several = {name: of for name, of in values.items() if len(of) > 1}
    return {name: runs_of(sorted(rank for ranks in of.values() for rank in ranks)) for name, of in several.items()}


# --- reading


class Group(NamedTuple):
    """Ranks that can hold elements of a box, each the same. box: what they have at most; None where nothing says it."""

    ranks: Sequence[int]
    box: tuple[Shape, Shape] | None


class Kind:
    """Ranks of one kind."""

    def __init__(self, said: _Kind, shared: list[bytes], known: Known, where: str) -> None:
        if max(said.plan, said.form) >= len(shared):
            raise DamagedError(f"{where}: a part that no kind of it has")
        each = [Parts(shared[said.plan], shared[said.form], own) for own in said.owns]
        self._runs = list(pairs(said.runs))
        of = [lying(parts, where=where, known=known) for parts in each]
        self.said = of[0]  # by its lowest rank, but for places
        self._holders = [Holders(one, where) for one in of]
        names = list(of[0].tensors)
        if max(said.holders, default=-1) >= len(names):
            raise DamagedError(f"{where}: ranks with boxes of no tensor")
        self._having = {
            names[number]: _checked(runs, self.said.world_size, where) for number, runs in said.holders.items()
        }

    @property
    def ranks(self) -> list[int]:
        """All, in order."""
        return [rank for run in self._runs for rank in range(*run)]

    def __contains__(self, rank: object) -> bool:
        return isinstance(rank, int) and any(first <= rank < end for first, end in self._runs)

    def is_whole(self, name: str) -> bool:
        """Whether each of them has all of a tensor, or rows of it, with none of its ranks a part of it of their own."""
        placed = self.said.placed.get(name)
        return placed is not None and set(placed.cuts) <= {REPLICATED}

    def groups(self, name: str, offsets: Shape, sizes: Shape) -> Iterator[Group]:
        """Which of them can hold elements of a box of a tensor of the plan: each has a box of it."""
        for group in self._groups(name, offsets, sizes):
            if ranks := self._that_have(name, group.ranks):
                yield Group(ranks, group.box)

    def ranks_with(self, name: str) -> Sequence[int]:
        """Those that have a box of a tensor of the plan, in order."""
        return self._that_have(name, self.ranks)

    def _that_have(self, name: str, ranks: Sequence[int]) -> Sequence[int]:
        if (runs := self._having.get(name)) is None:
            return ranks
        firsts = [first for first, _ in runs]
        found = ((rank, bisect.bisect_right(firsts, rank) - 1) for rank in ranks)
        return [rank for rank, at in found if at >= 0 and rank < runs[at][1]]

    def _groups(self, name: str, offsets: Shape, sizes: Shape) -> Iterator[Group]:
        if self._holders[0].is_alone(name):
            shape = self.said.tensors[name].global_shape
            yield Group(self.ranks, ((0,) * len(shape), shape))
            return
        found: dict[tuple[int, Shape, Shape], list[int]] = {}
        for number, holders in enumerate(self._holders):
            said = holders.of(name, offsets, sizes)
            if said is None:
                yield Group(self.ranks, None)
                return
            for rank, first, lengths in said:
                found.setdefault((number, first, lengths), []).append(rank)
        seen: set[int] = set()  # a rank stands for each of its meshes, and is the first of a part in some
        for (_, first, lengths), ranks in found.items():
            if ranks[0] not in seen:
                seen.update(ranks)
                yield Group(sorted(ranks), (first, lengths))


class RecordIndex(NamedTuple):
    """By their lowest ranks, all kinds; the bytes of each image; the ranks that have plain values which differ."""

    kinds: list[Kind]
    sizes: Sequence[int]
    differing: dict[str, list[int]]

    def kind_of(self, rank: int) -> Kind:
        """The kind of a rank of the job."""
        return next(kind for kind in self.kinds if rank in kind)


def decode_index(data: bytes, world_size: int, *, where: str) -> RecordIndex:
    """The index in a file's content. Raises DamagedError, naming where, for one that is not of so many ranks."""
    head, sizes = parts_in(data, 2, where)
    found = decoded(_decoder.decode, head, f"{where}: the index is not readable")
    if found.version != VERSION:
        raise DamagedError(f"{where}: version {found.version}, this program reads {VERSION}")
    runs = sorted(run for kind in found.kinds for run in _checked(kind.runs, world_size, where))
    ends = [0, *(end for _, end in runs)]
    if ends[-1] != world_size or [first for first, _ in runs] != ends[:-1]:
        raise DamagedError(f"{where}: its kinds do not have each of {world_size} ranks once")
    known = Known()
    kinds = [Kind(kind, found.shared, known, where) for kind in found.kinds]
    if any(kind.said.world_size != world_size for kind in kinds):
        raise DamagedError(f"{where}: a layout of another number of ranks than {world_size}")
    differing = {
        name: [r for run in _checked(of, world_size, where) for r in range(*run)]
        for name, of in found.differing.items()
    }
    return RecordIndex(kinds, numbers_in(sizes, world_size, where), differing)


def _checked(runs: Sequence[int], world_size: int, where: str) -> list[tuple[int, int]]:
    if len(runs) % 2 or list(runs) != sorted({*runs}) or (runs and runs[-1] > world_size):
        raise DamagedError(f"{where}: runs of ranks that are none")
    return list(pairs(runs))
