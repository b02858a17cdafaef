"""The index of a checkpoint's records, made from the votes."""

from collections.abc import Iterable

from ckptd.shared.base.errors import DamagedError
from ckptd.shared.format.manifest import Vote, one_record_each
from ckptd.shared.format.record_index import Record, encode_index
from ckptd.shared.format.together import Alive, silent


def index_of(votes: Iterable[Vote], alive: Alive = silent) -> bytes | None:
    """Its file; None where readers can as well read all votes: of one node, or of a trainer's files."""
    votes = list(votes)
    records = one_record_each(votes)
    if len(votes) == 1 or any(record.raw for record in records):
        return None
    said = (Record(record.rank, record.nbytes, record.layout, record.leaves) for record in records)
    try:
        return encode_index(said, alive)
    except DamagedError:
        return None  # a layout that nobody can read is no reason to refuse the data
