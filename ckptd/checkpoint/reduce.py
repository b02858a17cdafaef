"""A committed checkpoint without a part of its state, such as the optimizer's: another directory takes its name.

What is kept is read through its digests, so that no damaged byte gets new ones. Blocks for as long as the store does.
"""

import contextlib
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import msgspec

from ckptd.checkpoint.export.read import AHEAD, SourceFile, VerifiedReader
from ckptd.checkpoint.reduced_image import Piece, Reduced, dropped_nbytes, reduced, reduced_objects
from ckptd.checkpoint.scrub import scrub_piece
from ckptd.shared.base.errors import CkptdError, DamagedError
from ckptd.shared.base.ids import SaveId
from ckptd.shared.format.committed import file_findings, identify, open_records, raise_first
from ckptd.shared.format.digest import BLOCK_NBYTES, blocks
from ckptd.shared.format.dropped import check_dropped, is_below
from ckptd.shared.format.integrity import Integrity
from ckptd.shared.format.layout import Extent, decode_leaves
from ckptd.shared.format.manifest import LINKED, UNPUBLISHED, FileRecord, Vote
from ckptd.shared.format.packed_layout import Known
from ckptd.shared.format.stored_records import StoredRecords
from ckptd.shared.protocol.scrubbing import BEGIN
from ckptd.store.interface import Again, Replacement, Store
from ckptd.system.units import format_size

_AT_ONCE = 2  # ranks: each has AHEAD + 2 blocks in memory
_MARGIN, _MARGIN_NBYTES = 64, 4 << 20  # of room: a part for records and padding, and so many bytes at least


class Part(NamedTuple):
    """What a checkpoint has below the keys. keys: those of them below which something is."""

    keys: list[str]
    nbytes: int  # of tensors


class Whole:
    """A committed checkpoint of a job, opened. Raises DamagedError or OSError, naming the file."""

    def __init__(self, store: Store, job: str, save: SaveId) -> None:
        self._store, self._job, self._save = store, job, save
        self._files = store.files(job).below(save.dirname)
        self._manifest = identify(self._files, job=job, save=save).manifest
        self._records = open_records(self._files, job=job, save=save)
        raise_first(file_findings(self._files, self._records))

    def part(self, keys: Sequence[str]) -> Part:
        """What dropping these would take. Raises CkptdError for one that must stay whole, with the reason."""
        names = self._files.names()
        if UNPUBLISHED in names or LINKED in names:
            raise CkptdError("a trainer's directory has links to it, or is to get them: it stays whole")
        if self._records[0].raw:
            raise CkptdError("it has a trainer's own files, of which ckptd knows no parts: it stays whole")
        found: set[str] = set()
        nbytes = 0
        for rank, record in enumerate(self._records):
            layout = self._records.layout(rank)
            there = [*layout.paths, *decode_leaves(record.leaves, where=self._files.where(record.name)).leaves]
            found.update(key for key in keys if any(is_below(name, [key]) for name in there))
            nbytes += dropped_nbytes(layout, keys)
        return Part([key for key in keys if key in found], nbytes)

    def drop(self, keys: Sequence[str], writer: str) -> str:
        """The checkpoint without what is below the keys takes its place. It is whole after a CkptdError or OSError.

        Empty, or what is left of the whole one. Its parity on the store goes, too. Another process may do the same at
        once: the one that is ready later fails.
        """
        part = self.part(keys)
        check_dropped({*self._records.manifest.dropped, *keys})
        self._check_room(self._records.manifest.nbytes - part.nbytes)
        with self._store.made_again(self._job, self._save, self._manifest) as again:
            with ThreadPoolExecutor(_AT_ONCE) as pool:
                known = Known()
                made = list(pool.map(lambda rank: self._written(rank, keys, again, known), range(len(self._records))))
            again.seal(_votes(self._records, made, keys), writer)
            self._read_back(again)
            return again.take_its_place()

    def _check_room(self, nbytes: int) -> None:
        """Raises CkptdError where the store has none for what stays, beside what is there."""
        need, (free, _) = nbytes + max(nbytes // _MARGIN, _MARGIN_NBYTES), self._store.space()
        if need > free:
            raise CkptdError(
                f"what stays is written beside the whole one and needs {format_size(need)}, the store has "
                f"{format_size(free)} free",
                hint="free space on the store; retention alone, without --drop, needs none",
            )

    def _read_back(self, again: Again) -> None:
        """All of it is read as readers do, past the page cache. Raises DamagedError, or as open_records does."""
        open_records(again.files, job=self._job, save=self._save)
        read = scrub_piece(again.files.location, BEGIN, sys.maxsize, self._store.integrity)
        if read.problems or read.gone:
            what = read.problems[0] if read.problems else f"{again.files.location} is gone"
            raise DamagedError(
                f"what was written is not what is read, so the checkpoint stays whole: {what}",
                hint="is the store's file system well? then again",
            )

    def _written(self, rank: int, keys: Sequence[str], again: Again, known: Known) -> FileRecord:
        old = self._records[rank]
        new = reduced(old, self._records.layout(rank), keys, self._save, known)
        source = SourceFile(self._files.where(old.name), old.nbytes, old.digests, old.extents(), stored=self._files)
        with contextlib.ExitStack() as made:
            reader = made.enter_context(VerifiedReader([source], AHEAD + 2))
            files = []
            for extent in new.record.extents():
                file = again.replacement(extent.name, extent.nbytes)
                made.callback(file.close)
                files.append((extent, file))
            digests = _copy(new, reader, files, self._store.integrity)
            for _, file in files:
                file.publish()
        return msgspec.structs.replace(new.record, digests=digests)


def _copy(
    new: Reduced, reader: VerifiedReader, files: Sequence[tuple[Extent, Replacement]], integrity: Integrity
) -> bytes:
    """Writes the image, block by block. Returns the digests."""
    digests = []
    with memoryview(bytearray(BLOCK_NBYTES)) as buffer:
        pending = iter(new.pieces)
        piece = next(pending, None)
        for start, stop in blocks(new.record.nbytes):
            while piece is not None and piece.start < stop:
                _put(piece, start, stop, buffer, reader)
                if piece.start + piece.nbytes > stop:
                    break
                piece = next(pending, None)
            with buffer[: stop - start] as block:
                digests.append(integrity.digest(block))
                for extent, file in files:
                    first, end = max(start, extent.start), min(stop, extent.start + extent.nbytes)
                    if first < end:
                        file.write(block[first - start : end - start], first - extent.start)
    return b"".join(digests)


def _put(piece: Piece, start: int, stop: int, block: memoryview, reader: VerifiedReader) -> None:
    """The bytes of a piece that lie in the block from start to stop."""
    first, end = max(start, piece.start), min(stop, piece.start + piece.nbytes)
    skip = first - piece.start
    if piece.data:
        block[first - start : end - start] = piece.data[skip : skip + end - first]
        return
    at = first - start
    for view in reader.read(0, piece.at + skip, end - first):
        block[at : at + len(view)] = view
        at += len(view)


def _votes(records: StoredRecords, made: Sequence[FileRecord], keys: Sequence[str]) -> list[Vote]:
    """The votes of the nodes, for these records. Their parity is of other bytes: it is not in them."""
    found = []
    for vote, ref in zip(records.votes(), records.manifest.votes, strict=True):
        found.append(
            msgspec.structs.replace(
                vote, files=[made[rank] for rank in ref.ranks], parity=None,
                stock_objects=reduced_objects(vote.stock_objects, keys),
                dropped=tuple(sorted({*vote.dropped, *keys})),
            )
        )  # fmt: skip
    return found
