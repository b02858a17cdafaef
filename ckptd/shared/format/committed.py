"""Whether a directory holds a committed checkpoint, and what is wrong with it: the one way to open one. Pure.

Every reader opens a checkpoint by ``open_committed``, so that none of them takes what another one refuses. A reader
may leave out a part that it does not need (``About``), and checks none in another way. The caller's ``StoredFiles``
read, and say how what they read must be proved: there is no way to open a checkpoint without saying so.
"""

import contextlib
import enum
import errno
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

import msgspec

from ckptd.shared.base.decoding import MALFORMED
from ckptd.shared.base.errors import CkptdError, DamagedError, IntegrityError, UsageError
from ckptd.shared.base.ids import SaveId, parse_dirname, parse_partial_dirname
from ckptd.shared.base.wording import cut, shown
from ckptd.shared.format.committed_record import MAX_COMMITTED_NBYTES, Committed, decode_committed, make_committed
from ckptd.shared.format.integrity import Purpose
from ckptd.shared.format.manifest import (
    COMMITTED,
    MAX_RECORD_NBYTES,
    STOCK_FILES,
    FileRecord,
    Manifest,
    ParityRecord,
    StockFile,
    Vote,
    decode_manifest,
)
from ckptd.shared.format.set_places import SETS_DIR, is_set_name, voter
from ckptd.shared.format.stored_files import StoredFiles
from ckptd.shared.format.stored_records import OF_THE_DIRECTORY, StoredRecords, read_vote_at, read_vote_of

TRASH_PREFIX = ".trash-"
INCARNATIONS_DIR = ".incarnations"  # in every job's directory, and in no other


class About(enum.Enum):
    """What a finding is about. A reader asks for the first ones; the others cost more and concern fewer."""

    IDENTITY = enum.auto()  # the directory's name, COMMITTED, the manifest's size
    MANIFEST = enum.auto()  # its digest, and COMMITTED against it
    VOTES = enum.auto()  # all of them: what they say of each image
    FILES = enum.auto()  # the images' files: there, regular, of their sizes
    STOCK = enum.auto()  # files for stock readers, the index of a trainer's files among them
    PARITY = enum.auto()  # parity files: there, regular, of their sizes


RECORDS = frozenset({About.IDENTITY, About.MANIFEST})
EVERYTHING = frozenset(About)


@dataclass(frozen=True, slots=True)
class Finding:
    """Something wrong. path: of the file that is concerned."""

    about: About
    path: str
    what: str
    hint: str = ""
    cause: OSError | IntegrityError | None = None
    misused: bool = False  # the directory's own name says that it is no checkpoint

    def __str__(self) -> str:
        return f"{self.path}: {self.what}"

    @property
    def error(self) -> CkptdError | OSError:
        """To be raised: the cause when it says nothing of the checkpoint, else UsageError or DamagedError.

        IntegrityError, which is a DamagedError, where it is proved in another way than the reader asks for.
        """
        if isinstance(self.cause, IntegrityError) or (
            self.cause is not None and self.cause.errno not in OF_THE_DIRECTORY
        ):
            return self.cause
        return (UsageError if self.misused else DamagedError)(str(self), hint=self.hint)


@dataclass(slots=True)
class Opened:
    """What could be read of a checkpoint so far."""

    files: StoredFiles  # at a location with all links followed
    committed: Committed | None = None
    manifest: Manifest | None = None
    votes: list[Vote] = field(default_factory=list)  # sound ones, and where there is a manifest those that it pins

    _voted: dict[int, FileRecord] = field(default_factory=dict)  # by rank, what they say

    def take(self, vote: Vote) -> str:
        """Adds a sound vote; the name of an image of which another one says something else, and then it is left out."""
        for record in vote.files:
            if self._voted.get(record.rank, record) != record:
                return record.name
        self.votes.append(vote)
        self._voted |= {record.rank: record for record in vote.files}
        return ""

    @property
    def records(self) -> list[FileRecord]:
        """Of all images that sound votes know, by rank. The votes must have been asked for."""
        return [self._voted[rank] for rank in sorted(self._voted)]

    @property
    def parity(self) -> list[ParityRecord]:
        """Of all parity files, likewise."""
        return sorted({vote.parity for vote in self.votes if vote.parity is not None})


def open_committed(
    opened: Opened, about: Collection[About], *, job: str | None = None, save: SaveId | None = None
) -> Iterator[Finding]:
    """Fills opened, and yields what is wrong, as it goes. job and save: what it must be of, if that is known.

    Else the location says so, where it claims something: what has the name of a step must be of that step, and in the
    place of a job of that job. Any other name claims nothing.
    """
    files = opened.files
    yield from _of_name(files.location)
    yield from _of_committed(opened, job, save)
    if About.MANIFEST in about:
        yield from _of_manifest(opened)
    if {About.VOTES, About.FILES, About.PARITY} & set(about):  # what the files should be stands there
        yield from _of_votes(opened)
    if About.FILES in about:
        yield from file_findings(files, opened.records)
    if About.STOCK in about and opened.manifest is not None:
        for stock in opened.manifest.stock:
            found = read_stock_of(files, stock, opened.manifest, opened.records if opened.votes else None)
            if isinstance(found, Finding):
                yield found
    if About.PARITY in about:
        yield from parity_findings(files, opened.parity)


def identify(files: StoredFiles, *, job: str | None = None, save: SaveId | None = None) -> Committed:
    """The record of a checkpoint whose name, COMMITTED and manifest's size agree.

    Raises UsageError, DamagedError or OSError, naming the file.
    """
    opened = Opened(files)
    raise_first(open_committed(opened, {About.IDENTITY}, job=job, save=save))
    assert opened.committed is not None  # noqa: S101 - else there is a finding
    return opened.committed


def open_sound(
    files: StoredFiles, about: Collection[About], *, job: str | None = None, save: SaveId | None = None
) -> Manifest:
    """The manifest of a checkpoint with which nothing is wrong that is asked about.

    Raises UsageError, DamagedError or OSError, naming the file.
    """
    opened = Opened(files)
    raise_first(open_committed(opened, about, job=job, save=save))
    assert opened.manifest is not None  # noqa: S101 - else there is a finding
    return opened.manifest


def raise_first(findings: Iterable[Finding]) -> None:
    """Raises the first as an error; the checks after it are not made."""
    for finding in findings:
        error = finding.error
        raise error from (finding.cause if finding.cause is not error else None)


def open_records(files: StoredFiles, *, job: str | None = None, save: SaveId | None = None) -> StoredRecords:
    """The records of a checkpoint whose manifest is sound, read as they are asked for. Raises as open_sound."""
    return StoredRecords(files, open_sound(files, RECORDS, job=job, save=save))


def read_stock_of(
    files: StoredFiles, stock: StockFile, manifest: Manifest, records: Iterable[FileRecord] | None = None
) -> bytes | Finding:
    """A file for stock readers that the manifest pins: its bytes are those of which the manifest has the digest.

    records: of all images, to hold the index of a trainer's files against them.
    """
    where = files.where(stock.name)
    try:
        fits = files.size(stock.name) == stock.nbytes
        data = files.read(stock.name, stock.nbytes) if fits else b""
    except OSError as error:
        return _unreadable(About.STOCK, where, error)
    if (len(data), files.integrity.digest(data, Purpose.STOCK)) != (stock.nbytes, stock.digest):
        what = "is not the file that the manifest knows: the bytes are damaged or another's"
        return Finding(About.STOCK, where, what, _hint(where))
    if stock.name == STOCK_FILES and (wrong := _index_misfit(data, manifest, records)):
        return Finding(About.STOCK, where, wrong, _hint(where))
    return data


def file_findings(files: StoredFiles, records: Iterable[FileRecord]) -> Iterator[Finding]:
    """What is wrong with the files of these images, but for their bytes."""
    for record in records:
        for name, _, nbytes in record.extents():
            yield from _of_size(About.FILES, name, files, nbytes)


def parity_findings(files: StoredFiles, records: Iterable[ParityRecord]) -> Iterator[Finding]:
    """What is wrong with these parity files, but for their bytes."""
    for record in records:
        yield from _of_size(About.PARITY, record.place, files, record.file_nbytes)


# --- each part


def _of_name(path: str) -> Iterator[Finding]:
    head, _, name = path.rpartition("/")
    if name.startswith(TRASH_PREFIX):
        what = "is on its way out, and perhaps half removed: no checkpoint"
        yield Finding(About.IDENTITY, path, what, f"see what is there: ckptd list {head}", misused=True)
    elif parse_partial_dirname(name) is not None:
        hint = f"ckptd commit {path}, or see what is there: ckptd list {head}"
        yield Finding(About.IDENTITY, path, "is unfinished, not a checkpoint", hint, misused=True)


def _of_committed(opened: Opened, job: str | None, save: SaveId | None) -> Iterator[Finding]:
    files = opened.files
    where = files.where(COMMITTED)
    try:
        raw = files.read(COMMITTED, MAX_COMMITTED_NBYTES)
        committed = decode_committed(raw, where=where, integrity=files.integrity)
    except FileNotFoundError as error:
        hint = f"if all else is there, it is committed again by: ckptd commit {files.location}"
        yield Finding(About.IDENTITY, where, "missing: the checkpoint is not committed", hint, error)
        return
    except (OSError, DamagedError) as error:
        yield _unreadable(About.IDENTITY, where, error)
        return
    opened.committed = committed
    if committed.save_id != committed.save.text:
        what = f"says {shown(committed.save_id)} and {shown(committed.save.text)}: one of them is damaged"
        yield Finding(About.IDENTITY, where, what, _hint(where))
    yield from _of_claims(committed, files, job, save)
    there = files.where(committed.manifest)
    try:
        found = files.size(committed.manifest)
    except FileNotFoundError as error:
        hint = f"if all else is there, it is made again by: ckptd commit {files.location}"
        yield Finding(About.IDENTITY, where, f"selects {committed.manifest}, which is missing", hint, error)
        return
    except OSError as error:
        yield _unreadable(About.IDENTITY, there, error)
        return
    if found != committed.manifest_nbytes:
        what = f"{found} bytes, {COMMITTED} says {committed.manifest_nbytes}"
        yield Finding(About.IDENTITY, there, what, _hint(there))


def _of_claims(committed: Committed, files: StoredFiles, job: str | None, save: SaveId | None) -> Iterator[Finding]:
    """COMMITTED against what the checkpoint must be of."""
    path = files.location
    head, _, name = path.rpartition("/")
    named = parse_dirname(name) is not None
    job = files.job() if job is None and named else job
    place = f"but lies in {name}" + ("" if job is None else f" of job {shown(job)}")
    wrong = ""
    hint = f"give it a name that claims nothing: mv '{path}' '{path}.old'"
    if save is not None and committed.save.run != save.run and committed.save.dirname == save.dirname:
        wrong = f"of another run than {save}: {committed.save.run.hex()}, not {save.run.hex()}"
        hint = f"see what is there: ckptd list {head}"  # it is right where it lies
    elif save is not None and committed.save != save:
        wrong = f"not {save}"
    elif (named and committed.save.dirname != name) or (job is not None and committed.job != job):
        wrong = f"{place}: the name does not agree"
    if wrong:
        what = f"holds job {shown(committed.job)}, {committed.save}, {wrong}"
        yield Finding(About.IDENTITY, files.where(COMMITTED), what, hint)


def _of_manifest(opened: Opened) -> Iterator[Finding]:
    files, committed = opened.files, opened.committed
    if committed is None:
        return  # it says which of them is the manifest
    where = files.where(committed.manifest)
    try:
        raw = files.read(committed.manifest, MAX_RECORD_NBYTES)
        opened.manifest = manifest = decode_manifest(raw, where=where, integrity=files.integrity)
    except (OSError, DamagedError) as error:
        yield _unreadable(About.MANIFEST, where, error)
        return
    facts = _facts(committed), _facts(make_committed(manifest, raw, files.integrity))
    for name, said in facts[0].items():
        if said != facts[1][name]:
            text = f"does not match {committed.manifest}: {name}: {said} and {facts[1][name]}"
            yield Finding(About.MANIFEST, files.where(COMMITTED), text, _hint(where))


def _facts(committed: Committed) -> dict[str, object]:
    """What COMMITTED says, with the save as one thing."""
    return {
        "store id": committed.store_id,
        "job": committed.job,
        "save": committed.save,
        "ranks": committed.world_size,
        "files": committed.files,
        "bytes of the files": committed.nbytes,
        "its own bytes": committed.manifest_nbytes,
        "its digest": committed.manifest_digest,
        "replicas": str(committed.replicas),
        "what is left out": committed.left_out,
        "metadata": committed.metadata,
        "what was dropped": committed.dropped,
    }


def _of_votes(opened: Opened) -> Iterator[Finding]:
    """Those the manifest pins, held against it; without one, all that are there.

    Of others that lie there nothing is said: nodes that voted again have left them, or voted while this was committed.
    """
    files, manifest = opened.files, opened.manifest
    try:
        files.size(SETS_DIR)
    except OSError as error:
        if error.errno == errno.ELOOP:
            folder = files.where(SETS_DIR)
            yield Finding(About.VOTES, folder, "a symbolic link where a directory belongs", _hint(folder))
    there: list[tuple[str, Callable[[], Vote]]] = []
    if manifest is not None:
        there = [(manifest.place_of(ref), partial(read_vote_of, files, manifest, ref)) for ref in manifest.votes]
    else:
        with contextlib.suppress(OSError):
            there = [(place, partial(_vote_at, files, place)) for place in vote_places(files)]
    for place, read in there:
        where = files.where(place)
        try:
            differing = opened.take(read())
        except (OSError, DamagedError) as error:
            yield _unreadable(About.VOTES, where, error)
            continue
        if differing:
            yield Finding(About.VOTES, where, f"says something else of {differing} than another vote", _hint(where))


def _vote_at(files: StoredFiles, place: str) -> Vote:
    return read_vote_at(files, place).vote


def vote_places(files: StoredFiles) -> list[str]:
    """Of all votes that lie there, readable or not; none where there are no sets. Raises OSError."""
    try:
        sets = [name for name in files.names(SETS_DIR) if is_set_name(name)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = []
    for name in sets:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            found += [f"{SETS_DIR}/{name}/{vote}" for vote in files.names(f"{SETS_DIR}/{name}") if voter(vote)]
    return found


class _Index(msgspec.Struct, frozen=True):
    """What is compared of `files.json`."""

    save_id: str
    files: dict[str, str]


_index_decoder = msgspec.json.Decoder(_Index)


def _index_misfit(data: bytes, manifest: Manifest, records: Iterable[FileRecord] | None) -> str:
    """Why the index of a trainer's files is none of the manifest's; empty when it is."""
    try:
        index = _index_decoder.decode(data)
    except MALFORMED as error:
        return f"no index of a trainer's files: {cut(error)}"
    if index.save_id != manifest.save.text:
        return f"is of save {shown(index.save_id)}, not of {manifest.save}"
    if records is None:
        return ""
    known = {extent.name for record in records for extent in record.extents()}
    stranger = next((name for name in index.files.values() if name not in known), None)
    return f"names {shown(stranger)}, which is no file of the manifest" if stranger is not None else ""


def _of_size(about: About, name: str, files: StoredFiles, expected: int) -> Iterator[Finding]:
    where = files.where(name)
    try:
        found = files.size(name)
    except OSError as error:
        yield _unreadable(about, where, error)
        return
    if found != expected:
        yield Finding(about, where, f"{found} bytes, should be {expected}", _hint(where))


def _unreadable(about: About, where: str, error: OSError | DamagedError) -> Finding:
    if isinstance(error, IntegrityError):
        return Finding(about, where, error.message.removeprefix(f"{where}: "), error.hint, error)
    if isinstance(error, DamagedError):
        return Finding(about, where, error.message.removeprefix(f"{where}: "), _hint(where))
    what = "missing" if isinstance(error, FileNotFoundError) else error.strerror or str(error)
    return Finding(about, where, what, _hint(where), error)


def _hint(where: str) -> str:
    """Of a file in the checkpoint's directory, or in that of a set."""
    path = where.rpartition("/")[0]
    above, _, name = path.rpartition("/")
    return f"see what else is wrong: ckptd verify {above.rpartition('/')[0] if is_set_name(name) else path}"
