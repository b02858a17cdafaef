"""A committed checkpoint opened for repair: its records, and the redundancy sets with parity on the store."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import msgspec

from ckptd.checkpoint.repair.files import IMAGES, Bytes, OpenFiles
from ckptd.checkpoint.whereabouts import where_checkpoints_are
from ckptd.parity.code import code_of
from ckptd.parity.plan import Map, map_of
from ckptd.parity.record import Record, decode_record, set_name
from ckptd.shared.base.errors import DamagedError, IntegrityError, UsageError
from ckptd.shared.base.ids import parse_dirname, parse_partial_dirname
from ckptd.shared.base.wording import named_ranks
from ckptd.shared.format.committed import RECORDS, TRASH_PREFIX, open_sound
from ckptd.shared.format.integrity import XXH3, Integrity, Purpose
from ckptd.shared.format.layout import Extent
from ckptd.shared.format.manifest import (
    FileRecord,
    Manifest,
    ParityRecord,
    Vote,
    VoteRef,
    encode_objects,
    one_record_each,
)
from ckptd.shared.format.packed_layout import joined
from ckptd.shared.format.root_names import has_records
from ckptd.shared.format.set_places import SETS_DIR
from ckptd.shared.format.slot import Seal
from ckptd.shared.format.stored_files import StoredFiles
from ckptd.shared.format.stored_records import read_vote_of
from ckptd.shared.format.together import together
from ckptd.shared.protocol.parity_types import ParityChunk
from ckptd.shared.stores.kinds import open_files, real
from ckptd.store.interface import Held
from ckptd.store.opening import open_store


@dataclass
class Set:
    """A redundancy set. files: what the votes say of each member's parity; records: those that can be read."""

    name: str
    parity_chunk: ParityChunk  # of any member
    files: dict[int, ParityRecord]
    records: dict[int, Record]

    @property
    def ranks(self) -> list[int]:
        """Whose images it protects."""
        return [seal.rank for column in self.parity_chunk.columns for seal in column.seals]

    def map(self) -> Map:
        """With everything in files."""
        parity_chunks = {member: str(member) for member in range(len(self.parity_chunk.columns))}
        return map_of(self.parity_chunk, dict.fromkeys(self.ranks, IMAGES), parity_chunks)

    def parity(self, files: StoredFiles, member: int) -> Bytes:
        """A member's parity. Without digests when its record cannot be read: then no block of it counts as sound."""
        file, record = self.files[member], self.records.get(member)
        extent = Extent(file.place, 0, file.nbytes)
        return Bytes(files, [extent], record.table if record else b"", extent.nbytes)


class Lost(msgspec.Struct, frozen=True):
    """A file that cannot be made again, and why. ranks: whose images it leaves damaged, or not known to be sound."""

    path: str
    what: str
    ranks: list[int] = []


@dataclass
class Checkpoint:
    """What there is to mend, and to mend it from."""

    files: StoredFiles
    manifest: Manifest
    votes: list[Vote]  # those that can be read
    records: dict[int, FileRecord]  # by rank, as these votes say
    sets: list[Set] = field(default_factory=list)
    lost: list[Lost] = field(default_factory=list)  # votes, and parity of no set that can be read
    notes: list[str] = field(default_factory=list)

    @property
    def images(self) -> dict[int, Bytes]:
        """Of the ranks whose records there are."""
        return {r.rank: Bytes(self.files, r.extents(), r.digests, r.nbytes) for r in self.records.values()}

    @property
    def parity(self) -> list[ParityRecord]:
        """Of all parity files, by place."""
        return sorted({vote.parity for vote in self.votes if vote.parity is not None})


@contextlib.contextmanager
def held_checkpoint(
    path: str, integrity: Integrity = XXH3, *, cached: bool = True
) -> Iterator[tuple[Checkpoint, Held]]:
    """As open_checkpoint, to be mended: read and written in the directory that has the path now, and in no other.

    So what takes its place meanwhile, as ``ckptd prune --drop`` does it, is never touched.
    """
    location = _location(path, integrity)
    with open_store(os.path.dirname(location), integrity).held(location) as held:
        yield _opened(held.files, cached=cached), held


def open_checkpoint(path: str, integrity: Integrity = XXH3) -> Checkpoint:
    """The checkpoint in the directory path. Raises UsageError, DamagedError or OSError, naming the file."""
    return _opened(open_files(_location(path, integrity), integrity))


def _location(path: str, integrity: Integrity) -> str:
    path = real(path)
    base = os.path.basename(path)
    ours = parse_dirname(base) or parse_partial_dirname(base) or base.startswith(TRASH_PREFIX)
    files = open_files(path, integrity)
    what = ""
    try:
        what = "" if ours or has_records(files.names()) else "is no checkpoint's directory"
    except FileNotFoundError:
        what = "does not exist"
    except NotADirectoryError:
        what = "is no checkpoint's directory"
    if what:
        raise UsageError(f"{path} {what}", hint=where_checkpoints_are(path))
    return path


def _opened(files: StoredFiles, *, cached: bool = True) -> Checkpoint:
    """cached: parity's records are read as OpenFiles does it."""
    found = _with_votes(files, open_sound(files, RECORDS))  # what else is wrong is to be mended
    with OpenFiles(files, cached=cached) as opened:
        _find_sets(found, opened)
    return found


def _with_votes(files: StoredFiles, manifest: Manifest) -> Checkpoint:
    read = together(partial(_vote, files, manifest), manifest.votes)
    votes = [vote for vote in read if not isinstance(vote, DamagedError)]
    found = Checkpoint(files, manifest, votes, {record.rank: record for record in one_record_each(votes)})
    for ref, vote in zip(manifest.votes, read, strict=True):
        if isinstance(vote, DamagedError):
            where, ranks = files.where(manifest.place_of(ref)), set(ref.ranks) - found.records.keys()
            what = vote.message.removeprefix(f"{where}: ")
            if ranks:
                what += f"; nothing else says what the images of {named_ranks(ranks)} should be"
            found.lost.append(Lost(where, what, sorted(ranks)))
    return found


def _vote(files: StoredFiles, manifest: Manifest, ref: VoteRef) -> Vote | DamagedError:
    """The vote, or what is wrong with it. Raises OSError, and IntegrityError: of the others nothing can be said."""
    try:
        return read_vote_of(files, manifest, ref)
    except IntegrityError:
        raise
    except DamagedError as error:
        return error


def _find_sets(checkpoint: Checkpoint, opened: OpenFiles) -> None:
    by_set: dict[str, dict[int, ParityRecord]] = {}
    for file in checkpoint.parity:
        name, _, index = file.name.removesuffix(".parity").partition("-")
        by_set.setdefault(name, {})[int(index)] = file
    for name, files in sorted(by_set.items()):
        records: dict[int, Record] = {}
        for member, file in files.items():
            try:
                record = read_record(opened, file)
            except (OSError, EOFError, DamagedError):
                continue
            if (set_name(record.parity_chunk), record.parity_chunk.index) == (name, member):
                records[member] = record
        if not records:
            where = map(checkpoint.files.where, (file.place for file in files.values()))
            checkpoint.lost += [Lost(path, "no parity of its set can be read") for path in where]
            continue
        parity_chunk = next(iter(records.values())).parity_chunk
        stranger = _stranger(parity_chunk, checkpoint) or _misfit(parity_chunk, files)
        if stranger:
            checkpoint.notes.append(
                f"{checkpoint.files.where(SETS_DIR)}: the parity {name} is of other bytes: {stranger}"
            )
            continue
        checkpoint.sets.append(Set(name, parity_chunk, files, records))


def _misfit(parity_chunk: ParityChunk, files: dict[int, ParityRecord]) -> str:
    """Why the votes cannot be right about the sizes of the set's files; empty when they can.

    A size that nothing but one record says would be made and read: each must be what the members' images come to.
    """
    nbytes = code_of(parity_chunk).parity_nbytes
    for member, file in files.items():
        if member >= len(parity_chunk.columns) or file.nbytes != nbytes:
            return f"{file.name} is said to have {file.nbytes} bytes, and has {nbytes} by what it is of"
    return ""


def read_record(opened: OpenFiles, file: ParityRecord) -> Record:
    """The record at the end of a parity file. Raises OSError, EOFError, DamagedError."""
    files, name = opened.files, file.place
    raw = bytearray(max(0, min(file.record_nbytes, files.size(name) - file.nbytes)))
    opened.read(name, file.nbytes, memoryview(raw))
    return decode_record(bytes(raw), file.nbytes, file.record_digest, files.where(name), files.integrity)


def _stranger(parity_chunk: ParityChunk, checkpoint: Checkpoint) -> str:
    """Why the parity chunk is not of what the votes list; empty when it is. Of a rank without a vote it may be."""
    records, integrity = checkpoint.records, checkpoint.files.integrity
    if parity_chunk.save != checkpoint.manifest.save:
        return f"of {parity_chunk.save}"
    for column in parity_chunk.columns:
        for seal in column.seals:
            record = records.get(seal.rank)
            if seal.rank >= checkpoint.manifest.world_size or (record and not _fits(seal, record, integrity)):
                return f"the image of rank {seal.rank} differs"
    return ""


def _fits(seal: Seal, record: FileRecord, integrity: Integrity) -> bool:
    """Whether the record's image and tail are the segment's that was sealed."""
    if (seal.layout_nbytes, seal.leaves_nbytes) != (len(joined(record.layout)), len(record.leaves)):
        return False
    said = (seal.image_nbytes, seal.table_digest, seal.layout_digest, seal.leaves_digest, seal.parts, seal.raw)
    found = (
        record.nbytes,
        integrity.digest(record.digests, Purpose.TABLE),
        integrity.digest(joined(record.layout), Purpose.LAYOUT),
        integrity.digest(record.leaves, Purpose.LEAVES),
        record.parts,
        record.raw,
    )
    return said == found


def tails(checkpoint: Checkpoint, wanted: Set) -> tuple[dict[int, bytes], list[int]]:
    """The tail of each segment of the set as it lay in its slot, and the ranks whose plain leaves are not known.

    Its vote has everything: of a rank without one there is no tail.
    """
    found, unknown = {}, []
    for column in wanted.parity_chunk.columns:
        for seal in column.seals:
            record = checkpoint.records.get(seal.rank)
            if record is None:
                continue
            tail = record.digests + joined(record.layout) + record.leaves
            if seal.objects_nbytes:
                objects = _objects(checkpoint, seal)
                if not objects:
                    unknown.append(seal.rank)
                tail += objects
            found[seal.rank] = tail
    return found, unknown


def _objects(checkpoint: Checkpoint, seal: Seal) -> bytes:
    """Encoded as the rank encoded them; empty when no vote has them."""
    for vote in checkpoint.votes:
        if vote.stock_objects is not None:
            objects = encode_objects(vote.stock_objects)
            if checkpoint.files.integrity.digest(objects, Purpose.OBJECTS) == seal.objects_digest:
                return objects
    return b""
