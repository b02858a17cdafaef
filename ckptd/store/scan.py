"""What lies on a store, as any kind of store shows it: what is committed, what is unfinished. Changes nothing."""

import contextlib
import itertools
import re
import time
from collections.abc import Iterable, Iterator

import msgspec

from ckptd.shared.base.decoding import MALFORMED
from ckptd.shared.base.errors import CkptdError, DamagedError, IntegrityError, joined
from ckptd.shared.base.ids import SaveId, is_plausible, parse_dirname, parse_partial_dirname
from ckptd.shared.format.committed import INCARNATIONS_DIR, identify
from ckptd.shared.format.committed_record import Committed
from ckptd.shared.format.manifest import LATEST
from ckptd.shared.format.stored_files import StoredFiles
from ckptd.shared.format.together import together
from ckptd.store.facts import CommittedEntry, IncarnationRecord, PartialEntry, Scan
from ckptd.store.votes import read_node, voting_places

PINS_DIR = ".pins"
SUPERSEDED_DIR = ".superseded"
_MAX_RANKS_LISTED = 4
_MAX_RECORD_NBYTES = 4096
_RECORD_RE = re.compile(r"^i([0-9]{8})$")

_record_decoder = msgspec.json.Decoder(IncarnationRecord)


def scan(job: StoredFiles) -> Scan:
    """What the job has on the store; empty if the store or the job is not there.

    A checkpoint is committed if its name, the job's, COMMITTED and its manifest's size agree. The rest is verify's.
    What cannot be read is a problem in the list, never an exception; what goes meanwhile, by retention or by a commit's
    rename, is not in it.
    """
    found = Scan([], [], [])
    try:
        names = job.names()
    except FileNotFoundError:
        return found
    except OSError as error:
        found.problems.append(str(error))
        return found
    found.strange.extend(_strange_markers(job))
    for name in names:
        parsed = parse_dirname(name)
        try:
            if parsed is not None:
                found.committed.append(CommittedEntry(identify(job.below(name), job=name_of(job)), name))
        except (CkptdError, OSError) as error:
            if not _is_gone(job, name):
                plausible = parsed is None or is_plausible(parsed[1], time.time())
                (found.problems if plausible else found.strange).append(
                    _text(error) if plausible else _strange(job, name)
                )
    found.problems.extend(_renamed(job, [] if found.committed else names))
    committed = {entry.committed.save for entry in found.committed}
    for save in filter(None, map(parse_partial_dirname, names)):
        entry = _partial_entry(job, save, save in committed)
        if not (entry.finishable or is_plausible(save.incarnation, time.time())):
            found.strange.append(_strange(job, save.partial_dirname))
        elif entry.finishable or not _is_gone(job, save.partial_dirname):
            found.partials.append(entry)
    found.records.extend(records_of(job))
    found.committed.sort(key=lambda entry: entry.committed.save.listed, reverse=True)
    found.partials.sort(key=lambda entry: entry.save.listed, reverse=True)
    return found


def _renamed(job: StoredFiles, names: Iterable[str]) -> Iterator[str]:
    """What lies there whole, and under a name that no checkpoint has."""
    for name in names:
        path = job.where(name)
        if name != LATEST and not name.startswith(".") and parse_dirname(name) is None:
            with contextlib.suppress(OSError, CkptdError):
                proper = job.where(identify(job.below(name)).save.dirname)
                yield joined(
                    f"{path} is a checkpoint that was renamed, and is passed over",
                    f"mv {path} {proper}; to keep it whatever retention does: ckptd pin {proper}",
                )


def record_numbers(job: StoredFiles, known: int = 0) -> list[int]:
    """Numbers that were taken, readable record or not, lowest first.

    None that no run of the job can have had: it is a stranger's. known: some run has had those up to it.
    """
    found = [number for _, number in _numbered(job)]
    return sorted(number for number in found if number <= known or is_plausible(number, time.time()))


def _numbered(job: StoredFiles) -> list[tuple[str, int]]:
    """What lies among the records, with its number."""
    try:
        names = job.names(INCARNATIONS_DIR)
    except FileNotFoundError:
        return []
    return [(name, int(match[1])) for name in names if (match := _RECORD_RE.match(name)) is not None]


def record_name(number: int) -> str:
    """Of the record of a number, in the job's location."""
    return f"{INCARNATIONS_DIR}/i{number:08d}"


def records_of(job: StoredFiles, known: int = 0) -> list[IncarnationRecord]:
    """All incarnation records that can be read, lowest number first. One that is damaged says nothing."""
    found = []
    for number in record_numbers(job, known):
        with contextlib.suppress(OSError):
            found.append(record_in(job.read(record_name(number), _MAX_RECORD_NBYTES), number))
    return [record for record in found if record is not None]


def record_in(content: bytes, number: int) -> IncarnationRecord | None:
    """The record of the number, None where it is damaged."""
    with contextlib.suppress(*MALFORMED):
        record = _record_decoder.decode(content)
        return record if record.incarnation == number else None
    return None


def _strange_markers(job: StoredFiles) -> list[str]:
    with contextlib.suppress(OSError):
        strange = [name for name, number in _numbered(job) if not is_plausible(number, time.time())]
        return [_strange(job, f"{INCARNATIONS_DIR}/{name}") for name in strange]
    return []


def _strange(job: StoredFiles, name: str) -> str:
    what = "has a number that no run of the job can have had: it is ignored; if it is nobody's, remove it"
    return f"{job.where(name)} {what}"


def _text(error: Exception) -> str:
    if isinstance(error, IntegrityError) and error.hint:  # a reader with the key, or without any, finds nothing wrong
        return f"{error.message}: {error.hint}"
    return str(error)


def _is_gone(job: StoredFiles, name: str) -> bool:
    """Whether a directory that was listed a moment ago is not there any more."""
    try:
        job.names(name)
    except FileNotFoundError:
        return True
    except OSError:
        pass  # it is there, and whatever is wrong with it is said already
    return False


def name_of(job: StoredFiles) -> str:
    """The job's name."""
    return job.location.rpartition("/")[2]


def names_of(job: StoredFiles) -> list[str]:
    """Names that a checkpoint can have, newest incarnation and step first; none without the job."""
    try:
        names = job.names()
    except FileNotFoundError:
        return []
    found = [(parsed[1], parsed[0], name) for name in names if (parsed := parse_dirname(name)) is not None]
    return [name for _, _, name in sorted(found, reverse=True)]


def committed_at(job: StoredFiles, save: SaveId) -> Committed | None:
    """The record at the save's final name, None if there is nothing. Raises DamagedError if another save lies there."""
    try:
        return identify(job.below(save.dirname), job=name_of(job), save=save)
    except (OSError, DamagedError):
        if _is_gone(job, save.dirname):
            return None
        raise


def save_at(job: StoredFiles, dirname: str) -> SaveId | None:
    """The save there; None when it cannot be read: its reader gets the reason."""
    try:
        return identify(job.below(dirname), job=name_of(job)).save
    except (OSError, CkptdError):
        return None


def pinned(job: StoredFiles) -> frozenset[str]:
    """Names of all checkpoints that are pinned. Raises OSError when that is unknown."""
    try:
        return frozenset(name for name in job.names(PINS_DIR) if parse_dirname(name) is not None)
    except FileNotFoundError:
        return frozenset()


def superseded(job: StoredFiles) -> dict[str, int]:
    """Names of checkpoints that were committed after a takeover, and the incarnation that took the job over."""
    found = {}
    with contextlib.suppress(OSError):
        for name in filter(parse_dirname, job.names(SUPERSEDED_DIR)):
            with contextlib.suppress(OSError, ValueError):
                found[name] = int(job.read(f"{SUPERSEDED_DIR}/{name}", _MAX_RECORD_NBYTES))
    return found


def _partial_entry(job: StoredFiles, save: SaveId, committed: bool) -> PartialEntry:
    unfinished = job.below(save.partial_dirname)
    damaged: list[str] = []  # votes: others may be for all ranks
    wrong: list[str] = []
    voted: list[str] = []
    worlds: set[int] = set()
    # Not the votes themselves: those of a large job fill memory. Whether two agree, the commit sees.
    ranks: list[int] = []

    def look(places: list[str]) -> tuple[list[tuple[str, int, list[int]]], list[str]] | str:
        try:
            votes, unread = read_node(unfinished, name_of(job), save, places)
        except CkptdError as error:
            return str(error)
        said = [(vote.node, vote.world_size, [record.rank for record in vote.files]) for vote, *_ in votes]
        return said, [str(error) for error in unread]

    try:
        for found in together(look, voting_places(unfinished)):
            if isinstance(found, str):
                wrong.append(found)
                continue
            damaged += found[1]
            for node, world_size, of in found[0]:
                voted += [node] if node not in voted[-1:] else []
                worlds.add(world_size)
                ranks += of
    except OSError as error:
        wrong.append(str(error))
    return PartialEntry(
        save=save,
        voted=voted,
        damaged=[*wrong, *damaged],
        world_size=max(worlds) if len(worlds) == 1 else None,
        missing="already committed" if committed else _missing(wrong, damaged, worlds, ranks),
    )


def _missing(wrong: list[str], damaged: list[str], worlds: set[int], ranks: list[int]) -> str:
    if wrong or (damaged and not worlds):
        return [*wrong, *damaged][0]
    if len(worlds) != 1:
        return f"votes disagree about the number of ranks: {sorted(worlds)}" if worlds else "no votes"
    (world_size,), voted = worlds, set(ranks)
    count = world_size - sum(rank < world_size for rank in voted)  # no list of ranks on the word of one vote
    if count and damaged:
        return damaged[0]
    if count:
        some = itertools.islice((rank for rank in range(world_size) if rank not in voted), _MAX_RANKS_LISTED)
        listed = ", ".join(map(str, some)) + (", .." if count > _MAX_RANKS_LISTED else "")
        return f"{count} of {world_size} ranks have no vote: {listed}"
    return ""
