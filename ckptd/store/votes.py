"""The votes of an unfinished checkpoint, and the files that they are for, several at once. Changes nothing."""

from functools import partial

from ckptd.shared.base.errors import DamagedError
from ckptd.shared.base.ids import SaveId
from ckptd.shared.format.committed import Finding, file_findings, parity_findings, raise_first, vote_places
from ckptd.shared.format.integrity import Purpose
from ckptd.shared.format.manifest import MAX_RECORD_NBYTES, FileRecord, Vote, Voted, decode_vote, one_record_each
from ckptd.shared.format.set_places import voter
from ckptd.shared.format.stored_files import StoredFiles
from ckptd.store.together import Alive, silent, together


def voting_places(unfinished: StoredFiles) -> list[str]:
    """Of one vote of each node that has any, readable or not, by node: of two the one of its later set."""
    newest = {_node_of(place): place for place in sorted(vote_places(unfinished))}
    return [newest[node] for node in sorted(newest)]


def _node_of(place: str) -> str:
    return voter(place.rpartition("/")[2])


def read_vote(unfinished: StoredFiles, job: str, save: SaveId, place: str) -> Voted:
    """The vote there. Raises OSError, or DamagedError naming the file if damaged or another's."""
    where = unfinished.where(place)
    raw = unfinished.read(place, MAX_RECORD_NBYTES)
    vote = decode_vote(raw, where=where, integrity=unfinished.integrity)
    if (vote.place, vote.job, vote.save) != (place, job, save):
        raise DamagedError(f"{where}: is the vote of node {vote.node!r} for job {vote.job!r}, {vote.save}")
    return Voted(vote, len(raw), unfinished.integrity.digest(raw, Purpose.VOTE_FILE))


def read_votes(unfinished: StoredFiles, job: str, save: SaveId, alive: Alive = silent) -> list[Voted]:
    """One of each node, by node. Raises as read_vote does, for the first that it must."""
    return together(partial(read_vote, unfinished, job, save), voting_places(unfinished), alive)


def check_files(unfinished: StoredFiles, votes: list[Vote], alive: Alive = silent) -> None:
    """Raises DamagedError unless all that was voted for is there, by what every reader will look at."""

    def look(record: FileRecord) -> list[Finding]:
        return list(file_findings(unfinished, [record]))

    for found in together(look, one_record_each(votes), alive):
        raise_first(found)
    raise_first(parity_findings(unfinished, sorted({vote.parity for vote in votes if vote.parity is not None})))
