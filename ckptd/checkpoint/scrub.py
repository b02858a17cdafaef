"""A committed checkpoint read again piece by piece, past the page cache: each piece is checked as ``verify`` does it.

Where a piece ends is a ``Place``, from which the next one continues, in another process too. A checkpoint that is
removed meanwhile is no finding, nor is one in whose place another one is put, nor a store that does not answer.
"""

from collections.abc import Callable
from typing import NamedTuple

from ckptd.checkpoint.report import Problem, Report, ignore
from ckptd.checkpoint.verify import verify_records
from ckptd.checkpoint.verify_image import Whose, check_image
from ckptd.checkpoint.verify_parity import check_parity
from ckptd.shared.base.errors import CkptdError, DamagedError
from ckptd.shared.format.committed import open_records
from ckptd.shared.format.committed_record import MAX_COMMITTED_NBYTES
from ckptd.shared.format.digest import BLOCK_NBYTES, block_count
from ckptd.shared.format.integrity import Integrity
from ckptd.shared.format.manifest import COMMITTED
from ckptd.shared.format.packed_layout import Known
from ckptd.shared.format.stored_records import StoredRecords
from ckptd.shared.protocol.scrubbing import Place
from ckptd.shared.stores.kinds import open_files, real


class Piece(NamedTuple):
    """What was read. next: where to continue; None: that was the rest. gone: that checkpoint is not there any more."""

    next: Place | None
    nbytes: int
    problems: list[Problem]
    gone: bool = False


def scrub_piece(
    path: str, at: Place, nbytes: int, integrity: Integrity, progress: Callable[[int], None] = ignore
) -> Piece:
    """Checks about nbytes of the checkpoint at path, a block at least, from ``at`` on. Blocks; one block in memory.

    Raises OSError, CkptdError when the store does not answer: then nothing is known of what was to be read.
    """
    path = real(path)
    report = Report(path, integrity=integrity, cached=False, progress=progress)
    before = _what_is_there(path, integrity)
    after = _Pass(path, report).run(at, nbytes)
    if report.problems:
        now = _what_is_there(path, integrity)
        if not now or now != before:
            return Piece(None, report.nbytes, [], gone=True)
    return Piece(after, report.nbytes, report.problems)


def _what_is_there(path: str, integrity: Integrity) -> bytes:
    """COMMITTED, with the manifest's digest, or why it cannot be read; empty: no directory. Removals take that first.

    Raises OSError: then the store is what is wrong.
    """
    files = open_files(path, integrity)
    try:
        files.names()
    except FileNotFoundError:
        return b""
    try:
        return files.read(COMMITTED, MAX_COMMITTED_NBYTES)
    except OSError as error:
        return str(error).encode()


class _Pass:
    """Parts of a checkpoint: 0 all records, then each rank's image, then the parity of each vote."""

    def __init__(self, path: str, report: Report) -> None:
        self._path, self._report = path, report

    def run(self, at: Place, nbytes: int) -> Place | None:
        """The place after about nbytes; None: that was all."""
        stop = self._report.nbytes + max(1, nbytes)
        if at.part == 0:
            if verify_records(self._path, self._report) is None:
                return None
            at = Place(1, 0)
        try:
            records = open_records(open_files(self._path, self._report.integrity))
        except (CkptdError, OSError) as error:
            self._unopened(error)
            return None
        parts = 1 + len(records) + len(records.manifest.votes)
        while at.part < parts and self._report.nbytes < stop:
            count = max(1, (stop - self._report.nbytes) // BLOCK_NBYTES)
            at = self._read(records, at, count)
        return at if at.part < parts else None

    def _unopened(self, error: CkptdError | OSError) -> None:
        """Has been said with the first piece, unless it was damaged since."""
        where = self._path
        if not self._report.problems:
            self._report.problem(where, str(error).removeprefix(f"{where}: "))

    def _read(self, records: StoredRecords, at: Place, count: int) -> Place:
        span, rank, before = range(at.block, at.block + count), at.part - 1, self._report.nbytes
        try:
            nbytes = self._image(records, rank, span) if rank < len(records) else self._parity(records, at, span)
        except DamagedError as error:  # of a vote
            nbytes = 0
            if not any(problem.what in str(error) for problem in self._report.problems):
                self._report.problem(self._path, error.message.removeprefix(f"{self._path}: "))
        ends = span.stop >= block_count(nbytes) or self._report.nbytes == before  # what cannot be read is said
        return Place(at.part + 1, 0) if ends else Place(at.part, span.stop)

    def _image(self, records: StoredRecords, rank: int, span: range) -> int:
        record, manifest = records[rank], records.manifest
        check_image(records.files, record, Whose(manifest.save, len(records), Known()), self._report, span)
        return record.nbytes

    def _parity(self, records: StoredRecords, at: Place, span: range) -> int:
        parity = records.vote_at(at.part - 1 - len(records)).parity
        if parity is None:
            return 0
        self._report.take(check_parity(records.files, [parity], span, cached=self._report.cached))
        return parity.nbytes
