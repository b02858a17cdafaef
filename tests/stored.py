"""The records of a committed checkpoint, by its directory."""

import os

from ckptd.shared.format.committed import open_records
from ckptd.shared.format.digest import digest
from ckptd.shared.format.integrity import XXH3, Integrity, Purpose
from ckptd.shared.format.manifest import ParityRecord, Vote, Voted, encode_record
from ckptd.shared.format.stored_records import StoredRecords
from ckptd.shared.stores.kinds import open_files


def records_of(final: str | os.PathLike[str], integrity: Integrity = XXH3) -> StoredRecords:
    """Of all its images, by rank."""
    return open_records(open_files(str(final), integrity))


def parity_of(final: str | os.PathLike[str], integrity: Integrity = XXH3) -> list[ParityRecord]:
    """Of all its parity, by place."""
    return sorted(vote.parity for vote in records_of(final, integrity).votes() if vote.parity is not None)


def voted(vote: Vote, integrity: Integrity = XXH3) -> Voted:
    """The vote as a commit reads it."""
    raw = encode_record(vote, integrity)
    return Voted(vote, len(raw), integrity.digest(raw, Purpose.VOTE_FILE))


class Listed(list):
    """The records of a checkpoint that nobody committed, by rank. files: where its images lie."""

    files = None
    common = None

    @property
    def sizes(self):
        """As StoredRecords."""
        return [record.nbytes for record in self]

    @property
    def proof(self):
        """As StoredRecords."""
        return digest(b"".join(record.digests for record in self))
