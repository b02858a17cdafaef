"""The votes of an unfinished checkpoint, and the files that they are for, several at once. Changes nothing."""

from functools import partial
from typing import NamedTuple

from ckptd.shared.base.errors import DamagedError
from ckptd.shared.base.ids import SaveId
from ckptd.shared.format.committed import Finding, file_findings, parity_findings, raise_first, vote_places
from ckptd.shared.format.manifest import FileRecord, Vote, Voted, cover, one_record_each
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


class NodeVotes(NamedTuple):
    """What one node says. unread: why those of its votes cannot be read that cannot."""

    votes: list[Voted]
    unread: list[DamagedError | OSError]


def read_node(unfinished: StoredFiles, job: str | None, save: SaveId | None, places: list[str]) -> NodeVotes:
    """Those of a node's votes that count, of the ones at these places that can be read. None takes any job, any save.

    Raises DamagedError, naming the rank, if two that can be read differ.
    """
    found: list[Voted] = []
    unread: list[DamagedError | OSError] = []
    for place in places:
        try:
            found.append(_read(unfinished, job, save, place))
        except (DamagedError, OSError) as error:  # others may say all of it
            unread.append(error)
    return NodeVotes(cover(found), unread)


def _read(unfinished: StoredFiles, job: str | None, save: SaveId | None, place: str) -> Voted:
    found = read_vote_at(unfinished, place)
    if job not in (None, found.vote.job) or save not in (None, found.vote.save):
        said = f"is the vote of node {found.vote.node!r} for job {found.vote.job!r}, {found.vote.save}"
        raise DamagedError(f"{unfinished.where(place)}: {said}")
    return found


def read_votes(unfinished: StoredFiles, job: str | None, save: SaveId | None, alive: Alive = silent) -> list[Voted]:
    """Those from which each rank is read, by node: the same for all committers that can read the same votes.

    A vote that cannot be read is not needed where others are for all ranks. Raises what is wrong with the first one
    otherwise, OSError or DamagedError, and as read_node. None takes any job, any save.
    """
    nodes = together(partial(read_node, unfinished, job, save), voting_places(unfinished), alive)
    votes = [voted for node in nodes for voted in node.votes]
    unread = [error for node in nodes for error in node.unread]
    ranks = {record.rank for voted in votes for record in voted.vote.files}
    if unread and (not votes or len(ranks) < votes[0].vote.world_size):
        raise unread[0]
    return votes


def check_files(unfinished: StoredFiles, votes: list[Vote], alive: Alive = silent) -> None:
    """Raises DamagedError unless all that was voted for is there, by what every reader will look at."""

    def look(record: FileRecord) -> list[Finding]:
        return list(file_findings(unfinished, [record]))

    for found in together(look, one_record_each(votes), alive):
        raise_first(found)
    raise_first(parity_findings(unfinished, sorted({vote.parity for vote in votes if vote.parity is not None})))
