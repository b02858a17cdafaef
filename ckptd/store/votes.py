"""The votes of an unfinished checkpoint, and the files that they are for, several at once. Changes nothing."""

from functools import partial

from ckptd.shared.base.errors import DamagedError
from ckptd.shared.base.ids import SaveId
from ckptd.shared.format.committed import Finding, file_findings, parity_findings, raise_first, vote_places
from ckptd.shared.format.manifest import FileRecord, Vote, Voted, best_of, one_record_each
from ckptd.shared.format.set_places import epoch_of, voter
from ckptd.shared.format.stored_files import StoredFiles
from ckptd.shared.format.stored_records import read_vote_at
from ckptd.shared.format.together import Alive, silent, together


def voting_places(unfinished: StoredFiles) -> list[list[str]]:
    """Of all votes of the last epoch of each node that has any, readable or not, by node."""
    found: dict[str, dict[int, list[str]]] = {}
    for place in vote_places(unfinished):
        _, folder, name = place.split("/")
        found.setdefault(voter(name), {}).setdefault(epoch_of(folder), []).append(place)
    return [by_epoch[max(by_epoch)] for _, by_epoch in sorted(found.items())]


def read_vote(unfinished: StoredFiles, job: str, save: SaveId, places: list[str]) -> Voted:
    """That of a node's votes which counts, of those at these places that can be read.

    Raises OSError, or DamagedError naming the file if none can be read, or one is another's, or two differ.
    """
    found, damaged = [], []
    for place in places:
        try:
            found.append(_read(unfinished, job, save, place))
        except DamagedError as error:  # the node voted again: what it says now is enough
            damaged.append(error)
    if not found:
        raise damaged[0]
    return best_of(found)


def _read(unfinished: StoredFiles, job: str, save: SaveId, place: str) -> Voted:
    found = read_vote_at(unfinished, place)
    if (found.vote.job, found.vote.save) != (job, save):
        said = f"is the vote of node {found.vote.node!r} for job {found.vote.job!r}, {found.vote.save}"
        raise DamagedError(f"{unfinished.where(place)}: {said}")
    return found


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
