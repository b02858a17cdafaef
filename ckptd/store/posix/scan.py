"""What lies in a job's directory on the store: paths, what is committed, what is unfinished. Changes nothing."""

import contextlib
import itertools
import os
import re
import time
from collections.abc import Iterable, Iterator

import msgspec

from ckptd.shared.base.decoding import MALFORMED
from ckptd.shared.base.errors import CkptdError, DamagedError, IntegrityError, joined
from ckptd.shared.base.ids import (
    JobKey,
    SaveId,
    is_plausible,
    parse_dirname,
    parse_partial_dirname,
)
from ckptd.shared.format.committed import INCARNATIONS_DIR, identify
from ckptd.shared.format.manifest import LATEST, MAX_RECORD_NBYTES, VOTES_DIR, Committed, Vote, decode_vote
from ckptd.shared.stores.directory import DirectoryFiles
from ckptd.store.facts import CommittedEntry, IncarnationRecord, PartialEntry, Scan
from ckptd.system.files import FileLayer

_MAX_RANKS_LISTED = 4
_MAX_RECORD_NBYTES = 4096
_RECORD_RE = re.compile(r"^i([0-9]{8})$")


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


_record_decoder = msgspec.json.Decoder(IncarnationRecord)


def files_at(fs: FileLayer, path: str) -> DirectoryFiles:
    """The checkpoint in a directory, read and proved as the layer does."""
    return DirectoryFiles(path, fs.integrity, fs)


def job_dir(key: JobKey) -> str:
    """Directory of a job's checkpoints."""
    return os.path.join(key.store, key.job)


def scan(fs: FileLayer, key: JobKey) -> Scan:
    """What the job has on the store; empty if the store or the job is not there.

    A checkpoint is committed if its name, the job's, COMMITTED and its manifest's size agree. The rest is verify's.
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
    found.strange.extend(_strange_markers(fs, key))
    for name in names:
        parsed = parse_dirname(name)
        try:
            if parsed is not None:
                found.committed.append(_committed_entry(fs, key, name))
        except (CkptdError, OSError) as error:
            if not _is_gone(fs, key, name):
                plausible = parsed is None or is_plausible(parsed[1], time.time())
                (found.problems if plausible else found.strange).append(
                    _text(error) if plausible else _strange(key, name)
                )
    found.problems.extend(_renamed(fs, key, [] if found.committed else names))
    committed = {entry.committed.save for entry in found.committed}
    for save in filter(None, map(parse_partial_dirname, names)):
        entry = _partial_entry(fs, Place(key, save), save in committed)
        if not (entry.finishable or is_plausible(save.incarnation, time.time())):
            found.strange.append(_strange(key, save.partial_dirname))
        elif entry.finishable or not _is_gone(fs, key, save.partial_dirname):
            found.partials.append(entry)
    found.records.extend(records_of(fs, key))
    found.committed.sort(key=lambda entry: entry.committed.save.listed, reverse=True)
    found.partials.sort(key=lambda entry: entry.save.listed, reverse=True)
    return found


def _renamed(fs: FileLayer, key: JobKey, names: Iterable[str]) -> Iterator[str]:
    """What lies there whole, and under a name that no checkpoint has."""
    for name in names:
        path = os.path.join(job_dir(key), name)
        if name != LATEST and not name.startswith(".") and parse_dirname(name) is None:
            with contextlib.suppress(OSError, CkptdError):
                proper = f"{job_dir(key)}/{identify(files_at(fs, path)).save.dirname}"
                yield joined(
                    f"{path} is a checkpoint that was renamed, and is passed over",
                    f"mv {path} {proper}; to keep it whatever retention does: ckptd pin {proper}",
                )


def record_numbers(fs: FileLayer, key: JobKey, known: int = 0) -> list[int]:
    """Numbers that were taken, readable record or not, lowest first.

    None that no life of the job can have had: it is a stranger's. known: some life has had those up to it.
    """
    found = [number for _, number in _numbered(fs, key)]
    return sorted(number for number in found if number <= known or is_plausible(number, time.time()))


def _numbered(fs: FileLayer, key: JobKey) -> list[tuple[str, int]]:
    """What lies among the records, with its number."""
    try:
        names = fs.listdir(os.path.join(job_dir(key), INCARNATIONS_DIR))
    except FileNotFoundError:
        return []
    return [(name, int(match[1])) for name in names if (match := _RECORD_RE.match(name)) is not None]


def records_of(fs: FileLayer, key: JobKey, known: int = 0) -> list[IncarnationRecord]:
    """All incarnation records that can be read, lowest number first. One that is damaged says nothing."""
    found = []
    for number in record_numbers(fs, key, known):
        path = os.path.join(job_dir(key), INCARNATIONS_DIR, f"i{number:08d}")
        with contextlib.suppress(OSError, *MALFORMED):
            record = _record_decoder.decode(fs.read_file(path, _MAX_RECORD_NBYTES))
            if record.incarnation == number:
                found.append(record)
    return found


def _strange_markers(fs: FileLayer, key: JobKey) -> list[str]:
    with contextlib.suppress(OSError):
        strange = [name for name, number in _numbered(fs, key) if not is_plausible(number, time.time())]
        return [_strange(key, f"{INCARNATIONS_DIR}/{name}") for name in strange]
    return []


def _strange(key: JobKey, name: str) -> str:
    path = os.path.join(job_dir(key), name)
    return f"{path} has a number that no life of the job can have had: it is ignored; if it is nobody's, remove it"


def _text(error: Exception) -> str:
    if isinstance(error, IntegrityError) and error.hint:  # who has the key, or goes without, finds nothing wrong
        return f"{error.message}: {error.hint}"
    return str(error)


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
    return CommittedEntry(identify(files_at(fs, os.path.join(job_dir(key), name)), job=key.job), name)


def committed_dirs(fs: FileLayer, path: str) -> list[str]:
    """Names in a job's directory that a checkpoint can have, newest incarnation and step first; none without one."""
    try:
        names = fs.listdir(path)
    except FileNotFoundError:
        return []
    found = [(parsed[1], parsed[0], name) for name in names if (parsed := parse_dirname(name)) is not None]
    return [name for _, _, name in sorted(found, reverse=True)]


def committed_at(fs: FileLayer, place: Place) -> Committed | None:
    """The record at the save's final name, None if there is nothing. Raises DamagedError if another save lies there."""
    try:
        return identify(files_at(fs, place.final), job=place.key.job, save=place.save)
    except (OSError, DamagedError):
        if _is_gone(fs, place.key, place.save.dirname):
            return None
        raise


def save_at(fs: FileLayer, key: JobKey, dirname: str) -> SaveId | None:
    """Which save lies there; None when that cannot be read, and whoever opens it is told why."""
    try:
        return identify(files_at(fs, os.path.join(job_dir(key), dirname)), job=key.job).save
    except (OSError, CkptdError):
        return None


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
    vote = decode_vote(raw, where=where, integrity=fs.integrity)
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
    (world_size,), voted = worlds, set(ranks)
    count = world_size - sum(rank < world_size for rank in voted)  # no list of ranks on the word of one vote
    if count:
        some = itertools.islice((rank for rank in range(world_size) if rank not in voted), _MAX_RANKS_LISTED)
        listed = ", ".join(map(str, some)) + (", .." if count > _MAX_RANKS_LISTED else "")
        return f"{count} of {world_size} ranks have no vote: {listed}"
    return ""
