"""A committed checkpoint opened for mending: its records, and the redundancy sets whose parity lies beside it."""

import os
from dataclasses import dataclass, field

from ckptd.core.piece import Piece
from ckptd.filelayer import FileLayer
from ckptd.parity.plan import Map, map_of
from ckptd.parity.record import Record, decode_record, set_name
from ckptd.protocol.digest import digest
from ckptd.protocol.errors import CkptdError, DamagedError, UsageError
from ckptd.protocol.ids import parse_dirname, parse_partial_dirname
from ckptd.protocol.layout import Extent
from ckptd.protocol.manifest import (
    COMMITTED,
    MANIFEST,
    PARITY_DIR,
    VOTES_DIR,
    FileRecord,
    Manifest,
    ParityRecord,
    check_committed,
    decode_manifest,
    decode_vote,
    encode_objects,
)
from ckptd.protocol.slot import Seal
from ckptd.repair.files import IMAGES, Bytes
from ckptd.store_scan import read_committed


@dataclass
class Set:
    """A redundancy set. files: what the manifest says of each member's parity; records: those that can be read."""

    name: str
    piece: Piece  # of any member
    files: dict[int, ParityRecord]
    records: dict[int, Record]

    @property
    def ranks(self) -> list[int]:
        """Whose images it protects."""
        return [seal.rank for column in self.piece.columns for seal in column.seals]

    def map(self) -> Map:
        """With everything in files."""
        pieces = {member: str(member) for member in range(len(self.piece.columns))}
        return map_of(self.piece, dict.fromkeys(self.ranks, IMAGES), pieces)

    def parity(self, directory: str, member: int) -> Bytes:
        """A member's parity. Without digests when its record cannot be read: then no block of it counts as sound."""
        file, record = self.files[member], self.records.get(member)
        extent = Extent(os.path.join(PARITY_DIR, file.name), 0, file.nbytes)
        return Bytes(directory, [extent], record.table if record else b"", extent.nbytes)


@dataclass
class Checkpoint:
    """What there is to mend, and to mend it from."""

    path: str
    manifest: Manifest
    images: dict[int, Bytes]
    sets: list[Set] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)  # parity files of no readable set
    notes: list[str] = field(default_factory=list)


def open_checkpoint(path: str) -> Checkpoint:
    """The checkpoint in the directory path. Raises UsageError, DamagedError or OSError, naming the file."""
    path = os.path.realpath(path)
    base, where = os.path.basename(path), os.path.join(path, MANIFEST)
    if parse_partial_dirname(base) is not None:
        raise UsageError(f"{path} is unfinished, not a checkpoint", hint=f"ckptd commit {path}")
    if not os.path.isdir(path) or (parse_dirname(base) is None and not os.path.exists(where)):
        raise UsageError(f"{path} is no checkpoint's directory", hint=f"see what is there: ckptd list {path}")
    try:
        committed = read_committed(FileLayer(), path)
    except FileNotFoundError as error:
        raise CkptdError(f"{error.filename}: missing: not committed", hint=f"ckptd verify {path}") from error
    raw = FileLayer().read_file(where, committed.manifest_nbytes)
    manifest = decode_manifest(raw, where=where)
    check_committed(committed, manifest, raw, where=os.path.join(path, COMMITTED))
    images = {record.rank: Bytes(path, record.extents(), record.digests, record.nbytes) for record in manifest.files}
    found = Checkpoint(path, manifest, images)
    _find_sets(found)
    return found


def _find_sets(checkpoint: Checkpoint) -> None:
    by_set: dict[str, dict[int, ParityRecord]] = {}
    for file in checkpoint.manifest.parity:
        name, _, index = file.name.removesuffix(".parity").partition("-")
        by_set.setdefault(name, {})[int(index)] = file
    for name, files in sorted(by_set.items()):
        records: dict[int, Record] = {}
        for member, file in files.items():
            try:
                record = read_record(checkpoint.path, file)
            except (OSError, EOFError, DamagedError):
                continue
            if (set_name(record.piece), record.piece.index) == (name, member):
                records[member] = record
        where = os.path.join(checkpoint.path, PARITY_DIR)
        if not records:
            checkpoint.unreadable += [os.path.join(where, file.name) for file in files.values()]
            continue
        piece = next(iter(records.values())).piece
        stranger = _stranger(piece, checkpoint.manifest)
        if stranger:
            checkpoint.notes.append(f"{where}: the parity {name} is of other bytes: {stranger}")
            continue
        checkpoint.sets.append(Set(name, piece, files, records))


def read_record(path: str, file: ParityRecord) -> Record:
    """The record at the end of a parity file. Raises OSError, EOFError, DamagedError."""
    where = os.path.join(path, PARITY_DIR, file.name)
    fd = FileLayer().open_read(where)
    try:
        raw = os.pread(fd, file.record_nbytes, file.nbytes)
    finally:
        os.close(fd)
    return decode_record(raw, file.nbytes, file.record_digest, where)


def _stranger(piece: Piece, manifest: Manifest) -> str:
    """Why the piece is not of what the manifest lists; empty when it is."""
    if piece.save != manifest.save:
        return f"of {piece.save}"
    for column in piece.columns:
        for seal in column.seals:
            if seal.rank >= len(manifest.files) or not _fits(seal, manifest.files[seal.rank]):
                return f"the image of rank {seal.rank} differs"
    return ""


def _fits(seal: Seal, record: FileRecord) -> bool:
    """Whether the record's image and tail are the segment's that was sealed."""
    said = (seal.image_nbytes, seal.table_digest, seal.layout_digest, seal.leaves_digest, seal.parts, seal.raw)
    found = (
        record.nbytes,
        digest(record.digests),
        digest(record.layout),
        digest(record.leaves),
        record.parts,
        record.raw,
    )
    return said == found


def tails(checkpoint: Checkpoint, wanted: Set) -> tuple[dict[int, bytes], list[int]]:
    """The tail of each segment of the set as it lay in its slot, and the ranks whose plain leaves are not known.

    All but rank 0's leaves for stock readers stands in the manifest; those stand in a vote.
    """
    found, unknown = {}, []
    for column in wanted.piece.columns:
        for seal in column.seals:
            record = checkpoint.manifest.files[seal.rank]
            tail = record.digests + record.layout + record.leaves
            if seal.objects_nbytes:
                objects = _objects(checkpoint, seal)
                if not objects:
                    unknown.append(seal.rank)
                tail += objects
            found[seal.rank] = tail
    return found, unknown


def _objects(checkpoint: Checkpoint, seal: Seal) -> bytes:
    """Encoded as the rank encoded them; empty when no vote has them."""
    for ref in checkpoint.manifest.votes:
        where = os.path.join(checkpoint.path, VOTES_DIR, ref.node)
        try:
            vote = decode_vote(FileLayer().read_file(where, ref.nbytes), where=where)
        except (OSError, DamagedError):
            continue
        if vote.stock_objects is not None and any(record.rank == seal.rank for record in vote.files):
            raw = encode_objects(vote.stock_objects)
            return raw if digest(raw) == seal.objects_digest else b""
    return b""
