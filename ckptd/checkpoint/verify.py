"""Offline check of checkpoints on a store and of slots in an arena: every digest, every record, named where it fails.

Reads only, with the page cache, one block in memory at a time. Damage is reported, never raised.
"""

import contextlib
import os
from collections.abc import Callable

from ckptd.checkpoint.report import Report, ignore
from ckptd.checkpoint.verify_image import Part, Whose, check_image, check_parts
from ckptd.checkpoint.verify_index import index_problem
from ckptd.checkpoint.verify_parity import check_parity, strangers
from ckptd.shared.base.errors import DamagedError, IntegrityError
from ckptd.shared.base.ids import file_name, is_job_name, parse_dirname, parse_partial_dirname
from ckptd.shared.files.regular import open_regular
from ckptd.shared.format import arena_paths
from ckptd.shared.format.committed import EVERYTHING, INCARNATIONS_DIR, TRASH_PREFIX, Opened, open_committed
from ckptd.shared.format.dropped import dropped_by
from ckptd.shared.format.integrity import XXH3, Integrity, Purpose
from ckptd.shared.format.manifest import (
    COMMITTED,
    LINKED,
    STOCK_FILES,
    STOCK_METADATA,
    STOCK_OBJECTS,
    UNPUBLISHED,
    FileRecord,
    StockFile,
)
from ckptd.shared.format.packed_layout import Known, parted
from ckptd.shared.format.replica_attestations import compared, doubt
from ckptd.shared.format.root_names import has_records, is_manifest
from ckptd.shared.format.save_metadata import metadata_in
from ckptd.shared.format.set_places import SETS_DIR
from ckptd.shared.format.slot import SEAL_NBYTES, SEALS_NBYTES, Seal, SlotState, decode_seals, is_page
from ckptd.shared.format.stored_files import StoredFile, StoredFiles, read_some
from ckptd.shared.stores.directory import OpenedFile
from ckptd.shared.stores.kinds import absolute, open_files, real
from ckptd.shared.torchfile.metadata_read import stranger_in
from ckptd.system.files import is_temp

_RECORDS = frozenset({COMMITTED, SETS_DIR, UNPUBLISHED, LINKED})


def verify_path(path: str, progress: Callable[[int], None] = ignore, integrity: Integrity = XXH3) -> Report:
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
    opened = verify_records(path, report)
    if opened is None:
        return
    said = opened.manifest or next(iter(opened.votes), None)
    whose = Whose(said.save, said.world_size, Known()) if said else Whose(None, 1, Known())
    for record in opened.records:
        check_image(opened.files, record, whose, report)
    _check_parity(opened, report)


def verify_records(path: str, report: Report) -> Opened | None:
    """Checks all of the checkpoint at path but the blocks of images and of parity.

    None: it is proved in another way than asked for, and of the rest nothing can be said.
    """
    report.checked.append(path)
    files = open_files(path, report.integrity)
    opened = Opened(files)
    for found in open_committed(opened, EVERYTHING):
        if isinstance(found.cause, IntegrityError):
            report.problem(found.path, f"{found.what}; {found.cause.hint}")
            return None
        report.problem(found.path, found.what)
    manifest = opened.manifest
    for stock in manifest.stock if manifest else ():
        _check_stock(files, stock, report)
    if index := manifest and manifest.index:
        report.read(index.nbytes)
        if wrong := index_problem(opened):
            report.problem(files.where(index.name), wrong)
    outputs = {stock.name for stock in manifest.stock} if manifest else {STOCK_METADATA, STOCK_OBJECTS, STOCK_FILES}
    images = {extent.name for record in opened.records for extent in record.extents()}
    _check_names(opened, images | outputs | ({index.name} if index else set()), report)
    _check_sums(opened, report)
    report.notes += strangers(files, opened.parity, manifest)
    doubted = doubt(manifest.replicas) if manifest else ""
    report.notes += [f"{path}: {doubted}"] if doubted else []
    return opened


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
    report.take(check_parity(files, records, cached=report.cached))


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
    check_parts([Part(path, 0, seal.image_nbytes, seal.image_nbytes, file)], record, whose, report)
