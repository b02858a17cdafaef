"""What lies in a job's directory on the store: paths, what is committed, what is unfinished. Changes nothing."""

import os

import msgspec

from ckptd.filelayer import FileLayer
from ckptd.protocol.errors import CkptdError, DamagedError
from ckptd.protocol.ids import JobKey, SaveId, parse_dirname, parse_partial_dirname
from ckptd.protocol.manifest import (
    COMMITTED,
    MANIFEST,
    MAX_COMMITTED_NBYTES,
    MAX_RECORD_NBYTES,
    VOTES_DIR,
    Committed,
    Vote,
    decode_committed,
    decode_vote,
)

TRASH_PREFIX = ".trash-"
INCARNATIONS_DIR = ".incarnations"
_MAX_RANKS_LISTED = 4


class Place(msgspec.Struct, frozen=True):
    """The paths of one save on its store."""

    key: JobKey
    save: SaveId

    @property
    def job_dir(self) -> str:
        """Directory of the job: all its checkpoints."""
        return job_dir(self.key)

    @property
    def final(self) -> str:
        """Directory once committed."""
        return os.path.join(self.job_dir, self.save.dirname)

    @property
    def partial(self) -> str:
        """Hidden directory until the commit's rename."""
        return os.path.join(self.job_dir, self.save.partial_dirname)

    @property
    def votes(self) -> str:
        """Directory of the votes, in the hidden directory."""
        return os.path.join(self.partial, VOTES_DIR)


class CommittedEntry(msgspec.Struct, frozen=True):
    """A committed checkpoint and the directory it lies in."""

    committed: Committed
    dirname: str


class PartialEntry(msgspec.Struct, frozen=True, kw_only=True):
    """An unfinished checkpoint: finishable when its votes, all readable, cover each rank once; missing says why not."""

    save: SaveId
    voted: list[str]  # nodes
    damaged: list[str]  # what is wrong with each vote that cannot be read
    world_size: int | None = None
    missing: str = ""

    @property
    def finishable(self) -> bool:
        """Whether commit can be tried from the votes alone. It still checks that the files are there."""
        return not self.missing


class Scan(msgspec.Struct, frozen=True, tag="scan"):
    """All of one job on one store."""

    committed: list[CommittedEntry]  # newest first
    partials: list[PartialEntry]  # newest first
    problems: list[str]  # of entries that are neither, with what is wrong


def job_dir(key: JobKey) -> str:
    """Directory of a job's checkpoints."""
    return os.path.join(key.store, key.job)


def scan(fs: FileLayer, key: JobKey) -> Scan:
    """What the job has on the store; empty if the store or the job is not there.

    A checkpoint is committed if its name, COMMITTED and its manifest's size agree. Digests are verify's business.
    What cannot be read is a problem in the list, never an exception; what goes meanwhile, by retention or by a commit's
    rename, is not in it.
    """
    found = Scan([], [], [])
    try:
        names = fs.listdir(job_dir(key))
    except FileNotFoundError:
        return found
    except OSError as error:
        found.problems.append(str(error))
        return found
    for name in names:
        try:
            if parse_dirname(name) is not None:
                found.committed.append(_committed_entry(fs, key, name))
        except (CkptdError, OSError) as error:
            if not _is_gone(fs, key, name):
                found.problems.append(str(error))
    committed = {entry.committed.save for entry in found.committed}
    for save in filter(None, map(parse_partial_dirname, names)):
        entry = _partial_entry(fs, Place(key, save), save in committed)
        if entry.finishable or not _is_gone(fs, key, save.partial_dirname):
            found.partials.append(entry)
    found.committed.sort(key=lambda entry: entry.committed.save, reverse=True)
    found.partials.sort(key=lambda entry: entry.save, reverse=True)
    return found


def _is_gone(fs: FileLayer, key: JobKey, name: str) -> bool:
    """Whether a directory that was listed a moment ago is not there any more."""
    try:
        fs.listdir(os.path.join(job_dir(key), name))
    except FileNotFoundError:
        return True
    except OSError:
        pass  # it is there, and whatever is wrong with it is said already
    return False


def _committed_entry(fs: FileLayer, key: JobKey, name: str) -> CommittedEntry:
    path = os.path.join(job_dir(key), name)
    committed = read_committed(fs, path)
    if committed.job != key.job or committed.save.dirname != name or committed.save_id != committed.save.text:
        raise DamagedError(f"{path}: COMMITTED says job {committed.job!r}, {committed.save}: the name does not agree")
    nbytes = fs.size(os.path.join(path, MANIFEST))
    if nbytes != committed.manifest_nbytes:
        raise DamagedError(f"{path}/{MANIFEST}: {nbytes} bytes, COMMITTED says {committed.manifest_nbytes}")
    return CommittedEntry(committed, name)


def read_committed(fs: FileLayer, path: str) -> Committed:
    """The COMMITTED record of the directory path. Raises DamagedError or OSError."""
    where = os.path.join(path, COMMITTED)
    return decode_committed(fs.read_file(where, MAX_COMMITTED_NBYTES), where=where)


def committed_at(fs: FileLayer, place: Place) -> Committed | None:
    """The record at the save's final name, None if there is nothing. Raises DamagedError if another save lies there."""
    try:
        committed = read_committed(fs, place.final)
    except FileNotFoundError:
        return None
    if committed.save != place.save or committed.job != place.key.job:
        raise DamagedError(
            f"{place.final}: holds job {committed.job!r}, {committed.save}, not {place.save}",
            hint=f"move it away, then commit again: mv '{place.final}' '{place.final}.old'",
        )
    return committed


def vote_names(fs: FileLayer, place: Place) -> list[str]:
    """Nodes that have a vote file, readable or not; none if the save has no directory for them."""
    try:
        return [name for name in fs.listdir(place.votes) if not name.startswith(".")]
    except FileNotFoundError:
        return []


def read_vote(fs: FileLayer, place: Place, node: str) -> tuple[Vote, bytes]:
    """A node's vote and its file's content. Raises OSError, or DamagedError naming the file if damaged or another's."""
    where = os.path.join(place.votes, node)
    raw = fs.read_file(where, MAX_RECORD_NBYTES)
    vote = decode_vote(raw, where=where)
    if (vote.node, vote.job, vote.save) != (node, place.key.job, place.save):
        raise DamagedError(f"{where}: is the vote of node {vote.node!r} for job {vote.job!r}, {vote.save}")
    return vote, raw


def _partial_entry(fs: FileLayer, place: Place, committed: bool) -> PartialEntry:
    damaged: list[str] = []
    voted: list[str] = []
    worlds: set[int] = set()
    # Not the votes themselves: of a large job they fill gigabytes. Whether two agree, the commit sees.
    ranks: list[int] = []
    try:
        for node in vote_names(fs, place):
            try:
                vote, _ = read_vote(fs, place, node)
            except (CkptdError, OSError) as error:
                damaged.append(str(error))
                continue
            voted.append(node)
            worlds.add(vote.world_size)
            ranks += [record.rank for record in vote.files]
    except OSError as error:
        damaged.append(str(error))
    return PartialEntry(
        save=place.save,
        voted=voted,
        damaged=damaged,
        world_size=max(worlds) if len(worlds) == 1 else None,
        missing="already committed" if committed else _missing(damaged, worlds, ranks),
    )


def _missing(damaged: list[str], worlds: set[int], ranks: list[int]) -> str:
    if damaged:
        return damaged[0]
    if len(worlds) != 1:
        return f"votes disagree about the number of ranks: {sorted(worlds)}" if worlds else "no votes"
    absent = sorted(set(range(*worlds)) - set(ranks))
    if absent:
        dots = ", .." if len(absent) > _MAX_RANKS_LISTED else ""
        listed = ", ".join(map(str, absent[:_MAX_RANKS_LISTED])) + dots
        return f"{len(absent)} of {max(worlds)} ranks have no vote: {listed}"
    return ""
