"""Offline check of checkpoints on a store and of slots in an arena: every digest, every record, named where it fails.

Reads only, with the page cache, one block in memory at a time. Damage is reported, never raised.
"""

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from ckptd.checkpoint.verify_index import index_problem
from ckptd.checkpoint.verify_parity import check_parity, strangers
from ckptd.shared.base.errors import DamagedError, IntegrityError
from ckptd.shared.base.ids import SaveId, file_name, is_job_name, parse_dirname, parse_partial_dirname
from ckptd.shared.files.regular import open_regular
from ckptd.shared.format import arena_paths
from ckptd.shared.format.committed import EVERYTHING, INCARNATIONS_DIR, TRASH_PREFIX, Opened, open_committed
from ckptd.shared.format.digest import BLOCK_NBYTES, DIGEST_NBYTES, blocks
from ckptd.shared.format.dropped import dropped_by
from ckptd.shared.format.header import MAX_HEADER_NBYTES, check_header
from ckptd.shared.format.integrity import XXH3, Integrity, Purpose
from ckptd.shared.format.layout import Layout, decode_leaves, file_layouts
from ckptd.shared.format.manifest import (
    COMMITTED,
    LINKED,
    STOCK_FILES,
    STOCK_METADATA,
    STOCK_OBJECTS,
    UNPUBLISHED,
    FileRecord,
    StockFile,
    layout_of,
)
from ckptd.shared.format.packed_layout import Known, parted
from ckptd.shared.format.replica_attestations import compared, doubt
from ckptd.shared.format.root_names import has_records, is_manifest
from ckptd.shared.format.save_metadata import metadata_in
from ckptd.shared.format.set_places import SETS_DIR
from ckptd.shared.format.slot import SEAL_NBYTES, SEALS_NBYTES, Seal, SlotState, decode_seals, is_page
from ckptd.shared.format.stored_files import StoredFile, StoredFiles, read_exactly, read_some
from ckptd.shared.stores.directory import OpenedFile
from ckptd.shared.stores.kinds import absolute, open_files, real
from ckptd.shared.torchfile.metadata_read import stranger_in
from ckptd.system.files import is_temp

_RECORDS = frozenset({COMMITTED, SETS_DIR, UNPUBLISHED, LINKED})


class Problem(msgspec.Struct, frozen=True):
    """Something wrong in one file, or in one block of it: bytes start to stop, of which block is the index."""

    path: str
    what: str
    block: int | None = None
    start: int = 0
    stop: int = 0

    def __str__(self) -> str:
        place = "" if self.block is None else f" block {self.block} (bytes {self.start} to {self.stop - 1}):"
        return f"{self.path}:{place} {self.what}"


class Whose(NamedTuple):
    """The save, if known, and the number of ranks; and what ranks have alike of their layouts."""

    save: SaveId | None
    world_size: int
    known: Known


def _ignore(_nbytes: int) -> None:
    return None


@dataclass
class Report:
    """What a check found. notes are no damage: unfinished saves, leftovers, slots without digests yet."""

    path: str
    checked: list[str] = field(default_factory=list)  # checkpoints and slots
    files: int = 0
    nbytes: int = 0
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    progress: Callable[[int], None] = _ignore  # called with the bytes checked so far
    integrity: Integrity = XXH3  # how all of it must be proved
    _named: set[str] = field(default_factory=set)  # files with a problem

    @property
    def ok(self) -> bool:
        """Whether something was checked and nothing is wrong."""
        return bool(self.checked) and not self.problems

    def problem(self, path: str, what: str, block: tuple[int, int] | None = None) -> None:
        """Adds a problem of a file, or of the block of it that starts and stops there."""
        self._named.add(path)
        if block is None:
            self.problems.append(Problem(path, what.removeprefix(f"{path}: ")))
        else:
            self.problems.append(Problem(path, what, block[0] // BLOCK_NBYTES, *block))

    def names(self, path: str) -> bool:
        """Whether a problem of this file is known."""
        return path in self._named

    def read(self, nbytes: int) -> None:
        """Counts bytes as checked."""
        self.nbytes += nbytes
        self.progress(self.nbytes)


def verify_path(path: str, progress: Callable[[int], None] = _ignore, integrity: Integrity = XXH3) -> Report:
    """Check of whatever path is: a checkpoint, a job's directory, a store, or an arena."""
    path = _real(path)
    report = Report(path, progress=progress, integrity=integrity)
    try:
        names = open_files(path, integrity).names()
    except OSError as error:
        report.problem(path, error.strerror or str(error))
        return report
    if _is_checkpoint(path, names):
        _verify_checkpoint(path, report)
    elif _is_job(names):
        _verify_job(path, report)
    else:
        jobs = [os.path.join(path, name) for name in names if is_job_name(name)]
        jobs = [job for job in jobs if _is_job(_names(job))]
        for job in jobs:
            _verify_job(job, report)
        for slot in _slots_in(path):
            _verify_slot(slot, report)
        nothing = not (report.checked or report.problems or report.notes or jobs)
        if nothing and arena_paths.LOCK in names:
            report.notes.append(f"{path}: an arena with nothing staged")
        elif nothing:
            report.problem(path, "no checkpoint, job, store or arena is here")
    return report


def _real(path: str) -> str:
    """The absolute path, of what is linked to if it is a link: a checkpoint is held against its directory's name."""
    path = absolute(path)
    return real(path) if os.path.islink(path) else path


def _names(path: str) -> list[str]:
    try:
        return open_files(path, XXH3).names()  # names alone are looked at
    except OSError:
        return []


def _is_checkpoint(path: str, names: list[str]) -> bool:
    base = os.path.basename(path)
    named = parse_dirname(base) is not None or parse_partial_dirname(base) is not None
    return named or has_records(names)


def _is_job(names: list[str]) -> bool:
    return any(n == INCARNATIONS_DIR or parse_dirname(n) or parse_partial_dirname(n) for n in names)


def _slots_in(path: str) -> list[str]:
    """Slots of the arena at path, or of one job of it. Nothing else is visited: other files are not ours."""
    below = os.path.join(path, arena_paths.JOBS)
    directories = [path, below, *(os.path.join(below, name) for name in _names(below))]
    found = [os.path.join(directory, name) for directory in directories for name in _names(directory)]
    return sorted(name for name in found if name.endswith(arena_paths.SLOT_SUFFIX))


# -- a job --


def _verify_job(path: str, report: Report) -> None:
    for name in _names(path):
        child = os.path.join(path, name)
        if parse_dirname(name) is not None:
            _verify_checkpoint(child, report)
        elif parse_partial_dirname(name) is not None:
            report.notes.append(f"{child}: not a checkpoint: left unfinished, unless a daemon is at work on it")
        elif name.startswith(TRASH_PREFIX):
            report.notes.append(f"{child}: left by a removal, may be deleted unless a daemon is at work")


# -- a checkpoint --


def _verify_checkpoint(path: str, report: Report) -> None:
    report.checked.append(path)
    files = open_files(path, report.integrity)
    opened = Opened(files)
    for found in open_committed(opened, EVERYTHING):
        if isinstance(found.cause, IntegrityError):  # proved in another way: of the rest nothing can be said
            report.problem(found.path, f"{found.what}; {found.cause.hint}")
            return
        report.problem(found.path, found.what)
    manifest = opened.manifest
    said = manifest or next(iter(opened.votes), None)
    whose = Whose(said.save, said.world_size, Known()) if said else Whose(None, 1, Known())
    for record in opened.records:
        _check_image(files, record, whose, report)
    for stock in manifest.stock if manifest else ():
        _check_stock(files, stock, report)
    if index := manifest and manifest.index:
        report.read(index.nbytes)
        if wrong := index_problem(opened):
            report.problem(files.where(index.name), wrong)
    _check_parity(opened, report)
    outputs = {stock.name for stock in manifest.stock} if manifest else {STOCK_METADATA, STOCK_OBJECTS, STOCK_FILES}
    images = {extent.name for record in opened.records for extent in record.extents()}
    _check_names(opened, images | outputs | ({index.name} if index else set()), report)
    _check_sums(opened, report)
    doubted = doubt(manifest.replicas) if manifest else ""
    report.notes += [f"{path}: {doubted}"] if doubted else []


def _check_sums(opened: Opened, report: Report) -> None:
    """What the manifest says of all its votes together, held against them where all are sound."""
    manifest, records = opened.manifest, opened.records
    if manifest is None or opened.committed is None or len(records) != manifest.world_size:
        return
    said = manifest.files, manifest.nbytes, manifest.replicas, manifest.metadata, manifest.dropped
    found = (
        sum(len(record.extents()) for record in records), sum(record.nbytes for record in records),
        compared({record.rank: record.attestations for record in records}),
        metadata_in(records[0].leaves), dropped_by(vote.dropped for vote in opened.votes),
    )  # fmt: skip
    if said != found:
        report.problem(
            opened.files.where(opened.committed.manifest), f"says {said} of its images, its votes say {found}"
        )


def _check_names(opened: Opened, expected: set[str], report: Report) -> None:
    files, selected = opened.files, opened.committed and opened.committed.manifest
    for name in _names(files.location):
        if is_temp(name):
            report.notes.append(
                f"{files.where(name)}: left by a killed writer, may be deleted unless a daemon is at work"
            )
        elif is_manifest(name):
            if selected and name != selected:
                report.notes.append(f"{files.where(name)}: a manifest that {COMMITTED} does not select, may be deleted")
        elif name not in expected | _RECORDS:
            report.problem(files.where(name), "no part of the checkpoint")


def _check_parity(opened: Opened, report: Report) -> None:
    files, records = opened.files, opened.parity
    report.files += len(records)
    for found in check_parity(files, records):
        if isinstance(found, int):
            report.read(found)
        elif found[2] is not None or not report.names(found[0]):
            report.problem(*found)
    report.notes += strangers(files, records, opened.manifest)


def _check_stock(files: StoredFiles, stock: StockFile, report: Report) -> None:
    """Of a file for stock readers whose digest is right: the one that they unpickle names nothing but metadata."""
    path = files.where(stock.name)
    report.files += 1
    if report.names(path):
        return
    report.read(stock.nbytes)
    if stock.name != STOCK_METADATA:
        return
    try:
        stranger = stranger_in(files.read(stock.name, stock.nbytes))
    except OSError as error:
        report.problem(path, error.strerror or str(error))
        return
    if stranger:
        report.problem(path, f"no metadata of torch: {stranger}; do not load it with a reader that unpickles")


@dataclass(frozen=True)
class _Part:
    """A file of an image, or the slot that holds all of it. Bytes are counted in the image."""

    path: str
    start: int
    nbytes: int
    stop: int  # where the next one begins, after zeros
    file: StoredFile


def _check_image(files: StoredFiles, record: FileRecord, whose: Whose, report: Report) -> None:
    """All files of a rank, and what they should be together."""
    with contextlib.ExitStack() as stack:
        parts = []
        extents = record.extents()
        stops = [*(extent.start for extent in extents[1:]), record.nbytes]
        for (name, start, nbytes), stop in zip(extents, stops, strict=True):
            where = files.where(name)
            report.files += 1
            try:
                file = stack.enter_context(contextlib.closing(files.open(name, cached=True)))
                found = file.nbytes
            except OSError as error:
                if not report.names(where):
                    report.problem(where, error.strerror or str(error))
                continue
            if found != nbytes and not report.names(where):
                report.problem(where, f"{found} bytes, should be {nbytes}")
            parts.append(_Part(where, start, nbytes, stop, file))
        _check_parts(parts, record, whose, report)


def _check_parts(parts: list[_Part], record: FileRecord, whose: Whose, report: Report) -> None:
    """Blocks, and the rank's own account of the files against them and its record."""
    if not parts:
        return
    _check_blocks(parts, record, report)
    try:
        layout = layout_of(record, whose.world_size, where=parts[0].path, known=whose.known)
        decode_leaves(record.leaves, where=parts[0].path)
    except DamagedError as error:
        report.problem(parts[0].path, str(error))
        return
    if whose.save is None:
        return
    for start, own in file_layouts(layout):
        for part in parts:
            if part.start <= start < part.stop and 0 < own.header_nbytes <= MAX_HEADER_NBYTES:
                _check_header(part, start, own, whose.save, report)


def _check_blocks(parts: list[_Part], record: FileRecord, report: Report) -> None:
    """Every block that the record has a digest for. Those of which a file is missing have been reported with it."""
    if not record.digests:
        return  # a slot that is not digested yet
    buffer = memoryview(bytearray(min(BLOCK_NBYTES, max(record.nbytes, 1))))
    ended = set[str]()  # files that are shorter than the record says: of a large one thousands of blocks are missing
    for index, (start, stop) in enumerate(blocks(record.nbytes)):
        inside = [part for part in parts if part.start < stop and start < part.stop]
        if sum(min(part.stop, stop) - max(part.start, start) for part in inside) < stop - start:
            continue
        if not ended.isdisjoint(part.path for part in inside):
            continue
        at = inside[0]
        block = (start, stop)
        try:
            for at in inside:
                first, end, last = max(at.start, start), min(at.stop, stop), min(at.start + at.nbytes, stop)
                buffer[max(first, last) - start : end - start] = bytes(end - max(first, last))
                read_exactly(at.file, first - at.start, buffer[first - start : max(first, last) - start])
        except EOFError:
            ended.add(at.path)
            after = ", and whatever comes after it in the file" if stop < at.stop else ""
            report.problem(at.path, f"missing{after}", block)
            continue
        except OSError as error:
            report.problem(at.path, f"cannot be read: {error}", block)
            continue
        if (
            report.integrity.digest(buffer[: stop - start])
            != record.digests[index * DIGEST_NBYTES : (index + 1) * DIGEST_NBYTES]
        ):
            others = f" (of it and of {', '.join(p.path for p in inside[1:])})" if inside[1:] else ""
            report.problem(inside[0].path, f"digest does not match, the bytes are damaged{others}", block)
        report.read(stop - start)


def _check_header(part: _Part, start: int, layout: Layout, save: SaveId, report: Report) -> None:
    """The safetensors header at start of the image."""
    try:
        found = read_some(part.file, start - part.start, layout.header_nbytes)
        check_header(found, layout, save, where=part.path)
    except (OSError, DamagedError) as error:
        report.problem(part.path, str(error))


# -- a slot --


def _verify_slot(path: str, report: Report) -> None:
    try:
        with contextlib.closing(OpenedFile(open_regular(path))) as file:
            nbytes = file.nbytes
            pages = read_some(file, max(0, nbytes - SEALS_NBYTES), SEALS_NBYTES)
            index, _, seal = decode_seals(pages, report.integrity, where=path)
            other = pages[(1 - index) * SEAL_NBYTES : (2 - index) * SEAL_NBYTES]
            if any(other) and not is_page(other, report.integrity):
                report.notes.append(f"{path}: seal page {1 - index} is torn; the other one is in force ({seal.state})")
            report.checked.append(path)
            if seal.state == SlotState.FREE:
                return
            if seal.content_nbytes > nbytes - SEALS_NBYTES:
                report.problem(path, f"{nbytes} bytes, too few for the {seal.content_nbytes} that its seal says")
                return
            _check_slot(file, path, seal, report)
    except (OSError, DamagedError) as error:
        report.problem(path, str(error))


def _check_slot(file: StoredFile, path: str, seal: Seal, report: Report) -> None:
    report.files += 1
    parts = seal.tail
    digested = seal.state == SlotState.DIGESTED
    if not digested:
        del parts["digest table"]
        report.notes.append(f"{path}: {seal.save}, rank {seal.rank}: sealed, not yet digested")
    sound = {}
    for part, (offset, nbytes, expected) in parts.items():
        data = read_some(file, offset, nbytes)
        if report.integrity.digest(data, Purpose(part)) != expected:
            report.problem(path, f"{part} (bytes {offset} to {offset + nbytes - 1}): digest does not match")
        else:
            sound[part] = data
    if "layout" not in sound or "leaves" not in sound:
        return
    try:
        layout = parted(sound["layout"], path)
    except DamagedError as error:
        report.problem(path, str(error))
        return
    record = FileRecord(
        name=file_name(seal.rank),
        rank=seal.rank,
        nbytes=seal.image_nbytes,
        digests=sound.get("digest table", b""),
        leaves=sound["leaves"],
        **layout._asdict(),
        parts=seal.parts,
        raw=seal.raw,
    )
    whose = Whose(seal.save, seal.world_size, Known())
    _check_parts([_Part(path, 0, seal.image_nbytes, seal.image_nbytes, file)], record, whose, report)
