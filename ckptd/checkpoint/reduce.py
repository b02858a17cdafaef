"""A committed checkpoint without a part of its state, such as the optimizer's: another directory takes its name.

What is kept is read through its digests, so that no damaged byte gets new ones. Blocks for as long as the store does.
"""

import contextlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import msgspec

from ckptd.checkpoint.export.read import AHEAD, SourceFile, VerifiedReader
from ckptd.checkpoint.reduced_image import Piece, Reduced, dropped_nbytes, reduced, reduced_objects
from ckptd.shared.base.errors import CkptdError
from ckptd.shared.base.ids import SaveId
from ckptd.shared.format.committed import file_findings, open_records, raise_first
from ckptd.shared.format.digest import BLOCK_NBYTES, blocks
from ckptd.shared.format.dropped import is_below
from ckptd.shared.format.integrity import Integrity
from ckptd.shared.format.layout import Extent, decode_leaves
from ckptd.shared.format.manifest import LINKED, UNPUBLISHED, FileRecord, Vote
from ckptd.shared.format.packed_layout import Known
from ckptd.shared.format.stored_records import StoredRecords
from ckptd.store.interface import Held, Replacement, Store

_AT_ONCE = 2  # ranks: each has AHEAD + 2 blocks in memory


class Part(NamedTuple):
    """What a checkpoint has below the keys. keys: those of them below which something is."""

    keys: list[str]
    nbytes: int  # of tensors


class Whole:
    """A committed checkpoint of a job, opened. Raises DamagedError or OSError, naming the file."""

    def __init__(self, store: Store, job: str, save: SaveId) -> None:
        self._store, self._job, self._save = store, job, save
        self._files = store.files(job).below(save.dirname)
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

    def drop(self, keys: Sequence[str], writer: str) -> None:
        """The checkpoint without what is below the keys takes its place. It is whole after a CkptdError or OSError.

        Its parity on the store goes, too. Another process may do the same at once: one of them fails.
        """
        location = self._store.begin_again(self._job, self._save)
        try:
            with self._store.held(location) as held, ThreadPoolExecutor(_AT_ONCE) as pool:
                known = Known()
                made = list(pool.map(lambda rank: self._written(rank, keys, held, known), range(len(self._records))))
            for vote in _votes(self._records, made, keys):
                self._store.put_vote(self._job, vote)
            self._store.take_its_place(self._job, self._save, writer)
        except BaseException:
            with contextlib.suppress(CkptdError, OSError):
                self._store.discard(self._job, self._save)
            raise

    def _written(self, rank: int, keys: Sequence[str], held: Held, known: Known) -> FileRecord:
        old = self._records[rank]
        new = reduced(old, self._records.layout(rank), keys, self._save, known)
        source = SourceFile(self._files.where(old.name), old.nbytes, old.digests, old.extents(), stored=self._files)
        with contextlib.ExitStack() as made:
            reader = made.enter_context(VerifiedReader([source], AHEAD + 2))
            files = []
            for extent in new.record.extents():
                file = held.replacement(extent.name, extent.nbytes)
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
