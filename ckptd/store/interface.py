"""The interface of all kinds of store. ``ckptd.store.opening`` opens a store by its URL.

A store keeps jobs, a job checkpoints, a checkpoint files. It is opened by one process and used by several threads at
once; other processes, on other nodes, use it at the same time. It keeps nothing in memory that another process must
know. Each call blocks for as long as the store does, may be repeated after a failure or a crash, and raises OSError for
what the store refuses, CkptdError for all else. What a call has changed is on the medium when it returns.

A checkpoint is unfinished until ``commit`` has returned anywhere: until then no reader sees it, afterwards every reader
sees all of it, whatever process dies meanwhile. Each kind of store does that in its own way: a file system renames a
directory, an object store puts one object on condition that it is not there.

Names in a checkpoint have at most two folders, as ``sets/e00000001-0123abcd/node1.vote``. Bytes are proved by
``integrity``, in whatever way they are read. Nothing that lies on a store is an order: it names no path outside of it,
and no size that is believed.
"""

import abc
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Protocol

import msgspec

from ckptd.shared.base.errors import UsageError, WrongStoreError
from ckptd.shared.base.ids import ANY_STORE, SaveId, SetName, StoreId, is_job_name, parse_dirname, parse_partial_dirname
from ckptd.shared.format.committed import INCARNATIONS_DIR
from ckptd.shared.format.integrity import Integrity
from ckptd.shared.format.manifest import COMMITTED, UNPUBLISHED, Vote
from ckptd.shared.format.stored_files import StoredFiles
from ckptd.shared.format.together import Alive, silent
from ckptd.shared.protocol.publication import Intents, Publication
from ckptd.shared.stores.kinds import open_files
from ckptd.store import numbers, pins
from ckptd.store.facts import CommitOutcome, Committer, OpenedStore, Scan, Taker
from ckptd.store.image import Flow, Image
from ckptd.store.records import JobRecords
from ckptd.store.scan import names_of, pinned, scan, superseded

OpenImage = Callable[[], AbstractContextManager[Image]]  # its memory is mapped while the context is entered
NO_INTENTS: Intents = MappingProxyType({})


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of a committed checkpoint beside its records. superseded: the incarnation that took the job over."""

    committed_at: datetime
    latest: bool = False
    pinned: bool = False
    unpublished: bool = False
    superseded: int = 0


class Replacement(Protocol):
    """The next content of a file of a committed checkpoint. Nobody sees it before ``publish``. For one thread."""

    def write(self, data: memoryview, offset: int) -> None:
        """All of data at offset. Raises OSError."""

    def read(self, into: memoryview, offset: int) -> None:
        """What was written, read again from the store. Raises OSError, EOFError."""

    def publish(self) -> None:
        """The file has this content from now on, on the medium. Raises OSError."""

    def close(self) -> None:
        """What was not published is removed. Idempotent."""


class Held(Protocol):
    """The directory of a checkpoint, the same one whatever name it gets: what takes its place is never touched."""

    files: StoredFiles

    def replacement(self, name: str, nbytes: int) -> Replacement:
        """A file of it, to be written again, of zeros at first. Raises OSError."""


class Again(Held, Protocol):
    """A committed checkpoint that is made again, unfinished. Readers have the committed one until it takes its place.

    Its files are put by ``replacement``, then ``seal`` is called, then ``take_its_place``.
    """

    def seal(self, votes: Iterable[Vote], writer: str) -> None:
        """All records, from the votes. Nothing is put any more, and all can be read. Raises as commit does."""

    def take_its_place(self) -> str:
        """It has the name of the committed one, which goes. Empty, or what is left of that one.

        A crash leaves readers one of the two, at the latest when the job is swept. Raises CkptdError, OSError: then the
        committed one is as it was; also when somebody has pinned, published or replaced it meanwhile.
        """


class Store(abc.ABC):
    """One store, by its URL: what jobs are saved to. A subclass per kind of store; see the module.

    Abstract methods are what every kind of store must have; the others have a default.
    """

    def __init__(self, url: str, integrity: Integrity) -> None:
        self.url = url
        self.integrity = integrity

    # --- which store it is

    @abc.abstractmethod
    def store_id(self, job: str = "") -> StoreId | None:
        """The id that the store has, None for a new one. job: where the record is lost, what checkpoints say too."""

    @abc.abstractmethod
    def make(self, store_id: StoreId | None) -> tuple[StoreId, list[str]]:
        """The store, made if it is new, its id on record, and warnings. Of several makers one id counts.

        store_id: known from checkpoints, though the record may be lost; None: a new one.
        """

    def whereabouts(self) -> str:
        """On what the URL lies now: a device, a bucket's owner. For people who look for a store that is missing."""
        return "no known place"

    def absence(self) -> str:
        """Why there is no store id, for people."""
        return "there is no store's id"

    def check(self, expected: StoreId, job: str) -> None:
        """Raises WrongStoreError unless the store that lies at the URL now is the expected one.

        job: where the store's id is lost, the checkpoints there say which it is.
        """
        found = self.store_id(job)
        if found == expected:
            return
        if found is None:
            deleted = "was deleted"
            text = (
                f"{self.url} is gone: {self.absence()}; this job is saved to the store with id {expected}; the path "
                f"lies on {self.whereabouts()}"
            )
        else:
            deleted = "is gone"
            text = (
                f"{self.url} is not the store that this job was connected to: id {expected}, now {found}; it lies on "
                f"{self.whereabouts()}"
            )
        hint = (
            "mount its file system again: what is staged stays in memory and is drained then; "
            f"if the store {deleted} for good: start the job again with connect(store_id={ANY_STORE!r}), "
            "it goes on from memory"
        )
        raise WrongStoreError(text, hint=hint)

    def open(
        self,
        job: str,
        *,
        remembered: Collection[StoreId] = (),
        wanted: str = "",
        make: bool = True,
        exact: bool = False,
    ) -> OpenedStore:
        """The store, made if it is new and nobody remembers another one for the job.

        remembered: ids that arenas have for the job. wanted: the id that the session has, or that the user asks for;
        ANY_STORE: whatever lies there. make: False writes nothing, neither a store that is missing nor an id that was
        lost. exact: nobody is there to be warned, so that another store than the remembered ones is an error.
        Raises WrongStoreError when the store is not the wanted one, or is missing where one is remembered.
        """
        found = self.store_id(job)
        named = wanted if wanted != ANY_STORE else ""
        known = {named} if named else set(remembered) if exact and wanted != ANY_STORE else set()
        if found is not None and known and found not in known:
            raise WrongStoreError(
                f"{self.url} has id {found}, and job {job!r} is saved to store {', '.join(sorted(known))}; it lies on "
                f"{self.whereabouts()}",
                hint=f"mount the right file system; to go on in this one: connect(store_id={found!r})",
            )
        if found is None and named and named not in remembered:
            raise WrongStoreError(
                f"the job asks for the store with id {named} (connect(store_id=...) or CKPTD_STORE_ID), and {self.url} "
                f"is no store yet; the path lies on {self.whereabouts()}",
                hint="mount the file system of the store with that id; for a new store give no store_id",
            )
        if found is None and wanted != ANY_STORE and (named or remembered):
            before = named or ", ".join(sorted(remembered))
            raise WrongStoreError(
                f"{self.url} is not the store that job {job!r} is saved to: store id {before}, and there is no store "
                f"now; the path lies on {self.whereabouts()}",
                hint=f"mount its file system; to go on in an empty store, from what is still in memory: "
                f"connect(store_id={ANY_STORE!r}); to give up that, too, on each of its nodes: "
                f"ckptd forget {job} --store {self.url}",
            )
        if not make:
            return OpenedStore(found or "")
        made, warnings = self.make(found)
        if found is not None and remembered and found not in remembered:
            warnings.append(
                f"{self.url} is not the store that job {job!r} was saved to before: id {', '.join(sorted(remembered))},"
                f" now {found} on {self.whereabouts()}; checkpoints in that store are not seen; to go on from them, "
                f"mount its file system again; connect(store_id={min(remembered)!r}) makes this an error"
            )
        return OpenedStore(made, warnings)

    def where(self, job: str, save: SaveId, *, unfinished: bool = False) -> str:
        """Location of a checkpoint."""
        return f"{self.url}/{job}/{save.partial_dirname if unfinished else save.dirname}"

    # --- a job's numbers: a start takes one, then scans; a commit becomes visible, then looks at the numbers

    def take(self, job: str, by: Taker, at_least: int = 1, until: float = math.inf) -> int:
        """A number that nobody has had for this job, at least at_least and above all traces of the job here.

        After until (of time.monotonic) nobody waits for the number any more: it is given back, and CkptdError raised.
        """
        return numbers.take(self.records(job), by, at_least, until)

    def claim(self, job: str, number: int, by: Taker) -> bool:
        """Whether the number is the taker's, on record: one that was made up while the store was silent."""
        return numbers.claim(self.records(job), number, by)

    # --- a save: each node puts its files and its vote, one of them commits

    @abc.abstractmethod
    def put_files(self, job: str, save: SaveId, folder: SetName, files: Sequence[OpenImage], flow: Flow) -> bool:
        """Files of the unfinished checkpoint, with their names. False, and nothing is done: it is committed already.

        folder: the directory of the node's set, in which files lie until they are whole.

        A file of that name and size is kept. Raises what check_source of an image raises; then that file is not there.
        """

    @abc.abstractmethod
    def put_vote(self, job: str, vote: Vote) -> None:
        """The node's vote: to be called when its files are put. Replaces its earlier one."""

    @abc.abstractmethod
    def commit(  # noqa: PLR0913 - whose checkpoint, by whom, and what follows
        self, job: str, save: SaveId, writer: str, by: Committer | None = None, intents: Intents = NO_INTENTS,
        *, alive: Alive = silent,
    ) -> CommitOutcome:  # fmt: skip
        """The checkpoint committed, made from the votes alone. One that is committed already stays as it is.

        by: the session that commits; the outcome names another one that took the job over before this was committed.
        None: the user's own commit, not fenced. writer: program and version. intents: where this user wants a trainer's
        files, of this save and of newer ones. alive: called as the work continues: that of a large job takes long.
        Raises DamagedError, naming the file, when a vote is damaged or missing, a file is absent or has another size,
        or another save has the checkpoint's name.
        """

    # --- what lies there

    @abc.abstractmethod
    def records(self, job: str) -> JobRecords:
        """The records of the job, in whose location its checkpoints are, by final or partial names."""

    def files(self, job: str) -> StoredFiles:
        """The files at the job's location."""
        return self.records(job).files

    def jobs(self) -> list[str]:
        """Names that jobs can have, in order. Raises OSError where there is no store."""
        return list(filter(is_job_name, open_files(self.url, self.integrity).names()))

    def has_job(self, job: str) -> bool:
        """Whether ckptd has ever written a checkpoint of the job, or begun to. Raises OSError."""
        try:
            names = open_files(f"{self.url}/{job}", self.integrity).names()
        except (FileNotFoundError, NotADirectoryError):
            return False
        return any(name == INCARNATIONS_DIR or parse_dirname(name) or parse_partial_dirname(name) for name in names)

    def scan(self, job: str) -> Scan:
        """The job's checkpoints and records; empty without the store or the job. Raises nothing: problems are in it."""
        return scan(self.files(job))

    def names(self, job: str) -> list[str]:
        """Names that checkpoints can have, newest incarnation and step first. None without the job."""
        return names_of(self.files(job))

    def latest(self, job: str) -> str:
        """Name of the checkpoint that other programs find as the newest; empty if there is none."""
        return next((entry.dirname for entry in self.scan(job).committed), "")

    def standings(self, job: str) -> tuple[dict[str, Standing], list[str]]:
        """By name of each committed checkpoint, and what could not be looked at."""
        files, latest, problems = self.files(job), self.latest(job), []
        late, kept = superseded(files), frozenset[str]()
        try:
            kept = pinned(files)
        except OSError as error:
            problems.append(str(error))
        found = {}
        for name in self.names(job):
            try:
                found[name] = Standing(
                    committed_at=_moment(files.below(name).modified(COMMITTED)), latest=name == latest,
                    pinned=name in kept, unpublished=UNPUBLISHED in files.below(name).names(),
                    superseded=late.get(name, 0),
                )  # fmt: skip
            except (FileNotFoundError, NotADirectoryError):
                continue  # it is no checkpoint, or was removed meanwhile
            except OSError as error:
                problems.append(f"{files.where(name)}: whether it is published cannot be read: {error}")
        return found, problems

    # --- what goes, and what stays

    @abc.abstractmethod
    def remove(self, job: str, save: SaveId, intents: Intents = NO_INTENTS) -> bool:
        """Whether the committed checkpoint is gone: not if it is pinned, or a trainer's directory needs its files.

        Raises CkptdError for the newest; DamagedError for what is no valid checkpoint, and for another run's.
        """

    @abc.abstractmethod
    def discard(self, job: str, save: SaveId) -> None:
        """The unfinished checkpoint removed, also under a late writer, which gets an OSError. Never a committed one."""

    def sweep(self, job: str, *, all_of_it: bool = True) -> list[str]:
        """Removes the leftovers of crashed processes. Returns the locations of those that stay.

        all_of_it: also files that a living daemon of the job may be making; for that daemon alone.
        """
        del job, all_of_it
        return []

    def pin(self, job: str, name: str, *, pinned: bool = True) -> bool:
        """Keeps a committed checkpoint from being removed, or no more. Whether that is a change. Raises UsageError."""
        return (pins.pin if pinned else pins.unpin)(self.records(job), name)

    # --- a trainer's files, where the trainer looks for them: for stores whose files other programs can open

    def publish(self, job: str, intents: Intents, own_part: SaveId | None = None) -> tuple[list[SaveId], list[str]]:
        """The saves whose files are where the intents say, and why others' are not.

        own_part: of this save alone, what each node puts. Else all that an earlier daemon did not get to.
        """
        del job, own_part
        return [], [f"{self.url} cannot publish files" for _ in intents]

    def publish_to(self, job: str, name: str, to: Publication) -> list[str]:
        """Publishes to a place that a user typed. The trainer's names of the files. Raises UsageError, DamagedError."""
        del to
        raise UsageError(f"{self.url} cannot publish files", hint=f"ckptd export {self.url}/{job}/{name} OUT")

    # --- mending

    def held(self, location: str) -> AbstractContextManager[Held]:
        """The checkpoint that lies at a location now, to be mended. It may be a copy that belongs to no job."""
        raise UsageError(f"{location} cannot be mended", hint="load an older step")

    def commit_again(self, job: str, save: SaveId, writer: str) -> CommitOutcome:
        """A checkpoint that has its final name and has lost its records, made from its votes as the first time."""
        del job, save, writer
        raise UsageError(f"{self.url} cannot be mended", hint="load an older step")

    # --- making a committed checkpoint smaller

    def made_again(self, job: str, save: SaveId, manifest: str) -> AbstractContextManager[Again]:
        """A checkpoint of a save that is committed, with this manifest: empty. It is given up at the end, if unused."""
        del save, manifest
        raise UsageError(
            f"{self.url}: what is committed there cannot be made again", hint=f"ckptd list {self.url}/{job}"
        )

    # --- the store itself

    @abc.abstractmethod
    def space(self) -> tuple[int, int]:
        """(bytes this user may still write, bytes in all)."""

    def probe(self) -> Iterator[dict[str, object]]:
        """Fields of ``ckptd.doctor.rules.StoreFacts`` as they become known: the store tried, for ``ckptd doctor``.

        Each is preceded by what is about to be tried, as "doing". "finished" is the last.
        """
        yield {"doing": "asking how much space there is"}
        try:
            yield {"free_nbytes": self.space()[0], "finished": True}
        except OSError as error:
            yield {"error": error.strerror or str(error)}

    def explain(self, error: OSError) -> tuple[str, str]:
        """Message and hint for an error of this store."""
        return str(error), ""


def _moment(seconds: float) -> datetime:
    """The time of a file; the last there is for one beyond the calendar, which some file systems can keep."""
    try:
        return datetime.fromtimestamp(seconds, UTC)
    except (ValueError, OverflowError, OSError):
        return datetime.max.replace(tzinfo=UTC)
