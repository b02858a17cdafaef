"""Lays out a rank's image: a safetensors file whose header has the offset of every tensor. No torch, no I/O.

Two steps: place() decides the order and the offsets, _header() encodes them. The format allows no hole between
payloads. A dual image has filler tensors between them, whose bytes make a torch.save archive of each payload and align
it; in a plain image alignment comes from the order alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from ckptd.shared.base.errors import UsageError
from ckptd.shared.base.ids import NO_RUN, SaveId, file_name
from ckptd.shared.format.digest import digest
from ckptd.shared.format.dtypes import file_view
from ckptd.shared.format.layout import VERSION, Layout, LayoutPart, Path, TensorEntry, box_nbytes
from ckptd.shared.format.slot import PAGE, align_up
from ckptd.shared.torchfile.pickling import TensorRef, dumps
from ckptd.shared.torchfile.zip_write import Archive

IMAGE_VERSION = "1"  # of the file; its layout has one of its own
MAX_HEADER_NBYTES = 100_000_000  # the JSON, as safetensors limits it
FILLER_PREFIX = "__ckptd_pad__."  # names of filler tensors between payloads
ALIGN = 64  # of each payload in a dual image: no element is split by a cache line
_METADATA = "__metadata__"
_NO_SAVE = SaveId(0, 0, 0, NO_RUN).text
# The save id comes first, so that its offset is known without a search through text that users' keys may imitate.
_JSON_START = b'{"__metadata__":{"ckptd.save_id":"'
_LENGTH_NBYTES = 8
SAVE_ID_OFFSET = _LENGTH_NBYTES + len(_JSON_START)


class Box(NamedTuple):
    """A box that a rank stores of one tensor: of sizes, at offsets in the tensor of global_shape."""

    name: str
    dtype: str  # code
    sizes: tuple[int, ...]
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    part: int = 0  # index of the file: each name occurs once in a file


class Placed(NamedTuple):
    """A box and its bytes, start counted from the first byte after the header."""

    box: Box
    start: int
    nbytes: int


class Filler(NamedTuple):
    """Bytes between payloads: constant for a plan."""

    start: int
    data: bytes


class Placement(NamedTuple):
    """Everything after the header, in file order."""

    placed: list[Placed]  # boxes and, in a dual image, fillers
    fillers: list[Filler]
    slices: dict[str, tuple[int, int]]  # of each box: start and bytes of the archive around its payload

    @property
    def end(self) -> int:
        """Bytes after the header."""
        return self.placed[-1].start + self.placed[-1].nbytes if self.placed else 0


class Part(NamedTuple):
    """One file of an image."""

    start: int  # in the image
    nbytes: int
    header: bytes  # of save 0-0-0


@dataclass(frozen=True, slots=True)
class Image:
    """A laid out image: constant from save to save but for the save id in the header."""

    boxes: Sequence[Box]
    data_offsets: list[int]  # absolute, one per box, in the order of boxes
    slices: list[tuple[int, int]]  # absolute offset and bytes of each box's archive; (0, 0) in a plain image
    fillers: list[Filler]  # start absolute
    parts: list[Part]  # at least one
    image_nbytes: int
    plan_id: str
    rank: int
    world_size: int

    @property
    def header(self) -> bytes:
        """The header of the first file, of save 0-0-0."""
        return self.parts[0].header

    @property
    def header_nbytes(self) -> int:
        """Bytes before the first payload, a multiple of 4096."""
        return len(self.header)

    @property
    def raw(self) -> bool:
        """Whether the files after the first are a trainer's files, without a header."""
        return any(not part.header for part in self.parts)

    @property
    def part_nbytes(self) -> tuple[int, ...]:
        """Bytes of each file; empty if there is one file."""
        return tuple(part.nbytes for part in self.parts) if len(self.parts) > 1 else ()

    def patched_headers(self, save: SaveId) -> Iterator[tuple[int, bytes]]:
        """Start and bytes of each file's header in one save."""
        end = SAVE_ID_OFFSET + len(_NO_SAVE)
        for start, _, header in self.parts:
            if not header:  # a trainer's file
                continue
            yield start, b"".join((header[:SAVE_ID_OFFSET], save.text.encode(), header[end:]))


def place(boxes: Sequence[Box]) -> Placement:
    """Places a plain image: boxes without holes, each at a multiple of its class, so every element is aligned.

    The class is the largest power of two, at most 4096, that divides the box's bytes. Empty boxes come last.
    """
    sized = [(box_nbytes(box.dtype, box.sizes), box) for box in boxes]
    sized.sort(key=lambda item: -min(item[0] & -item[0], PAGE))
    placed = []
    start = 0
    for nbytes, box in sized:
        placed.append(Placed(box, start, nbytes))
        start += nbytes
    return Placement(placed, [], {})


def place_dual(boxes: Sequence[Box], rank: int, first: int = 0) -> Placement:
    """Places a dual image: a filler before each box and at the end has the tail of one archive and the next one's head.

    first: the number of the first filler.
    """
    placed: list[Placed] = []
    fillers: list[Filler] = []
    slices: dict[str, tuple[int, int]] = {}
    start, tail = 0, b""
    for box in boxes:
        nbytes = box_nbytes(box.dtype, box.sizes)
        archive = start + len(tail)  # the header is whole pages, so alignment here is alignment in the file
        around = wrap(box.dtype, box.sizes, nbytes, start=archive, align=ALIGN)
        start = _fill(placed, fillers, f"{rank}.{first + len(fillers)}", start, tail + around.head)
        placed.append(Placed(box, start, nbytes))
        start, tail = start + nbytes, around.tail
        slices[box.name] = (archive, start + len(tail) - archive)
    if tail:
        _fill(placed, fillers, f"{rank}.{first + len(fillers)}", start, tail)
    return Placement(placed, fillers, slices)


def _fill(placed: list[Placed], fillers: list[Filler], number: str, start: int, data: bytes) -> int:
    """Adds a filler and returns its end. Its number contains the rank: readers join equal names of several files."""
    shape = (len(data),)
    placed.append(Placed(Box(f"{FILLER_PREFIX}{number}", "U8", shape, shape, (0,)), start, len(data)))
    fillers.append(Filler(start, data))
    return start + len(data)


def make_image(boxes: Sequence[Box], *, rank: int, world_size: int, dual: bool = True) -> Image:
    """The image of one rank. Raises UsageError for reserved or repeated names and for a header above 100 MB."""
    _check_names(boxes)
    count = max((box.part for box in boxes), default=0) + 1
    parts: list[Part] = []
    fillers: list[Filler] = []
    found: dict[tuple[int, str], tuple[int, tuple[int, int]]] = {}  # start of payload, archive
    start = 0
    for number in range(count):
        own = [box for box in boxes if box.part == number] if count > 1 else boxes
        placement = place_dual(own, rank, len(fillers)) if dual else place(own)
        pad = _pad(placement) if number < count - 1 else 0
        if pad:  # the next file begins with a page of the image
            _fill(
                placement.placed,
                placement.fillers,
                f"{rank}.{len(fillers) + len(placement.fillers)}",
                placement.end,
                bytes(pad),
            )
        header = _header(placement.placed, rank, world_size)
        base = start + len(header)
        for box, at, _ in placement.placed:
            archive = placement.slices.get(box.name)
            found[number, box.name] = base + at, (base + archive[0], archive[1]) if archive else (0, 0)
        fillers += [Filler(base + at, data) for at, data in placement.fillers]
        parts.append(Part(start, len(header) + placement.end, header))
        start += parts[-1].nbytes
    return Image(
        boxes=boxes,
        data_offsets=[found[box.part, box.name][0] for box in boxes],
        slices=[found[box.part, box.name][1] for box in boxes],
        fillers=fillers,
        parts=parts,
        image_nbytes=start,
        plan_id=_plan_id(boxes, b"".join(part.header for part in parts)),
        rank=rank,
        world_size=world_size,
    )


def _pad(placement: Placement) -> int:
    """Bytes to the end of the page. After an empty last box a page follows, else it would belong to the next file."""
    last_nbytes = placement.placed[-1].nbytes if placement.placed else 1
    return -placement.end % PAGE if last_nbytes else PAGE - placement.end % PAGE


def make_layout(
    image: Image, *, paths: dict[str, Path], aliases: dict[str, str], held_alike: dict[str, list[str]] | None = None,
    holders: dict[str, bytes] | None = None,
) -> Layout:  # fmt: skip
    """What the rank says of its image. paths covers tensors, aliases and leaves."""
    tensors = [
        TensorEntry(
            name=box.name,
            dtype=box.dtype,
            global_shape=box.global_shape,
            offsets=box.offsets,
            sizes=box.sizes,
            data_offset=offset,
            nbytes=box_nbytes(box.dtype, box.sizes),
            slice_offset=archive[0],
            slice_nbytes=archive[1],
        )
        for box, offset, archive in zip(image.boxes, image.data_offsets, image.slices, strict=True)
    ]
    return Layout(
        version=VERSION,
        file=file_name(image.rank),
        rank=image.rank,
        world_size=image.world_size,
        header_nbytes=image.header_nbytes,
        image_nbytes=image.image_nbytes,
        plan_id=image.plan_id,
        tensors=tensors,
        paths=paths,
        aliases=aliases,
        parts=[LayoutPart(nbytes, len(header)) for _, nbytes, header in image.parts] if image.part_nbytes else [],
        held_alike=held_alike or {},
        holders=holders or {},
    )


def _check_names(boxes: Sequence[Box]) -> None:
    seen: set[tuple[int, str]] = set()
    for box in boxes:
        if box.name == _METADATA or box.name.startswith(FILLER_PREFIX):
            raise UsageError(f"the tensor name {box.name!r} is reserved by the file format", hint="rename its key")
        if (box.part, box.name) in seen:
            raise UsageError(f"two tensors of one rank have the name {box.name!r}")
        seen.add((box.part, box.name))


def _header(placed: Sequence[Placed], rank: int, world_size: int) -> bytes:
    """Length and JSON, padded with spaces so that the payloads start on a page."""
    encode = msgspec.json.encode
    views = [file_view(item.box.dtype, item.box.sizes) for item in placed]
    sharding = {
        box.name: {"saved_offsets": (*box.offsets, *[0] * (len(sizes) - len(box.sizes)))}
        for (box, _, _), (_, sizes) in zip(placed, views, strict=True)
    }
    metadata = {
        "format": "pt",
        "DCP_VERSION": "1.0",
        "DCP_SHARDING_INFO": encode(sharding).decode(),
        "ckptd.version": IMAGE_VERSION,
        "ckptd.rank": str(rank),
        "ckptd.world_size": str(world_size),
    }
    tensors = {
        box.name: {"dtype": code, "shape": sizes, "data_offsets": (start, start + nbytes)}
        for (box, start, nbytes), (code, sizes) in zip(placed, views, strict=True)
    }
    # Both dicts are appended: a comma replaces their opening brace.
    text = b"".join((_JSON_START, _NO_SAVE.encode(), b'",', encode(metadata)[1:]))
    text += b"," + encode(tensors)[1:] if tensors else b"}"
    nbytes = align_up(_LENGTH_NBYTES + len(text)) - _LENGTH_NBYTES
    if nbytes > MAX_HEADER_NBYTES:
        raise UsageError(
            f"{len(placed):,} tensors need a file header of {nbytes:,} bytes; safetensors allows {MAX_HEADER_NBYTES:,}",
            hint="save fewer or larger tensors per rank, or shorten their names",
        )
    return nbytes.to_bytes(_LENGTH_NBYTES, "little") + text.ljust(nbytes)


def _plan_id(boxes: Sequence[Box], header: bytes) -> str:
    """Digest of the header, and of the global shapes, which are not in it. Hex."""
    return digest(digest(header) + digest(msgspec.msgpack.encode([box.global_shape for box in boxes]))).hex()


class Wrap(NamedTuple):
    """Head and tail around a payload. Head, payload and tail together are the archive."""

    head: bytes
    tail: bytes


def wrap(dtype: str, sizes: tuple[int, ...], nbytes: int, *, start: int, align: int) -> Wrap:
    """Head and tail of an archive that begins at file offset start, its payload at a multiple of align (64 or more).

    torch.save's archive of one tensor: ``data.pkl`` (a pickle that rebuilds a contiguous CPU tensor over storage 0),
    ``version``, and ``data/0``, the payload. See docs/format.md.
    """
    zipped = Archive(start, root="a/")
    zipped.add("data.pkl", dumps(TensorRef(0, dtype, sizes, nbytes)))
    zipped.add("version", b"3\n")
    zipped.reserve("data/0", nbytes, align)  # our readers use digests, not its CRC
    zipped.close()
    *head, tail = (blob for _, blob in zipped.blobs)
    return Wrap(b"".join(head), tail)
