"""A layout as bytes: what all ranks have alike apart from what a rank alone has, so that a vote keeps each part once.

Three parts. The plan: names, types and shapes of all tensors of the state, and where each name belongs; the same on
every rank that saves the same state. The form: how each tensor of the plan lies on which mesh; for each box its tensor,
its sizes where that does not give them, and its bytes in the image; the same on all ranks whose boxes have the same
sizes. The own part: the rank, its places in the meshes, the offsets of boxes that no mesh reproduces. Numbers lie in
columns.

The writer takes a placement only where it reproduces the box; a reader takes what the form says. Pure.
"""

import bisect
import collections
import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, NamedTuple

import msgspec

from ckptd.shared.base.decoding import decoded
from ckptd.shared.base.errors import DamagedError
from ckptd.shared.base.ids import MAX_PARTS, Nbytes, Rank, WorldSize, file_name
from ckptd.shared.base.wording import shown
from ckptd.shared.format.columns import column, numbers_in, parts_in, signed, squeezed, unsigned
from ckptd.shared.format.dtypes import DTYPES
from ckptd.shared.format.layout import (
    MAX_TENSORS,
    VERSION,
    Layout,
    LayoutPart,
    Path,
    Planned,
    SavedFor,
    TensorEntry,
    TrainerFile,
    box_nbytes,
    checked,
    extents,
)
from ckptd.shared.format.placement import (
    MAX_MESHES,
    Mesh,
    MeshPlace,
    MeshRanks,
    MeshShape,
    Placed,
    Shape,
    box_at,
    position,
    strides_of,
)
from ckptd.shared.format.rank_members import NOBODY
from ckptd.shared.format.tensor_holders import holders_by_name

_COLUMNS = 7  # of a form: tensor, whether its placement, sizes, gap, head, tail; placement of each planned tensor
_HEADS = 4
_MOST_DIMS = 16 << 20  # of all boxes of a rank together
_MOST_FORMS_NBYTES = 64 << 20  # that are kept
_PLACEMENT_NBYTES = 200  # in memory
_Members = Annotated[bytes, msgspec.Meta(max_length=8 << 20)]
_EXPLICIT, _PLACED = 0, 1  # a box whose offsets stand in the own part, and one that its tensor's placement gives
_NOWHERE = 0  # the placement of a tensor that lies on no mesh; others are numbered from 1


class Parts(NamedTuple):
    """The three parts of an encoded layout."""

    plan: bytes
    form: bytes
    own: bytes


class Plan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The state."""

    version: int
    tensors: Annotated[list[Planned], msgspec.Meta(max_length=MAX_TENSORS)]  # in the order of the state
    paths: dict[str, Path]
    # Of each tensor which of the own part's sets of holders; 0: all ranks, or not known.
    held_by: list[Annotated[int, msgspec.Meta(ge=0)]] = []


class Form(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Of its boxes and meshes, without the columns."""

    version: int
    count: Annotated[int, msgspec.Meta(ge=0, le=MAX_TENSORS)]  # of boxes
    meshes: Annotated[list[MeshShape], msgspec.Meta(max_length=MAX_MESHES)] = []
    ranks: Annotated[list[MeshRanks], msgspec.Meta(max_length=MAX_MESHES)] = []  # of each mesh
    placements: Annotated[list[Placed], msgspec.Meta(max_length=MAX_TENSORS)] = []


class Own(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a rank alone has of its layout."""

    version: int
    rank: Rank
    world_size: WorldSize
    header_nbytes: Nbytes
    image_nbytes: Nbytes
    plan_id: Annotated[str, msgspec.Meta(max_length=64)]
    offsets: bytes = b""  # a column: of each box without a placement, one after the other
    places: Annotated[list[MeshPlace], msgspec.Meta(max_length=MAX_MESHES)] = []  # in each mesh of the form
    aliases: dict[str, str] = {}
    parts: Annotated[list[LayoutPart], msgspec.Meta(max_length=MAX_PARTS)] = []
    names: Annotated[list[TrainerFile], msgspec.Meta(max_length=MAX_PARTS)] = []
    saved_for: SavedFor | None = None
    held_alike: dict[str, list[str]] = {}
    holders: Annotated[list[_Members], msgspec.Meta(max_length=MAX_MESHES)] = []


_encoder = msgspec.msgpack.Encoder()
_parts_decoder = msgspec.msgpack.Decoder(tuple[bytes, bytes, bytes])
_plan_decoder = msgspec.msgpack.Decoder(Plan)
_form_decoder = msgspec.msgpack.Decoder(Form)
_own_decoder = msgspec.msgpack.Decoder(Own)


def joined(parts: Parts) -> bytes:
    """An encoded layout of its parts."""
    return _encoder.encode(tuple(parts))


def parted(data: bytes, where: str) -> Parts:
    """The parts of an encoded layout. Raises DamagedError, naming where."""
    return Parts(*decoded(_parts_decoder.decode, data, f"{where}: layout is not readable"))


# --- writing


class Spread(NamedTuple):
    """How the state is spread over the ranks, as far as this one's boxes do not say it."""

    absent: Sequence[Planned] = ()  # tensors of which this rank has no box
    meshes: Sequence[Mesh] = ()
    placements: Mapping[str, Placed] = MappingProxyType({})  # of a tensor that lies on a mesh, absent or not


_BY_THE_BOXES = Spread()


def encode_layout(layout: Layout, spread: Spread = _BY_THE_BOXES) -> bytes:
    """Encoded form. Boxes must have as many offsets and sizes as their tensors dimensions."""
    planned = _planned(layout, spread.absent)
    sets = list(dict.fromkeys(layout.holders[one.name] for one in planned if one.name in layout.holders))
    numbers = {members: number for number, members in enumerate(sets, 1)}
    held_by = [numbers.get(layout.holders.get(one.name, NOBODY), 0) for one in planned] if sets else []
    plan = Plan(version=layout.version, tensors=planned, paths=layout.paths, held_by=held_by)
    form, own = _boxes(layout, spread, planned, sets)
    return joined(Parts(squeezed([_encoder.encode(plan)]), form, _encoder.encode(own)))


def _planned(layout: Layout, absent: Sequence[Planned]) -> list[Planned]:
    """All tensors in the order of the state, whichever of them this rank has boxes of."""
    order = {name: index for index, name in enumerate(layout.paths)}
    found = dict.fromkeys([*(Planned(e.name, e.dtype, e.global_shape) for e in layout.tensors), *absent])
    return sorted(found, key=lambda one: order.get(one.name, len(order)))


def _boxes(layout: Layout, spread: Spread, planned: Sequence[Planned], holders: list[bytes]) -> tuple[bytes, Own]:
    index = {one: number for number, one in enumerate(planned)}
    tensors, how, gaps, heads, tails = [], [], [], [], []
    sizes: list[int] = []
    offsets: list[int] = []
    placements: dict[Placed, int] = {}
    lies = _placements_around(spread, layout.tensors)
    where = [
        placements.setdefault(lies[one.name], len(placements) + 1) if one.name in lies else _NOWHERE for one in planned
    ]
    end = layout.header_nbytes
    for entry in layout.tensors:
        tensors.append(index[Planned(entry.name, entry.dtype, entry.global_shape)])
        placed = lies.get(entry.name)
        if placed is not None and _box_of(spread.meshes, placed, entry) == (entry.offsets, entry.sizes):
            how.append(_PLACED)
        else:
            how.append(_EXPLICIT)
            sizes += entry.sizes
            offsets += entry.offsets
        gaps.append(entry.data_offset - end)
        end = entry.data_offset + entry.nbytes
        head = entry.data_offset - entry.slice_offset
        heads.append(head + 1 if entry.slice_nbytes else 0)
        tails.append(entry.slice_nbytes - head - entry.nbytes if entry.slice_nbytes else 0)
    steps = [after - before for before, after in zip([-1, *tensors], tensors, strict=False)]
    columns = [signed(steps), how, sizes, signed(gaps), heads, tails, where]
    form = Form(
        version=layout.version, count=len(tensors), meshes=[mesh.shape for mesh in spread.meshes],
        ranks=[_ranks_of(mesh, layout.rank) for mesh in spread.meshes], placements=list(placements),
    )  # fmt: skip
    own = Own(
        version=layout.version, rank=layout.rank, world_size=layout.world_size, header_nbytes=layout.header_nbytes,
        image_nbytes=layout.image_nbytes, plan_id=layout.plan_id,
        offsets=squeezed([column(offsets)]) if offsets else b"", places=[mesh.place for mesh in spread.meshes],
        aliases=layout.aliases, parts=layout.parts, names=layout.names, saved_for=layout.saved_for,
        held_alike=layout.held_alike, holders=holders,
    )  # fmt: skip
    return squeezed([_encoder.encode(form), *map(column, columns)]), own


def _ranks_of(mesh: Mesh, rank: int) -> MeshRanks:
    """As they are written: not at all where the mesh numbers its ranks otherwise than the job."""
    if math.prod(mesh.shape) == 1:
        return MeshRanks((0,) * len(mesh.shape))
    if not mesh.ranks or mesh.ranks[position(mesh.shape, mesh.place)] != rank:
        return MeshRanks()
    strides = strides_of(mesh)
    return MeshRanks((), column(mesh.ranks)) if strides is None else MeshRanks(strides)


def _placements_around(spread: Spread, entries: Sequence[TensorEntry]) -> dict[str, Placed]:
    """Those whose box has this rank's boxes in it: all of it, rows of it, or none where it has none."""
    found = dict(spread.placements)
    for entry in entries:
        box = _box_of(spread.meshes, found[entry.name], entry) if entry.name in found else None
        if box is None or not _is_inside(entry, *box):
            found.pop(entry.name, None)
    return found


def _box_of(meshes: Sequence[Mesh], placed: Placed, entry: TensorEntry) -> tuple[Shape, Shape] | None:
    """What the placement gives this rank; None where it cannot be."""
    try:
        return box_at(entry.global_shape, meshes[placed.mesh], placed.cuts)
    except (ValueError, IndexError):
        return None


def _is_inside(entry: TensorEntry, offsets: Shape, sizes: Shape) -> bool:
    sides = zip(entry.offsets, entry.sizes, offsets, sizes, strict=True)
    return all(o <= at and at + n <= o + s for at, n, o, s in sides)


# --- reading


def decode_layout(data: bytes, *, where: str) -> Layout:
    """The layout in data, checked: version, ranges inside the image, no overlap. where names the source in errors."""
    return layout_in(parted(data, where), where=where, known=Known())


class Known:
    """Plans and forms that were read already: of ranks that have them alike each is read once. Its owner lets it go.

    All plans stay, which layouts have in them, and of forms 64 MiB. For several threads: two may read one twice.
    """

    def __init__(self) -> None:
        self._plans: dict[bytes, Plan] = {}
        self._forms: dict[bytes, tuple[Form, list[bytes]]] = {}
        self._holders: dict[tuple[object, ...], dict[str, bytes]] = {}  # by the plan, and its sets
        self._nbytes = 0  # of the forms
        self._bare: dict[tuple[bytes, bytes], bytes] = {}  # forms without boxes: as many as there are kinds of ranks

    def plan(self, data: bytes, where: str) -> Plan:
        """Nobody changes it. Raises DamagedError, naming where."""
        if data not in self._plans:
            self._plans[data] = _plan_in(data, where)
        return self._plans[data]

    def holders(self, plan: Plan, sets: Sequence[bytes], where: str) -> dict[str, bytes]:
        """By tensor; likewise. plan: from here."""
        key = (id(plan), *sets)
        if key not in self._holders:
            self._holders[key] = holders_by_name([one.name for one in plan.tensors], plan.held_by, sets, where)
        return self._holders[key]

    def form(self, data: bytes, where: str) -> tuple[Form, list[bytes]]:
        """With its columns; likewise."""
        found = self._forms.get(data)
        if found is None:
            form, columns = found = _form_in(data, where)
            nbytes = len(data) + sum(map(len, columns)) + _PLACEMENT_NBYTES * len(form.placements)
            if self._nbytes + nbytes > _MOST_FORMS_NBYTES:
                self._forms, self._nbytes = {}, 0
            if nbytes <= _MOST_FORMS_NBYTES:
                self._forms[data] = found
                self._nbytes += nbytes
        return found

    def squeezed_form(self, head: bytes, lies: bytes) -> bytes:
        """A form of no boxes."""
        if (head, lies) not in self._bare:
            self._bare[head, lies] = squeezed([head, *[column([])] * (_COLUMNS - 1), lies])
        return self._bare[head, lies]


def layout_in(parts: Parts, *, where: str, known: Known) -> Layout:
    """The layout that the parts make together; likewise. known: what other ranks of the checkpoint have alike."""
    plan, form, own, columns = _opened(parts, known, where)
    entries = list(_entries(plan, form, own, columns, where))
    layout = Layout(
        version=own.version, file=file_name(own.rank), rank=own.rank, world_size=own.world_size,
        header_nbytes=own.header_nbytes, image_nbytes=own.image_nbytes, plan_id=own.plan_id, tensors=entries,
        paths=plan.paths, aliases=own.aliases, parts=own.parts, names=own.names, saved_for=own.saved_for,
        held_alike=own.held_alike, holders=known.holders(plan, own.holders, where),
    )  # fmt: skip
    return checked(layout, where)


class Glance(NamedTuple):
    """What a form says at once. archived: whether each box lies in a torch.save archive."""

    boxes: int
    archived: bool


def glance(parts: Parts, where: str) -> Glance:
    """At the form alone: no box is made. Raises DamagedError."""
    form, columns = _form_in(parts.form, where)
    return Glance(form.count, min(numbers_in(columns[_HEADS], form.count, where), default=1) > 0)


def _plan_in(data: bytes, where: str) -> Plan:
    (raw,) = parts_in(data, 1, where)
    plan = decoded(_plan_decoder.decode, raw, f"{where}: layout is not readable")
    _check_version(plan.version, where)
    names = collections.Counter(one.name for one in plan.tensors)
    if len(names) != len(plan.tensors):
        name, _ = names.most_common(1)[0]
        raise DamagedError(f"{where}: layout: two tensors of the name {shown(name)}")
    return plan


def _form_in(data: bytes, where: str) -> tuple[Form, list[bytes]]:
    head, *columns = parts_in(data, 1 + _COLUMNS, where)
    form = decoded(_form_decoder.decode, head, f"{where}: layout is not readable")
    _check_version(form.version, where)
    return form, columns


def _opened(parts: Parts, known: Known, where: str) -> tuple[Plan, Form, Own, list[Sequence[int]]]:
    plan = known.plan(parts.plan, where)
    own = own_in(parts, where)
    form, (tensors, how, sizes, gaps, heads, tails, lies) = known.form(parts.form, where)
    _check_version(own.version, where)
    files = max(1, len(own.parts))
    if form.count > len(plan.tensors) * files:  # each once in a file; before a box is made, which takes 300 bytes
        most = f"{len(plan.tensors)} tensors have at most {len(plan.tensors) * files}"
        raise DamagedError(f"{where}: layout: {form.count} boxes, and {most}, one in each file")
    counted = [numbers_in(one, form.count, where) for one in (tensors, how, gaps, heads, tails)]
    placed = placed_of(plan, form, lies, where)
    width = sizes[0] if sizes else 1
    measured = numbers_in(sizes, (len(sizes) - 1) // max(1, width), where)
    return plan, form, own, [counted[0], counted[1], measured, *counted[2:], placed]


def placed_of(plan: Plan, form: Form, lies: bytes, where: str) -> Sequence[int]:
    """Of each planned tensor the number of its placement, from 1; 0: none. Raises DamagedError."""
    found = numbers_in(lies, len(plan.tensors), where)
    if max(found, default=_NOWHERE) > len(form.placements):
        raise DamagedError(f"{where}: layout: a placement that is none of its form's")
    return found


def _check_version(found: int, where: str) -> None:
    if found != VERSION:
        raise DamagedError(f"{where}: layout version {found}, this program reads {VERSION}")


def own_in(parts: Parts, where: str) -> Own:
    """The own part. Raises DamagedError, naming where."""
    return decoded(_own_decoder.decode, parts.own, f"{where}: layout is not readable")


def meshes_of(form: Form, own: Own, where: str) -> list[Mesh]:
    """The meshes, without their ranks, and the rank's places in them. Raises DamagedError."""
    if len(form.meshes) != len(own.places) or any(map(_differ_in_length, form.meshes, own.places)):
        raise DamagedError(f"{where}: layout: places in {len(own.places)} meshes, its form has {len(form.meshes)}")
    return [Mesh(shape, place) for shape, place in zip(form.meshes, own.places, strict=True)]


def _differ_in_length(shape: Sequence[int], place: Sequence[int]) -> bool:
    return len(shape) != len(place)


def _entries(plan: Plan, form: Form, own: Own, columns: list[Sequence[int]], where: str) -> Iterator[TensorEntry]:
    steps, how, sizes, gaps, heads, tails, lies = columns
    meshes = meshes_of(form, own, where)
    explicit = _offsets(own, len(sizes), where)
    starts = [extent.start for extent in extents(own.rank, own.image_nbytes, _sizes(own), raw=bool(own.names))]
    seen: set[int] = set()  # tensor and file of each box: a reader must not make gigabytes to find that it is twice
    dims = 0
    at, end, number = 0, own.header_nbytes, -1
    for step, is_placed, gap, head, tail in zip(
        unsigned(steps), how, unsigned(gaps), heads, tails, strict=True
    ):  # fmt: skip
        number += step
        if not 0 <= number < len(plan.tensors):
            raise DamagedError(f"{where}: layout: a box of no tensor")
        planned = plan.tensors[number]
        name, dtype, shape = planned.name, planned.dtype, planned.global_shape
        dims += len(shape)
        if dims > _MOST_DIMS:
            raise DamagedError(f"{where}: layout: its boxes have more than {_MOST_DIMS} dimensions together")
        if dtype not in DTYPES:
            raise DamagedError(f"{where}: tensor {shown(name)}: unknown dtype code {shown(dtype)}")
        if is_placed:
            offsets, lengths = _box_at(shape, _placement(form, lies[number], where), meshes, where)
        else:
            until = at + len(shape)
            offsets, lengths = tuple(explicit[at:until]), tuple(sizes[at:until])
            at = until
        if len(lengths) != len(shape):
            raise DamagedError(f"{where}: layout: fewer sizes than dimensions")
        start, nbytes = end + gap, box_nbytes(dtype, lengths)
        first, stop = (start - head + 1, start + nbytes + tail) if head else (start, start + nbytes)
        if not 0 <= first <= stop <= own.image_nbytes:
            raise DamagedError(f"{where}: tensor {shown(name)} lies outside its image or over another tensor")
        place = number * len(starts) + bisect.bisect_right(starts, first)
        if place in seen:
            raise DamagedError(f"{where}: layout: two tensors of one name in one file")
        seen.add(place)
        archive = (first, stop - first) if head else (0, 0)
        yield TensorEntry(name, dtype, shape, offsets, lengths, start, nbytes, *archive)
        end = start + nbytes
    if at != len(sizes):
        raise DamagedError(f"{where}: layout: more sizes than dimensions")


def _placement(form: Form, number: int, where: str) -> Placed:
    if number == _NOWHERE:
        raise DamagedError(f"{where}: layout: a box by the placement of a tensor that has none")
    return form.placements[number - 1]


def _sizes(own: Own) -> list[int]:
    return [part.nbytes for part in own.parts]


def _box_at(
    shape: tuple[int, ...], placed: Placed, meshes: list[Mesh], where: str
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    try:
        return box_at(shape, meshes[placed.mesh], placed.cuts)
    except (ValueError, IndexError) as error:
        raise DamagedError(f"{where}: layout: a placement that cannot be: {error}") from error


def _offsets(own: Own, count: int, where: str) -> Sequence[int]:
    if not own.offsets:
        raw = column([])
    else:
        (raw,) = parts_in(own.offsets, 1, where)
    return numbers_in(raw, count, where)
