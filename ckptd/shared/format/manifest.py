"""Records of the commit: vote, manifest, COMMITTED. Each is self-checking or checked by the next."""

import collections
import contextlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Annotated, Final, Literal

import msgspec

from ckptd.shared.base.decoding import MALFORMED, decoded
from ckptd.shared.base.errors import DamagedError
from ckptd.shared.base.ids import (
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
    StoreId,
    WorldSize,
    file_name,
)
from ckptd.shared.format.digest import DIGEST_NBYTES, block_count
from ckptd.shared.format.integrity import XXH3, DigestKind, Integrity, KeyId, Purpose
from ckptd.shared.format.layout import Extent, Layout, are_parts, decode_layout, extents
from ckptd.shared.format.replica_attestations import MAX_ATTESTATIONS, Attestation, Compared, compared, difference_of

VERSION = 3
VOTES_DIR = "votes"
PARITY_DIR = "parity"
MANIFEST = "ckptd.manifest"
COMMITTED = "COMMITTED"
LATEST = "latest"
STOCK_METADATA: Final = ".metadata"
STOCK_OBJECTS: Final = "objects.pt"
STOCK_FILES: Final = "files.json"
UNPUBLISHED = "UNPUBLISHED"
LINKED = "LINKED"
_MAGIC = b"CKPTDMF1"  # before votes and manifests: magic, body, digest of both
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
    attestations: Annotated[
        tuple[Attestation, ...], msgspec.Meta(max_length=MAX_ATTESTATIONS)
    ] = ()  # of tensors that replicas hold too

    def extents(self) -> list[Extent]:
        """The files of the image, in order."""
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
    digest_kind: DigestKind
    store_id: StoreId
    job: JobName
    save: SaveId
    node: NodeName
    world_size: WorldSize
    files: Annotated[list[FileRecord], msgspec.Meta(max_length=4096)]
    stock_objects: StockObjects | None = None  # from rank 0's node, when it makes them
    parity: ParityRecord | None = None  # when this node drained its own
    key_id: KeyId = ""  # of the key that all its digests are made with


class VoteRef(msgspec.Struct, frozen=True):
    """A vote's node, size and digest, so that the manifest pins it."""

    node: NodeName
    nbytes: Nbytes
    digest: Digest


class Manifest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The truth about a committed checkpoint, made from the votes alone."""

    version: int
    digest_kind: DigestKind
    writer: str
    store_id: StoreId
    job: JobName
    save: SaveId
    world_size: WorldSize
    votes: list[VoteRef]
    files: list[FileRecord]  # by rank
    stock: list[StockFile] = []
    parity: list[ParityRecord] = []  # by name
    key_id: KeyId = ""  # of the key that all its digests are made with


class Committed(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The small JSON that makes a directory of final name a checkpoint, if it matches the manifest.

    With a key it is proved by itself: proof is the digest of all other fields.
    """

    format: int
    store_id: StoreId
    job: JobName
    save_id: Annotated[str, msgspec.Meta(max_length=96)]
    step: Step
    incarnation: Incarnation
    counter: Counter
    run: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]
    world_size: WorldSize
    files: WorldSize
    nbytes: Nbytes
    manifest_nbytes: Annotated[int, msgspec.Meta(ge=0, le=MAX_RECORD_NBYTES)]
    manifest_digest: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]
    digest_kind: DigestKind
    key_id: KeyId = ""
    replicas: Compared = Compared.NO_REPLICAS  # how much of what its ranks hold alike was compared when it was saved
    proof: Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{32})?\Z")] = ""

    @property
    def save(self) -> SaveId:
        """The checkpoint this record belongs to."""
        return SaveId(self.incarnation, self.counter, self.step, bytes.fromhex(self.run))


_encoder = msgspec.msgpack.Encoder()
_objects_decoder = msgspec.msgpack.Decoder(StockObjects)
_vote_decoder = msgspec.msgpack.Decoder(Vote)
_manifest_decoder = msgspec.msgpack.Decoder(Manifest)
_committed_decoder = msgspec.json.Decoder(Committed)


def encode_record(record: Vote | Manifest, integrity: Integrity = XXH3) -> bytes:
    """Self-checking file content of a vote or manifest, which must name integrity's kind and key."""
    integrity.check(record.digest_kind, record.key_id, type(record).__name__.lower())
    body = _MAGIC + _encoder.encode(record)
    return body + integrity.digest(body, Purpose.VOTE if isinstance(record, Vote) else Purpose.MANIFEST)


class _Said(msgspec.Struct):
    """What a record says of its own digests."""

    digest_kind: DigestKind
    key_id: KeyId = ""


class _Numbered(msgspec.Struct):
    """The version of a vote or manifest, and of COMMITTED, whatever else one of another version says."""

    version: int = VERSION
    format: int = VERSION


_said_decoder = msgspec.msgpack.Decoder(_Said)


def _check_version(number: int, where: str, what: str = "version") -> None:
    if number != VERSION:
        raise DamagedError(f"{where}: {what} {number}, this program reads {VERSION}")


def _refuse_other_version(raw: bytes | memoryview, decode: Callable[..., _Numbered], where: str) -> None:
    """Of a record that cannot be decoded: one of another version may have other fields."""
    with contextlib.suppress(*MALFORMED):
        said = decode(raw)
        _check_version(said.version, where)
        _check_version(said.format, where, "format")


_of_record = partial(_refuse_other_version, decode=msgspec.msgpack.Decoder(_Numbered).decode)
_of_committed = partial(_refuse_other_version, decode=msgspec.json.Decoder(_Numbered).decode)


def _open_record(data: bytes, where: str, integrity: Integrity, purpose: Purpose) -> memoryview:
    if len(data) < len(_MAGIC) + DIGEST_NBYTES or data[: len(_MAGIC)] != _MAGIC:
        raise DamagedError(f"{where}: not a ckptd record")
    body = memoryview(data)[len(_MAGIC) : -DIGEST_NBYTES]
    if integrity.digest(memoryview(data)[:-DIGEST_NBYTES], purpose) != data[-DIGEST_NBYTES:]:
        _check_not_anothers(body, where, integrity)
        raise DamagedError(f"{where}: digest does not match, the file is damaged")
    return body


def _check_not_anothers(body: memoryview, where: str, integrity: Integrity) -> None:
    """Raises IntegrityError for a record that, as far as one can tell, is not damaged: of another key, or of none."""
    try:
        said = _said_decoder.decode(body)
    except MALFORMED:
        return
    integrity.check(said.digest_kind, said.key_id, where)


def decode_vote(data: bytes, *, where: str, integrity: Integrity = XXH3) -> Vote:
    """The vote in a file's content. Raises DamagedError, naming where, on any flipped or missing byte.

    IntegrityError, which is one, when it is proved in another way.
    """
    body = _open_record(data, where, integrity, Purpose.VOTE)
    vote = decoded(_vote_decoder.decode, body, where, look=partial(_of_record, where=where))
    _check(vote, where, integrity)
    if vote.stock_objects:
        _check_objects(vote.stock_objects, where)
    return vote


def encode_objects(objects: StockObjects) -> bytes:
    """Encoded form, as in a slot."""
    return _encoder.encode(objects)


def decode_objects(data: bytes, *, where: str) -> StockObjects:
    """Rank 0's leaves for stock readers, as they lie in a slot. Raises DamagedError, naming where."""
    objects = decoded(_objects_decoder.decode, data, f"{where}: {STOCK_OBJECTS} is not readable")
    _check_objects(objects, where)
    return objects


def _check_objects(objects: StockObjects, where: str) -> None:
    if any(offset + nbytes > len(objects.data) for offset, nbytes in objects.index.values()):
        raise DamagedError(f"{where}: a leaf lies outside {STOCK_OBJECTS}")


def are_all_ranks(files: Sequence[FileRecord], world_size: int) -> bool:
    """Whether there is one of each rank, in their order."""
    return len(files) == world_size and all(file.rank == rank for rank, file in enumerate(files))


def decode_manifest(data: bytes, *, where: str, integrity: Integrity = XXH3) -> Manifest:
    """The manifest in a file's content. Raises DamagedError, naming where; IntegrityError as decode_vote does."""
    body = _open_record(data, where, integrity, Purpose.MANIFEST)
    manifest = decoded(_manifest_decoder.decode, body, where, look=partial(_of_record, where=where))
    _check(manifest, where, integrity)
    if not are_all_ranks(manifest.files, manifest.world_size):
        raise DamagedError(f"{where}: files of {len(manifest.files)} ranks, the job has {manifest.world_size}")
    named = collections.Counter(vote.node for vote in manifest.votes)
    named.update(file.name for files in (manifest.stock, manifest.parity) for file in files)
    if twice := next((name for name, count in named.items() if count > 1), None):
        raise DamagedError(f"{where}: lists {twice} twice")
    return manifest


def _check(found: Vote | Manifest, where: str, integrity: Integrity) -> None:
    _check_version(found.version, where)
    integrity.check(found.digest_kind, found.key_id, where)
    for record in found.files:
        if record.name != file_name(record.rank):
            raise DamagedError(f"{where}: {record.name} is said to be the first file of rank {record.rank}")
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
    votes: list[tuple[Vote, bytes]], *, save: SaveId, writer: str, stock: Sequence[StockFile] = (),
    integrity: Integrity = XXH3,
) -> Manifest:  # fmt: skip
    """The manifest that votes (with their file content) add up to; stock: what lies beside them for stock readers.

    A rank may have two votes: its drain began on one node, and again on another that had the segment too. Both wrote
    the same bytes under the same name, so they agree to the bit. Raises DamagedError when they do not, when votes
    disagree about the job, the save or the world, or leave a rank out.
    """
    first = votes[0][0] if votes else None
    if first is None or any(
        (v.store_id, v.job, v.save, v.world_size) != (first.store_id, first.job, save, first.world_size)
        for v, _ in votes
    ):
        raise DamagedError(f"votes for {save} are missing or disagree about the store, the job or the run")
    files = one_record_each([v for v, _ in votes])
    if not are_all_ranks(files, first.world_size):
        raise DamagedError(f"votes for {save} cover {len(files)} of {first.world_size} ranks")
    difference = difference_of({f.rank: f.attestations for f in files}, complete=False)  # older daemons record none
    if difference is not None:
        raise DamagedError(f"votes for {save}: {difference.reason}")
    parity = sorted({v.parity for v, _ in votes if v.parity is not None})
    refs = [VoteRef(v.node, len(raw), integrity.digest(raw, Purpose.VOTE_FILE)) for v, raw in votes]
    return Manifest(
        version=VERSION, digest_kind=integrity.kind, writer=writer, store_id=first.store_id, job=first.job, save=save,
        world_size=first.world_size, votes=sorted(refs, key=lambda r: r.node), files=files, stock=list(stock),
        parity=parity, key_id=integrity.key_id,
    )  # fmt: skip


def make_committed(manifest: Manifest, manifest_raw: bytes, integrity: Integrity = XXH3) -> Committed:
    """The COMMITTED record of a manifest and its file content."""
    bare = Committed(
        format=VERSION, store_id=manifest.store_id, job=manifest.job, save_id=manifest.save.text,
        step=manifest.save.step,
        incarnation=manifest.save.incarnation, counter=manifest.save.counter, run=manifest.save.run.hex(),
        world_size=manifest.world_size,
        files=sum(len(f.extents()) for f in manifest.files), nbytes=sum(f.nbytes for f in manifest.files),
        manifest_nbytes=len(manifest_raw),
        manifest_digest=integrity.digest(manifest_raw, Purpose.MANIFEST_FILE).hex(),
        digest_kind=integrity.kind, key_id=integrity.key_id,
        replicas=compared({f.rank: f.attestations for f in manifest.files}),
    )  # fmt: skip
    return msgspec.structs.replace(bare, proof=_proof(bare, integrity))


def _proof(committed: Committed, integrity: Integrity) -> str:
    """With a key, the proof of the record alone, for readers without a manifest. Without a key, none."""
    if not integrity.keyed:
        return ""
    return integrity.digest(_encoder.encode(msgspec.structs.replace(committed, proof="")), Purpose.COMMITTED).hex()


def encode_committed(committed: Committed) -> bytes:
    """File content of COMMITTED: indented JSON and a newline."""
    return msgspec.json.format(msgspec.json.encode(committed)) + b"\n"


def decode_committed(data: bytes, *, where: str, integrity: Integrity = XXH3) -> Committed:
    """The record in COMMITTED. Raises DamagedError, naming where; IntegrityError as decode_vote does."""
    committed = decoded(_committed_decoder.decode, data, where, look=partial(_of_committed, where=where))
    _check_version(committed.format, where, "format")
    integrity.check(committed.digest_kind, committed.key_id, where)
    if committed.proof != _proof(committed, integrity):
        raise DamagedError(f"{where}: its proof does not match: the record is damaged, or forged")
    return committed
