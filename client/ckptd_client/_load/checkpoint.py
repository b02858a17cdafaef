"""All images of one checkpoint, each from the nearest place: a slot of this node, or the store."""

import contextlib
import os
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cached_property

from ckptd.shared.base.errors import CkptdError
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.format import arena_paths
from ckptd.shared.format.integrity import XXH3, Integrity
from ckptd.shared.format.layout import Layout, Leaves, decode_leaves
from ckptd.shared.format.manifest import COMMITTED, UNPUBLISHED, FileRecord
from ckptd.shared.format.record_index import RecordIndex
from ckptd.shared.format.replica_attestations import Compared, compared
from ckptd.shared.format.slot import SEALS_NBYTES, Seal, SlotState, decode_seals
from ckptd.shared.format.stored_files import StoredFiles
from ckptd.shared.format.stored_records import StoredRecords
from ckptd.shared.protocol.messages import LoadFrom, Tier
from ckptd.shared.stores.kinds import open_files, real
from ckptd_client._load.image_ranges import Images, images_in, images_of
from ckptd_client._load.memory import MemorySegments
from ckptd_client._load.reader import (
    Source,
    Target,
    check_files,
    copy_out,
    open_file,
    open_slot,
    read_records,
)
from ckptd_client._load.saved_names import OtherRanksNeededError
from ckptd_client._load.shared_read.participants import Participants
from ckptd_client._load.shared_read.read import copy_out_together
from ckptd_client._load.sought import index_of
from ckptd_client._state.replica_choice import doubt_of

_DIGESTS_S = 60.0  # limit for the daemon to take another rank's digests
_PAUSE_S = 0.01


class Checkpoint:
    """A checkpoint to read from. Files on the store are open while one is read, slots until close, or its end."""

    def __init__(  # noqa: PLR0913 - keyword-only
        self,
        sources: dict[int, Source],
        *,
        save: SaveId,
        tier: Tier,
        stored: StoredFiles,
        opener: Callable[[int], Source],
        records: StoredRecords | None = None,
        notes: tuple[str, ...] = (),
        integrity: Integrity = XXH3,
        segments: MemorySegments | None = None,
    ) -> None:
        self.save = save
        self.tier = tier
        self.notes = notes
        self._participants: Participants | None = None  # of its next reading by read_all; None: this rank alone
        self._sources = sources
        self._open = opener
        self.records = records  # of what lies on the store, each read when it is asked for
        self._described: dict[int, Source] | None = None  # all of these
        self.segments = segments  # in the memory of nodes; they are released by close
        self._integrity = integrity
        self.stored = stored  # what lies on the store, or will, once it is committed
        self._finalizer = weakref.finalize(self, _close, sources)  # DCP drops one without close if it cannot plan

    @property
    def doubts(self) -> list[str]:
        """Notes on the comparison of replicas, for readers from the store."""
        return doubt_of(self.replicas) if self.records is not None else []

    @property
    def replicas(self) -> Compared:
        """How far the attestations of its ranks prove that replicas hold the same."""
        if self.records is not None:
            return self.records.manifest.replicas
        return compared({rank: source.attestations for rank, source in self._sources.items()})

    @property
    def is_committed(self) -> bool:
        """Whether it lies on the store by now."""
        return self._is_there(COMMITTED)

    @property
    def is_published(self) -> bool:
        """Whether it is committed, and its trainer's files are where the trainer looks."""
        return self.is_committed and not self._is_there(UNPUBLISHED)

    def _is_there(self, name: str) -> bool:
        try:
            self.stored.size(name)
        except OSError:
            return False
        return True

    @property
    def is_keyed(self) -> bool:
        """Whether a key proves the data."""
        return self._integrity.keyed

    @property
    def world_size(self) -> int:
        """The number of ranks that saved it."""
        return len(self.records) if self.records is not None else next(iter(self._sources.values())).layout.world_size

    @property
    def layouts(self) -> dict[int, Layout]:
        """By rank. Blocks for all votes of what lies on the store. Raises DamagedError, OSError; so do the next two."""
        return {rank: source.layout for rank, source in self._every.items()}

    @property
    def leaves(self) -> dict[int, Leaves]:
        """By rank."""
        return {rank: source.leaves for rank, source in self._every.items()}

    def leaves_of(self, rank: int) -> Leaves:
        """Of one rank. Blocks for its vote, of what lies on the store."""
        if self.records is None:
            return self._sources[rank].leaves
        return decode_leaves(self.records[rank].leaves, where=self.records.files.where(self.records[rank].name))

    @cached_property
    def index(self) -> RecordIndex | None:
        """Of the records: None also where it cannot be read, and in memory."""
        return index_of(self.records) if self.records is not None else None

    def check(self, ranks: Iterable[int]) -> None:
        """Raises unless the records of these ranks can be read, and their images exist; nothing for what is in memory.

        Blocks for their votes. Raises DamagedError, OSError.
        """
        if self.records is not None:
            ranks = sorted(ranks)
            self.records.fetch(ranks)
            check_files(self.stored, [self.records[rank] for rank in ranks])

    @property
    def _every(self) -> dict[int, Source]:
        """What is known of each image."""
        if self.records is None:
            return self._sources
        if self._described is None:
            self._described = {record.rank: _described(self.records, record) for record in self.records}
        return self._described

    @property
    def images(self) -> Images:
        """Ranges of its images without checks of digests; for slots until close."""
        if self.segments is not None:
            return self.segments.images
        return images_in(self.records) if self.records is not None else images_of(self._sources)

    def read(self, rank: int, targets: list[Target]) -> None:
        """Fills the targets from a rank's image, digests checked; from the store if the slot is damaged.

        Raises DamagedError that names file and block, OSError.
        """
        if self.tier is Tier.PFS:  # each file is open only while it is read: there may be more ranks than descriptors
            with contextlib.closing(self._open(rank)) as source:
                return copy_out(source, targets, sparse=True)
        try:
            self._read_memory(rank, targets)
        except (CkptdError, OSError):
            if not self.is_committed:
                raise
            opened = open_file(read_records(self.stored, self.save), rank)
            with contextlib.closing(opened) as source:
                copy_out(source, targets, sparse=True)
        return None

    def _read_memory(self, rank: int, targets: list[Target]) -> None:
        if self.segments is None:
            return copy_out(self._sources[rank], targets, sparse=True)
        self.segments.pull({rank: targets})
        with self.segments.lacking(rank), contextlib.closing(self.segments.open(rank)) as source:
            return copy_out(source, targets, sparse=True)

    def read_with(self, participants: Participants) -> None:
        """Whom the next read_all reads with. They are entered, and left by it, by close, or when this is dropped."""
        participants.save = self.save
        self._participants = participants
        weakref.finalize(self, participants.leave_quietly)

    def read_all(self, targets: Mapping[int, list[Target]]) -> None:
        """Fills the targets, by rank of the image, as read does, together with the participants: once.

        Raises DamagedError, OSError.
        """
        participants, self._participants = self._participants, None
        if participants is not None and self.records is not None:
            try:
                copy_out_together(self._open, targets, self.records, participants, self._integrity)
            finally:
                participants.leave()
            return
        if self.segments is not None:
            with contextlib.suppress(CkptdError, OSError):  # rank by rank below
                self.segments.pull(targets)
        for rank, wanted in sorted(targets.items()):
            self.read(rank, wanted)

    def close(self) -> None:
        """Closes the files; nothing can be read afterwards. Participants learn it if nothing was read. Idempotent."""
        _close(self._sources)
        self.leave()
        segments, self.segments = self.segments, None
        if segments is not None:
            segments.release()

    def leave(self) -> None:
        """What is read from here on is read alone, and no participant waits for this rank. Idempotent."""
        participants, self._participants = self._participants, None
        if participants is not None:
            participants.leave()


def _close(sources: dict[int, Source]) -> None:
    for rank, source in sources.items():
        if source.files:
            source.close()
            sources[rank] = source.closed()


def open_directory(directory: str, save: SaveId | None = None, integrity: Integrity = XXH3) -> Checkpoint:
    """A committed checkpoint on the store, of which only the root is read. Raises UsageError, DamagedError, OSError."""
    stored = open_files(real(directory), integrity)  # latest may move on meanwhile
    records = read_records(stored, save)
    return Checkpoint(
        {},
        save=records.manifest.save,
        tier=Tier.PFS,
        stored=stored,
        opener=lambda rank: open_file(records, rank),
        records=records,
        integrity=integrity,
    )


def open_arena(  # noqa: PLR0913 - a slot's identity
    directory: str, slot: str, job: JobKey, save: SaveId, rank: int, *, tier: Tier = Tier.ARENA, complete: bool = True,
    integrity: Integrity = XXH3,
) -> Checkpoint:  # fmt: skip
    """A staged checkpoint whose ranks' slots are all in this directory of the arena.

    slot: this rank's own. tier: how its bytes came into it. complete: False takes what there is.
    Raises OtherRanksNeededError when some are elsewhere, DamagedError, OSError.
    """
    own = open_slot(os.path.join(directory, slot), job, save, rank, integrity)
    sources = {rank: own}
    try:
        names = dict(_slots_of(directory, job, save, integrity))
        if complete:
            _check_complete(names, own.layout, save)
        for other in sorted(names):
            if other != rank:
                sources[other] = open_slot(os.path.join(directory, names[other]), job, save, other, integrity)
    except BaseException:
        for source in sources.values():
            source.close()
        raise
    return Checkpoint(
        dict(sorted(sources.items())),
        save=save,
        tier=tier,
        stored=open_files(f"{job.store}/{job.job}/{save.dirname}", integrity),
        opener=sources.__getitem__,
        integrity=integrity,
    )


def open_segments(
    segments: MemorySegments, order: LoadFrom, ranks: Iterable[int], job: JobKey, integrity: Integrity = XXH3
) -> Checkpoint:
    """The images of these ranks of a staged checkpoint whose segments lie in the memory of nodes. It owns segments.

    Raises LackingError, DamagedError, OSError.
    """
    assert order.save is not None  # noqa: S101 - the caller has checked
    return Checkpoint(
        segments.describe(ranks),
        save=order.save,
        tier=order.tier,
        stored=open_files(f"{job.store}/{job.job}/{order.save.dirname}", integrity),
        opener=segments.open,
        integrity=integrity,
        segments=segments,
    )


def _check_complete(names: Collection[int], own: Layout, save: SaveId) -> None:
    missing = sorted(set(range(own.world_size)) - {*names, own.rank})
    if missing:
        raise OtherRanksNeededError(f"{save}: the images of ranks {missing} are not on this node")


def _slots_of(directory: str, job: JobKey, save: SaveId, integrity: Integrity) -> Iterator[tuple[int, str]]:
    """(rank, name) of each slot that holds a rank of this save, once the daemon has taken its digests."""
    for name in sorted(os.listdir(directory)):
        if arena_paths.parse_slot_name(name) is not None:
            seal = _settled_seal(os.path.join(directory, name), save, integrity)
            if seal is not None and (seal.job, seal.save, seal.state) == (job, save, SlotState.DIGESTED):
                yield seal.rank, name


def _settled_seal(path: str, save: SaveId, integrity: Integrity) -> Seal | None:
    deadline = time.monotonic() + _DIGESTS_S
    while True:
        try:
            with open(path, "rb") as file:
                file.seek(-SEALS_NBYTES, os.SEEK_END)
                seal = decode_seals(file.read(), integrity, where=path)[2]
        except OSError:
            return None  # unlinked meanwhile, or not complete yet
        if seal.save != save or seal.state is not SlotState.SEALED or time.monotonic() > deadline:
            return seal
        time.sleep(_PAUSE_S)


def _described(records: StoredRecords, record: FileRecord) -> Source:
    stored = records.files
    where = stored.where(record.name)
    layout, leaves = records.layout(record.rank), decode_leaves(record.leaves, where=where)
    return Source((), where, record.nbytes, record.digests, layout, leaves, readers=0, integrity=stored.integrity,
                  attestations=record.attestations)  # fmt: skip
