"""Records of the commit: votes, the manifest that pins them, COMMITTED. Each is self-checking or checked by the next.

What a vote says of its node's files stands in the vote alone. The manifest has a vote's digest and its ranks, so that
a reader opens the votes of the ranks that it needs: the manifest has some 50 bytes of a node.
"""

import collections
import itertools
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Annotated, Final, Literal, NamedTuple

import msgspec

from ckptd.shared.base.decoding import decoded
from ckptd.shared.base.errors import DamagedError, UsageError
from ckptd.shared.base.ids import (
    MAX_PARTS,
    MAX_RANKS,
    Digest,
    FileName,
    JobName,
    Nbytes,
    NodeName,
    Rank,
    SaveId,
    SetName,
    StoreId,
    WorldSize,
    file_name,
)
from ckptd.shared.base.wording import shown
from ckptd.shared.format.digest import DIGEST_NBYTES, block_count
from ckptd.shared.format.dropped import Dropped, dropped_by
from ckptd.shared.format.integrity import XXH3, DigestKind, Integrity, KeyId, Purpose
from ckptd.shared.format.layout import Extent, Layout, are_parts, extents
from ckptd.shared.format.packed_layout import Known, Parts, layout_in
from ckptd.shared.format.replica_attestations import MAX_ATTESTATIONS, Attestation, Compared, compared, difference_of
from ckptd.shared.format.runs import pairs, runs_of
from ckptd.shared.format.save_metadata import SaveMetadata, metadata_in
from ckptd.shared.format.sealed_record import VERSION, check_version, of_record, open_record, sealed
from ckptd.shared.format.set_places import parity_place, vote_place

COMMITTED = "COMMITTED"
LATEST = "latest"
STOCK_METADATA: Final = ".metadata"
STOCK_OBJECTS: Final = "objects.pt"
STOCK_FILES: Final = "files.json"
UNPUBLISHED = "UNPUBLISHED"
LINKED = "LINKED"
MAX_RECORD_NBYTES = 1 << 30  # of a vote or manifest
MAX_PARITY_RECORD_NBYTES = 1 << 30
# The set, by the content of what it protects, and the member.
ParityName = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}-[0-9]{2}\.parity\Z")]
Index = Annotated[int, msgspec.Meta(ge=0)]
StockName = Literal[".metadata", "objects.pt", "files.json"]


class FileRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One image: its size, the digest of every block, and its rank's layout and leaves as opaque bytes.

    In a vote's file plan, form and leaves are numbers of what its records have in common.
    """

    name: FileName
    rank: Rank
    nbytes: Nbytes
    digests: bytes  # 16 bytes per block of 16 MiB
    plan: bytes  # of the layout, as are form and own
    form: bytes
    own: bytes
    leaves: bytes
    parts: Annotated[tuple[Nbytes, ...], msgspec.Meta(max_length=MAX_PARTS)] = ()  # bytes of each file, if several
    raw: bool = False  # the files after the first are a trainer's own
    attestations: Annotated[
        tuple[Attestation, ...], msgspec.Meta(max_length=MAX_ATTESTATIONS)
    ] = ()  # of tensors that replicas hold too

    def extents(self) -> list[Extent]:
        """The files of the image, in order."""
        return extents(self.rank, self.nbytes, self.parts, raw=self.raw)

    @property
    def layout(self) -> Parts:
        """The parts of the layout: all that the rank's slot has of it."""
        return Parts(self.plan, self.form, self.own)


class ParityRecord(msgspec.Struct, frozen=True, order=True):
    """One member's parity of a set, then a record with its blocks' digests: its own is here, so the file is pinned."""

    folder: SetName
    name: ParityName
    nbytes: Nbytes  # of the parity: whole pages
    record_nbytes: Annotated[int, msgspec.Meta(ge=1, le=MAX_PARITY_RECORD_NBYTES)]
    record_digest: Digest

    @property
    def place(self) -> str:
        """Of the file, in the checkpoint."""
        return parity_place(self.folder, self.name)

    @property
    def file_nbytes(self) -> int:
        """Of the file."""
        return self.nbytes + self.record_nbytes


LeftOut = Annotated[str, msgspec.Meta(max_length=400)]


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
    folder: SetName  # its set's, in which it lies
    world_size: WorldSize
    files: Annotated[list[FileRecord], msgspec.Meta(max_length=4096)]
    stock_objects: StockObjects | None = None  # from rank 0's node, when it makes them
    parity: ParityRecord | None = None  # when this node drained its own
    dropped: Dropped = ()
    key_id: KeyId = ""  # of the key that all its digests are made with


class VoteRef(msgspec.Struct, frozen=True, array_like=True):
    """A vote's node, size and digest, so that the manifest pins it; and which ranks are read from it.

    A node may have several: each has a rank that is in no other.
    """

    node: NodeName
    folder: Index  # its set's, among those of the manifest
    nbytes: Annotated[int, msgspec.Meta(ge=0, le=MAX_RECORD_NBYTES)]
    digest: Digest
    runs: tuple[Annotated[int, msgspec.Meta(ge=0, le=MAX_RANKS)], ...]  # first and end of each run of ranks

    @property
    def ranks(self) -> Iterator[int]:
        """In their order."""
        return itertools.chain.from_iterable(range(*run) for run in pairs(self.runs))


class Voted(NamedTuple):
    """A vote as it was read: what the manifest keeps of its file."""

    vote: Vote
    nbytes: int
    digest: bytes

    @property
    def place(self) -> str:
        """Of the file, in the checkpoint: the name that a vote of these bytes has."""
        return vote_place(self.vote.folder, self.vote.node, self.digest)


class IndexFile(msgspec.Struct, frozen=True, array_like=True):
    """The index of the records: bytes and digest of its file, which has a name of its digest."""

    nbytes: Annotated[int, msgspec.Meta(ge=0, le=MAX_RECORD_NBYTES)]
    digest: Digest

    @property
    def name(self) -> str:
        """Of the file, in the checkpoint."""
        return f"ckptd.{self.digest.hex()[:16]}.index"


class Manifest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The root of a committed checkpoint, made from the votes alone: it pins each, and has their sums."""

    version: int
    digest_kind: DigestKind
    writer: str
    store_id: StoreId
    job: JobName
    save: SaveId
    world_size: WorldSize
    folders: list[SetName]  # of the votes' sets, in order
    votes: list[VoteRef]  # by node, then by place
    files: Index  # of all images
    nbytes: Nbytes  # of all images
    replicas: Compared = Compared.NO_REPLICAS  # how much of what ranks hold alike was compared when it was saved
    stock: list[StockFile] = []
    left_out: LeftOut = ""  # why stock readers have no `.metadata`, where they were meant to
    index: IndexFile | None = None  # of the records
    metadata: SaveMetadata = {}  # what the training said of the save, such as its loss
    dropped: Dropped = ()  # of any vote
    key_id: KeyId = ""  # of the key that all its digests are made with

    def place_of(self, ref: VoteRef) -> str:
        """Of a vote's file, in the checkpoint."""
        return vote_place(self.folders[ref.folder], ref.node, ref.digest)


_SHARED = ("plan", "form", "leaves")  # what equal records of a vote have once, by number


class StoredFile(FileRecord, frozen=True, kw_only=True, omit_defaults=True):
    """A file's record in a vote's file."""

    plan: Index  # type: ignore[assignment]
    form: Index  # type: ignore[assignment]
    leaves: Index  # type: ignore[assignment]


class StoredVote(Vote, frozen=True, kw_only=True, omit_defaults=True):
    """A vote in its file. shared: what its records have in common."""

    files: Annotated[list[StoredFile], msgspec.Meta(max_length=4096)]  # type: ignore[assignment]
    shared: Annotated[list[bytes], msgspec.Meta(max_length=3 * 4096)]


def stored(vote: Vote) -> StoredVote:
    """The vote as its file has it."""
    known: dict[bytes, int] = {}
    files = []
    for record in vote.files:
        fields = msgspec.structs.asdict(record)
        fields |= {name: known.setdefault(fields[name], len(known)) for name in _SHARED}
        files.append(StoredFile(**fields))
    return StoredVote(**msgspec.structs.asdict(vote) | {"files": files}, shared=list(known))


def _restored(found: StoredVote, where: str) -> Vote:
    fields = {name: getattr(found, name) for name in Vote.__struct_fields__}
    files = []
    for record in found.files:
        said = msgspec.structs.asdict(record)
        if max(said[name] for name in _SHARED) >= len(found.shared):
            raise DamagedError(f"{where}: {record.name}: a part that no record of the vote has")
        files.append(FileRecord(**said | {name: found.shared[said[name]] for name in _SHARED}))
    return Vote(**fields | {"files": files})


_encoder = msgspec.msgpack.Encoder()
_objects_decoder = msgspec.msgpack.Decoder(StockObjects)
_vote_decoder = msgspec.msgpack.Decoder(StoredVote)
_manifest_decoder = msgspec.msgpack.Decoder(Manifest)


def encode_record(record: Vote | Manifest, integrity: Integrity = XXH3) -> bytes:
    """Self-checking file content of a vote or manifest, which must name integrity's kind and key.

    Raises UsageError for one that is larger than readers take.
    """
    what = "manifest" if isinstance(record, Manifest) else f"vote of node {record.node}"
    integrity.check(record.digest_kind, record.key_id, what)
    if isinstance(record, Manifest):
        raw = sealed(_encoder.encode(record), integrity, Purpose.MANIFEST)
    else:
        raw = sealed(_encoder.encode(stored(record)), integrity, Purpose.VOTE)
    if len(raw) > MAX_RECORD_NBYTES:
        raise UsageError(
            f"the {what} for {record.save} of job {shown(record.job)} has {len(raw)} bytes, and at most "
            f"{MAX_RECORD_NBYTES} can be read again",
            hint="a vote holds the values of its node's ranks that are no tensors: save large ones as tensors",
        )
    return raw


def vote_file(vote: Vote, integrity: Integrity = XXH3) -> tuple[str, bytes]:
    """Place in the checkpoint, and content, of a vote's file. Each vote that says something else has another place."""
    raw = encode_record(vote, integrity)
    return Voted(vote, len(raw), integrity.digest(raw, Purpose.VOTE_FILE)).place, raw


def decode_vote(data: bytes, *, where: str, integrity: Integrity = XXH3) -> Vote:
    """The vote in a file's content. Raises DamagedError, naming where, on any flipped or missing byte.

    IntegrityError, which is one, when it is proved in another way.
    """
    body = open_record(data, where, integrity, Purpose.VOTE)
    found = decoded(_vote_decoder.decode, body, where, look=partial(of_record, where=where))
    vote = _restored(found, where)
    _check(vote, where, integrity)
    _check_files(vote.files, where)
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
    body = open_record(data, where, integrity, Purpose.MANIFEST)
    manifest = decoded(_manifest_decoder.decode, body, where, look=partial(of_record, where=where))
    _check(manifest, where, integrity)
    _check_runs(manifest, where)
    if manifest.folders != sorted(set(manifest.folders)):
        raise DamagedError(f"{where}: its sets are not in order")
    if any(ref.folder >= len(manifest.folders) for ref in manifest.votes):
        raise DamagedError(f"{where}: a vote of no set")
    named = collections.Counter([*map(manifest.place_of, manifest.votes), *(file.name for file in manifest.stock)])
    if twice := next((name for name, count in named.items() if count > 1), None):
        raise DamagedError(f"{where}: lists {twice} twice")
    return manifest


def _check_runs(manifest: Manifest, where: str) -> None:
    """Raises DamagedError unless the votes' runs have each rank once."""
    if any(len(ref.runs) % 2 for ref in manifest.votes):
        raise DamagedError(f"{where}: a run of ranks without an end")
    end = 0
    for first, stop in sorted(run for ref in manifest.votes for run in pairs(ref.runs)):
        if first != end or stop <= first:
            raise DamagedError(f"{where}: ranks {end} to {first} have no vote, or two")
        end = stop
    if end != manifest.world_size:
        raise DamagedError(f"{where}: votes of {end} ranks, the job has {manifest.world_size}")


def _check(found: Vote | Manifest, where: str, integrity: Integrity) -> None:
    check_version(found.version, where)
    integrity.check(found.digest_kind, found.key_id, where)


def _check_files(files: Iterable[FileRecord], where: str) -> None:
    for record in files:
        if record.name != file_name(record.rank):
            raise DamagedError(f"{where}: {record.name} is said to be the first file of rank {record.rank}")
        if len(record.digests) != block_count(record.nbytes) * DIGEST_NBYTES:
            raise DamagedError(f"{where}: {record.name}: digests do not cover the file")
        if record.parts and not are_parts(record.parts, record.nbytes, raw=record.raw):
            raise DamagedError(f"{where}: {record.name}: its parts do not add up to {record.nbytes} bytes")


def layout_of(record: FileRecord, world_size: int, *, where: str, known: Known) -> Layout:
    """The layout in a file's record, held against it. known: as of layout_in. Raises DamagedError, naming where."""
    layout = layout_in(record.layout, where=where, known=known)
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


def cover(votes: Iterable[Voted]) -> list[Voted]:
    """Those of one node's votes of an epoch which count: they have every rank that any of them has.

    The one of the most ranks, then with parity, then the last by digest; and of the others, in this order, each with a
    rank that those before it lack. A node that is ordered again may drain other ranks than before, or more of them.
    Raises DamagedError when two differ about a rank.
    """
    order = sorted(votes, key=lambda voted: (len(voted.vote.files), voted.vote.parity is not None, voted.digest))
    one_record_each([voted.vote for voted in order])
    chosen: list[Voted] = []
    ranks: set[int] = set()
    for voted in reversed(order):
        said = {record.rank for record in voted.vote.files}
        if not chosen or said - ranks:
            chosen.append(voted)
            ranks |= said
    return chosen


def make_manifest(
    votes: Sequence[Voted], *, save: SaveId, writer: str, stock: Sequence[StockFile] = (), integrity: Integrity = XXH3
) -> Manifest:
    """The manifest that votes add up to; stock: what lies beside them for stock readers.

    A rank may have two votes: its drain began on one node, and again on another that had the segment too. Both wrote
    the same bytes under the same name, so they agree to the bit, and the vote of the first node by name is read for it.
    Raises DamagedError when they do not, when votes disagree about the job, the save or the world, or when they leave
    a rank out.
    """
    votes = sorted(votes, key=lambda voted: (voted.vote.node, voted.place))
    first = votes[0].vote if votes else None
    if first is None or any(
        (v.store_id, v.job, v.save, v.world_size) != (first.store_id, first.job, save, first.world_size)
        for v, *_ in votes
    ):
        raise DamagedError(f"votes for {save} are missing or disagree about the store, the job or the run")
    files = one_record_each([v for v, *_ in votes])
    if not are_all_ranks(files, first.world_size):
        raise DamagedError(f"votes for {save} cover {len(files)} of {first.world_size} ranks")
    attestations = {f.rank: f.attestations for f in files}
    difference = difference_of(attestations, complete=False)  # older daemons record none
    if difference is not None:
        raise DamagedError(f"votes for {save}: {difference.reason}")
    folders = sorted({v.folder for v, *_ in votes})
    return Manifest(
        version=VERSION, digest_kind=integrity.kind, writer=writer, store_id=first.store_id, job=first.job, save=save,
        world_size=first.world_size, folders=folders, votes=_refs(votes, folders),
        files=sum(len(f.extents()) for f in files), nbytes=sum(f.nbytes for f in files),
        replicas=compared(attestations), stock=list(stock), key_id=integrity.key_id,
        metadata=metadata_in(files[0].leaves), dropped=dropped_by(v.dropped for v, *_ in votes),
    )  # fmt: skip


def _refs(votes: Sequence[Voted], folders: Sequence[SetName]) -> list[VoteRef]:
    index = {name: number for number, name in enumerate(folders)}
    taken: set[int] = set()
    refs = []
    for vote, nbytes, digest in votes:
        own = sorted({record.rank for record in vote.files} - taken)
        taken.update(own)
        refs.append(VoteRef(vote.node, index[vote.folder], nbytes, digest, tuple(runs_of(own))))
    return refs
