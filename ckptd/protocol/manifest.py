"""Records of the commit: vote, manifest, COMMITTED. Each is self-checking or checked by the next."""

from collections.abc import Iterable, Sequence
from typing import Annotated, Final, Literal

import msgspec

from ckptd.protocol.decoding import MALFORMED
from ckptd.protocol.digest import DIGEST_NBYTES, KIND, block_count, digest
from ckptd.protocol.errors import DamagedError
from ckptd.protocol.ids import (
    MAX_PARTS,
    Counter,
    Digest,
    FileName,
    Incarnation,
    JobName,
    Nbytes,
    NodeName,
    Rank,
    SaveId,
    Step,
    WorldSize,
)
from ckptd.protocol.layout import Extent, Layout, are_parts, decode_layout, extents

VERSION = 1
VOTES_DIR = "votes"
PARITY_DIR = "parity"
MANIFEST = "ckptd.manifest"
COMMITTED = "COMMITTED"
LATEST = "latest"
STOCK_METADATA: Final = ".metadata"
STOCK_OBJECTS: Final = "objects.pt"
STOCK_FILES: Final = "files.json"
UNPUBLISHED = "UNPUBLISHED"
_MAGIC = b"CKPTDMF1"  # before votes and manifests: magic, body, XXH3-128 of both
MAX_COMMITTED_NBYTES = 64 << 10
MAX_RECORD_NBYTES = 8 << 30  # of a vote or manifest
MAX_PARITY_RECORD_NBYTES = 1 << 30
# The set, by the content of what it protects, and the member.
ParityName = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}-[0-9]{2}\.parity\Z")]
StockName = Literal[".metadata", "objects.pt", "files.json"]


class FileRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One image: its size, the digest of every block, and its rank's layout and leaves as opaque bytes."""

    name: FileName
    rank: Rank
    nbytes: Nbytes
    digests: bytes  # 16 bytes per block of 16 MiB
    layout: bytes
    leaves: bytes
    parts: Annotated[tuple[Nbytes, ...], msgspec.Meta(max_length=MAX_PARTS)] = ()  # bytes of each file, if several
    raw: bool = False  # the files after the first are a trainer's own

    def extents(self) -> list[Extent]:
        """The files that the image lies in, one after the other."""
        return extents(self.rank, self.nbytes, self.parts, raw=self.raw)


class ParityRecord(msgspec.Struct, frozen=True, order=True):
    """One member's parity of a redundancy set, in a file of `parity/`: the parity, then the record that says of what.

    The record has the digest of each block of the parity, and its own is here: so the whole file is pinned.
    """

    name: ParityName
    nbytes: Nbytes  # of the parity: whole pages
    record_nbytes: Annotated[int, msgspec.Meta(ge=1, le=MAX_PARITY_RECORD_NBYTES)]
    record_digest: Digest

    @property
    def file_nbytes(self) -> int:
        """Of the file."""
        return self.nbytes + self.record_nbytes


class StockObjects(msgspec.Struct, frozen=True):
    """Rank 0's plain leaves for stock readers: content of `objects.pt`, and the (offset, length) of each leaf in it."""

    data: bytes
    index: dict[str, tuple[Nbytes, Nbytes]]


class StockFile(msgspec.Struct, frozen=True):
    """A file that is there for stock readers alone; ckptd only compares its digest."""

    name: StockName
    nbytes: Nbytes
    digest: Digest  # of the whole file


class Vote(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a node says once its files are synced."""

    version: int
    digest_kind: str
    job: JobName
    save: SaveId
    node: NodeName
    world_size: WorldSize
    files: Annotated[list[FileRecord], msgspec.Meta(max_length=4096)]
    stock_objects: StockObjects | None = None  # from rank 0's node, when it makes them
    parity: ParityRecord | None = None  # when this node drained its own


class VoteRef(msgspec.Struct, frozen=True):
    """A vote's node, size and digest, so that the manifest pins it."""

    node: NodeName
    nbytes: Nbytes
    digest: Digest


class Manifest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The truth about a committed checkpoint, made from the votes alone."""

    version: int
    digest_kind: str
    writer: str
    job: JobName
    save: SaveId
    world_size: WorldSize
    votes: list[VoteRef]
    files: list[FileRecord]  # by rank
    stock: list[StockFile] = []
    parity: list[ParityRecord] = []  # by name


class Committed(msgspec.Struct, frozen=True, kw_only=True):
    """The small JSON that makes a directory of final name a checkpoint, if it matches the manifest."""

    format: int
    job: JobName
    save_id: Annotated[str, msgspec.Meta(max_length=64)]
    step: Step
    incarnation: Incarnation
    counter: Counter
    world_size: WorldSize
    files: WorldSize
    nbytes: Nbytes
    manifest_nbytes: Annotated[int, msgspec.Meta(ge=0, le=MAX_RECORD_NBYTES)]
    manifest_xxh3_128: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]

    @property
    def save(self) -> SaveId:
        """The checkpoint this record belongs to."""
        return SaveId(self.incarnation, self.counter, self.step)


_encoder = msgspec.msgpack.Encoder()
_objects_decoder = msgspec.msgpack.Decoder(StockObjects)
_vote_decoder = msgspec.msgpack.Decoder(Vote)
_manifest_decoder = msgspec.msgpack.Decoder(Manifest)
_committed_decoder = msgspec.json.Decoder(Committed)


def encode_record(record: Vote | Manifest) -> bytes:
    """Self-checking file content of a vote or manifest."""
    body = _MAGIC + _encoder.encode(record)
    return body + digest(body)


def _open_record(data: bytes, where: str) -> memoryview:
    if len(data) < len(_MAGIC) + DIGEST_NBYTES or data[: len(_MAGIC)] != _MAGIC:
        raise DamagedError(f"{where}: not a ckptd record")
    if digest(memoryview(data)[:-DIGEST_NBYTES]) != data[-DIGEST_NBYTES:]:
        raise DamagedError(f"{where}: digest does not match, the file is damaged")
    return memoryview(data)[len(_MAGIC) : -DIGEST_NBYTES]


def decode_vote(data: bytes, *, where: str) -> Vote:
    """The vote in a file's content. Raises DamagedError, naming where, on any flipped or missing byte."""
    try:
        vote = _vote_decoder.decode(_open_record(data, where))
    except MALFORMED as error:
        raise DamagedError(f"{where}: {error}") from error
    _check(vote.version, vote.digest_kind, vote.files, where)
    if vote.stock_objects:
        _check_objects(vote.stock_objects, where)
    return vote


def encode_objects(objects: StockObjects) -> bytes:
    """Encoded form, as it lies in a slot."""
    return _encoder.encode(objects)


def decode_objects(data: bytes, *, where: str) -> StockObjects:
    """Rank 0's leaves for stock readers, as they lie in a slot. Raises DamagedError, naming where."""
    try:
        objects = _objects_decoder.decode(data)
    except MALFORMED as error:
        raise DamagedError(f"{where}: {STOCK_OBJECTS} is not readable: {error}") from error
    _check_objects(objects, where)
    return objects


def _check_objects(objects: StockObjects, where: str) -> None:
    if any(offset + nbytes > len(objects.data) for offset, nbytes in objects.index.values()):
        raise DamagedError(f"{where}: a leaf lies outside {STOCK_OBJECTS}")


def decode_manifest(data: bytes, *, where: str) -> Manifest:
    """The manifest in a file's content. Raises DamagedError, naming where."""
    try:
        manifest = _manifest_decoder.decode(_open_record(data, where))
    except MALFORMED as error:
        raise DamagedError(f"{where}: {error}") from error
    _check(manifest.version, manifest.digest_kind, manifest.files, where)
    if [f.rank for f in manifest.files] != list(range(manifest.world_size)):
        raise DamagedError(f"{where}: files of {len(manifest.files)} ranks, the job has {manifest.world_size}")
    return manifest


def _check(version: int, kind: str, files: list[FileRecord], where: str) -> None:
    if version != VERSION or kind != KIND:
        raise DamagedError(
            f"{where}: version {version} with digests {kind!r}, this program reads {VERSION} with {KIND!r}"
        )
    for record in files:
        if not record.name.startswith(f"r{record.rank:05d}-"):
            raise DamagedError(f"{where}: {record.name} is said to be of rank {record.rank}")
        if len(record.digests) != block_count(record.nbytes) * DIGEST_NBYTES:
            raise DamagedError(f"{where}: {record.name}: digests do not cover the file")
        if record.parts and not are_parts(record.parts, record.nbytes, raw=record.raw):
            raise DamagedError(f"{where}: {record.name}: its parts do not add up to {record.nbytes} bytes")


def layout_of(record: FileRecord, world_size: int, *, where: str) -> Layout:
    """The layout in a file's record, held against it. Raises DamagedError, naming where."""
    layout = decode_layout(record.layout, where=where)
    said = (layout.file, layout.rank, layout.world_size, layout.image_nbytes, layout.raw)
    expected = (record.name, record.rank, world_size, record.nbytes, record.raw)
    if said != expected or tuple(part.nbytes for part in layout.parts) != record.parts:
        raise DamagedError(f"{where}: its layout is of another file: {said}")
    return layout


def check_committed(committed: Committed, manifest: Manifest, manifest_raw: bytes, *, where: str) -> None:
    """Raises DamagedError, naming where COMMITTED lies, unless it vouches for the manifest."""
    expected = make_committed(manifest, manifest_raw)
    for field in committed.__struct_fields__:
        said, found = getattr(committed, field), getattr(expected, field)
        if said != found:
            raise DamagedError(f"{where}: does not match {MANIFEST}: {field}: {said} and {found}")


def one_record_each(votes: Iterable[Vote]) -> list[FileRecord]:
    """The file of every rank that some vote is for, by rank. Raises DamagedError when two votes differ about one."""
    found: dict[int, tuple[FileRecord, str]] = {}
    for vote in votes:
        for record in vote.files:
            known, node = found.setdefault(record.rank, (record, vote.node))
            if known != record:
                raise DamagedError(f"votes for {vote.save} of {node} and {vote.node} differ about {record.name}")
    return [found[rank][0] for rank in sorted(found)]


def make_manifest(
    votes: list[tuple[Vote, bytes]], *, save: SaveId, writer: str, stock: Sequence[StockFile] = ()
) -> Manifest:
    """The manifest that votes (with their file content) add up to; stock: what lies beside them for stock readers.

    A rank may have two votes: its drain began on one node, and again on another that had the segment too. Both wrote
    the same bytes under the same name, so they agree to the bit. Raises DamagedError when they do not, when votes
    disagree about the job, the save or the world, or leave a rank out.
    """
    first = votes[0][0] if votes else None
    if first is None or any((v.job, v.save, v.world_size) != (first.job, save, first.world_size) for v, _ in votes):
        raise DamagedError(f"votes for {save} are missing or disagree about the job")
    files = one_record_each([v for v, _ in votes])
    if [f.rank for f in files] != list(range(first.world_size)):
        raise DamagedError(f"votes for {save} cover {len(files)} of {first.world_size} ranks")
    parity = sorted({v.parity for v, _ in votes if v.parity is not None})
    refs = sorted((VoteRef(v.node, len(raw), digest(raw)) for v, raw in votes), key=lambda r: r.node)
    return Manifest(
        version=VERSION, digest_kind=KIND, writer=writer, job=first.job, save=save,
        world_size=first.world_size, votes=refs, files=files, stock=list(stock), parity=parity,
    )  # fmt: skip


def make_committed(manifest: Manifest, manifest_raw: bytes) -> Committed:
    """The COMMITTED record of a manifest and its file content."""
    return Committed(
        format=VERSION, job=manifest.job, save_id=manifest.save.text, step=manifest.save.step,
        incarnation=manifest.save.incarnation, counter=manifest.save.counter, world_size=manifest.world_size,
        files=sum(len(f.extents()) for f in manifest.files), nbytes=sum(f.nbytes for f in manifest.files),
        manifest_nbytes=len(manifest_raw), manifest_xxh3_128=digest(manifest_raw).hex(),
    )  # fmt: skip


def encode_committed(committed: Committed) -> bytes:
    """File content of COMMITTED: indented JSON and a newline."""
    return msgspec.json.format(msgspec.json.encode(committed)) + b"\n"


def decode_committed(data: bytes, *, where: str) -> Committed:
    """The record in COMMITTED. Raises DamagedError, naming where."""
    try:
        committed = _committed_decoder.decode(data)
    except MALFORMED as error:
        raise DamagedError(f"{where}: {error}") from error
    if committed.format != VERSION:
        raise DamagedError(f"{where}: format {committed.format}, this program reads {VERSION}")
    return committed
