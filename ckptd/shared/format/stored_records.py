"""The records of a committed checkpoint's images: read from the votes that its manifest pins, each when it is needed.

A reader of one rank opens one vote, however many ranks the job has.
"""

import bisect
import errno
from collections.abc import Iterable, Iterator, Sequence
from typing import overload

import msgspec

from ckptd.shared.base.errors import DamagedError, IntegrityError
from ckptd.shared.format.digest import digest
from ckptd.shared.format.integrity import Purpose
from ckptd.shared.format.layout import Layout
from ckptd.shared.format.manifest import (
    MAX_RECORD_NBYTES,
    FileRecord,
    IndexFile,
    Manifest,
    Vote,
    Voted,
    VoteRef,
    decode_vote,
    layout_of,
    one_record_each,
)
from ckptd.shared.format.packed_layout import Known
from ckptd.shared.format.record_index import RecordIndex, decode_index
from ckptd.shared.format.runs import pairs
from ckptd.shared.format.stored_files import StoredFiles
from ckptd.shared.format.together import together

# What an error says of the directory, and not of the machine that reads it.
OF_THE_DIRECTORY = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EINVAL, errno.EFBIG})


class StoredRecords(Sequence[FileRecord]):
    """By rank. Reading one blocks for as long as the store does, and raises DamagedError or OSError, naming the file.

    Keeps what it has read. For several threads: two of them may read one vote twice. Reading all of them raises
    DamagedError also where two votes differ about a rank.
    """

    def __init__(self, files: StoredFiles, manifest: Manifest) -> None:
        self.files = files
        self.manifest = manifest
        runs = sorted((*run, number) for number, ref in enumerate(manifest.votes) for run in pairs(ref.runs))
        self._firsts = [first for first, *_ in runs]
        self._numbers = [number for *_, number in runs]
        self._votes: dict[int, Vote] = {}
        self._records: dict[int, FileRecord] = {}
        self._known = Known()
        self._index: RecordIndex | None = None
        self._sizes: Sequence[int] | None = None

    def __len__(self) -> int:
        return self.manifest.world_size

    @overload
    def __getitem__(self, rank: int) -> FileRecord: ...
    @overload
    def __getitem__(self, rank: slice) -> list[FileRecord]: ...
    def __getitem__(self, rank: int | slice) -> FileRecord | list[FileRecord]:
        if isinstance(rank, slice):
            return [self[one] for one in range(*rank.indices(len(self)))]
        if not 0 <= rank < len(self):
            raise IndexError(rank)
        if rank not in self._records:
            self.vote_for(rank)
        return self._records[rank]

    def __iter__(self) -> Iterator[FileRecord]:
        """Of all ranks: their votes are read several at once."""
        together(self._vote, [number for number in range(len(self.manifest.votes)) if number not in self._votes])
        try:
            one_record_each(self.votes())
        except DamagedError as error:
            raise DamagedError(f"{self.files.location}: {error.message}", hint=_hint(self.files)) from error
        return (self[rank] for rank in range(len(self)))

    def layout(self, rank: int) -> Layout:
        """Of the rank's image. Raises as reading its record does."""
        record = self[rank]
        return layout_of(record, len(self), where=self.files.where(record.name), known=self._known)

    def fetch(self, ranks: Iterable[int]) -> None:
        """Reads the votes of these ranks' records that were not read yet, several at once. Raises as reading one does.

        Nothing may be read by other threads meanwhile.
        """
        together(self._vote, sorted({self._number_of(rank) for rank in ranks} - self._votes.keys()))

    @property
    def common(self) -> RecordIndex | None:
        """What the records have in common; None where it is not written: of one vote. Blocks at the first time.

        Raises DamagedError and OSError, naming the file: all that it says the records say too.
        """
        if self._index is None and self.manifest.index is not None:
            where = self.files.where(self.manifest.index.name)
            self._index = decode_index(index_bytes(self.files, self.manifest.index), len(self), where=where)
            self._sizes = self._index.sizes
        return self._index

    @property
    def proof(self) -> bytes:
        """16 bytes that are others for another checkpoint: the manifest pins all of it."""
        return digest(msgspec.msgpack.encode(self.manifest))

    @property
    def sizes(self) -> Sequence[int]:
        """Bytes of each image: of the index where that was read, else all votes are. Raises as reading all does."""
        if self._sizes is None:
            self._sizes = [record.nbytes for record in self]
        return self._sizes

    def vote_for(self, rank: int) -> Vote:
        """The vote from which the rank's record is read."""
        return self._vote(self._number_of(rank))

    def vote_at(self, number: int) -> Vote:
        """A vote by its place in the manifest. Raises as reading a record of it does."""
        return self._vote(number)

    def _number_of(self, rank: int) -> int:
        return self._numbers[bisect.bisect_right(self._firsts, rank) - 1]

    def votes(self) -> Iterator[Vote]:
        """All votes, by node."""
        return map(self._vote, range(len(self.manifest.votes)))

    def _vote(self, number: int) -> Vote:
        if number not in self._votes:
            ref = self.manifest.votes[number]
            vote = read_vote_of(self.files, self.manifest, ref)
            of = {record.rank: record for record in vote.files}
            self._records.update({rank: of[rank] for rank in ref.ranks})
            self._votes[number] = vote  # last: another thread that finds it finds its records
        return self._votes[number]


def index_bytes(files: StoredFiles, index: IndexFile) -> bytes:
    """The file of the index that a manifest pins. Raises DamagedError, OSError."""
    raw = files.read(index.name, index.nbytes)
    if (len(raw), files.integrity.digest(raw, Purpose.INDEX)) != (index.nbytes, index.digest):
        what = "is not the index that the manifest knows: the bytes are damaged or another's"
        raise DamagedError(f"{files.where(index.name)}: {what}", hint=_hint(files))
    return raw


def vote_bytes(files: StoredFiles, manifest: Manifest, ref: VoteRef) -> bytes:
    """The file of a vote, as it was when the manifest was made. Raises DamagedError, OSError."""
    place = manifest.place_of(ref)
    raw = files.read(place, ref.nbytes)
    if (len(raw), files.integrity.digest(raw, Purpose.VOTE_FILE)) != (ref.nbytes, ref.digest):
        raise DamagedError(f"{files.where(place)}: is not the vote that the manifest was made from", hint=_hint(files))
    return raw


def _hint(files: StoredFiles) -> str:
    return f"see what else is wrong: ckptd verify {files.location}"


def read_vote_of(files: StoredFiles, manifest: Manifest, ref: VoteRef) -> Vote:
    """A vote that the manifest pins. Raises DamagedError, also for one that is of something else, and OSError."""
    where = files.where(manifest.place_of(ref))
    try:
        vote = decode_vote(vote_bytes(files, manifest, ref), where=where, integrity=files.integrity)
    except IntegrityError:
        raise
    except DamagedError as error:
        raise DamagedError(error.message, hint=error.hint or _hint(files)) from error
    except OSError as error:
        if error.errno not in OF_THE_DIRECTORY:
            raise
        what = "missing" if isinstance(error, FileNotFoundError) else error.strerror
        raise DamagedError(f"{where}: {what}", hint=_hint(files)) from error
    if misfit := misfit_of(vote, manifest, ref):
        raise DamagedError(f"{where}: {misfit}", hint=_hint(files))
    return vote


def read_vote_at(files: StoredFiles, place: str) -> Voted:
    """A vote that no manifest pins, by its place. Raises DamagedError, also for one of another place, and OSError."""
    where = files.where(place)
    raw = files.read(place, MAX_RECORD_NBYTES)
    vote = decode_vote(raw, where=where, integrity=files.integrity)
    found = Voted(vote, len(raw), files.integrity.digest(raw, Purpose.VOTE_FILE))
    if found.place != place:
        raise DamagedError(f"{where}: is the vote that belongs at {found.place}")
    return found


def misfit_of(vote: Vote, manifest: Manifest, ref: VoteRef) -> str:
    """Why the vote is none of the manifest's; empty when it is. Pure."""
    if (vote.node, vote.folder) != (ref.node, manifest.folders[ref.folder]):
        return f"is the vote of node {vote.node!r} in {vote.folder}"
    said = (vote.store_id, vote.job, vote.save, vote.world_size)
    if said != (manifest.store_id, manifest.job, manifest.save, manifest.world_size):
        return "a vote that the manifest does not know"
    ranks = [record.rank for record in vote.files]
    if len(set(ranks)) != len(ranks) or not set(ref.ranks) <= set(ranks):
        return "its files are not those of the manifest"
    return ""
