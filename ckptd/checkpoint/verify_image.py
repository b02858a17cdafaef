"""Checks the bytes of one image: every block against its digest, its headers against the rank's own account of it."""

import contextlib
import itertools
import mmap
from dataclasses import dataclass
from typing import NamedTuple

from ckptd.checkpoint.report import Report
from ckptd.shared.base.errors import DamagedError
from ckptd.shared.base.ids import SaveId
from ckptd.shared.format.digest import BLOCK_NBYTES, DIGEST_NBYTES, blocks
from ckptd.shared.format.header import MAX_HEADER_NBYTES, check_header
from ckptd.shared.format.layout import Layout, decode_leaves, file_layouts
from ckptd.shared.format.manifest import FileRecord, layout_of
from ckptd.shared.format.packed_layout import Known
from ckptd.shared.format.slot import align_up
from ckptd.shared.format.stored_files import StoredFile, StoredFiles, read_some

EVERY_BLOCK = range(1 << 62)


class Whose(NamedTuple):
    """The save, if known, and the number of ranks; and what ranks have alike of their layouts."""

    save: SaveId | None
    world_size: int
    known: Known


@dataclass(frozen=True)
class Part:
    """A file of an image, or the slot that holds all of it. Bytes are counted in the image."""

    path: str
    start: int
    nbytes: int
    stop: int  # where the next one begins, after zeros
    file: StoredFile


def check_image(
    files: StoredFiles, record: FileRecord, whose: Whose, report: Report, span: range = EVERY_BLOCK
) -> None:
    """All files of a rank, and what they should be together.

    span: only these blocks, by number; what concerns a file as a whole is said with the first of all.
    """
    with contextlib.ExitStack() as stack:
        parts = []
        extents = record.extents()
        stops = [*(extent.start for extent in extents[1:]), record.nbytes]
        for (name, start, nbytes), stop in zip(extents, stops, strict=True):
            where = files.where(name)
            report.files += span.start == 0
            try:
                file = stack.enter_context(contextlib.closing(files.open(name, cached=report.cached)))
                found = file.nbytes
            except OSError as error:
                if span.start == 0 and not report.names(where):
                    report.problem(where, error.strerror or str(error))
                continue
            if found != nbytes and span.start == 0 and not report.names(where):
                report.problem(where, f"{found} bytes, should be {nbytes}")
            parts.append(Part(where, start, nbytes, stop, file))
        check_parts(parts, record, whose, report, span)


def check_parts(parts: list[Part], record: FileRecord, whose: Whose, report: Report, span: range = EVERY_BLOCK) -> None:
    """Blocks, and the rank's own account of the files against them and its record."""
    if not parts:
        return
    _check_blocks(parts, record, report, span)
    if span.start > 0:
        return
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


def _check_blocks(parts: list[Part], record: FileRecord, report: Report, span: range) -> None:
    """Every block that the record has a digest for. Those of which a file is missing have been reported with it."""
    if not record.digests:
        return  # a slot that is not digested yet
    buffer = memoryview(mmap.mmap(-1, align_up(min(BLOCK_NBYTES, max(record.nbytes, 1)))))  # whole pages, at a page
    ended = set[str]()  # files that are shorter than the record says: of a large one thousands of blocks are missing
    for index, (start, stop) in itertools.islice(enumerate(blocks(record.nbytes)), span.start, span.stop):
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
                _fill(at.file, first - at.start, buffer[first - start :], max(first, last) - first)
                buffer[max(first, last) - start : end - start] = bytes(end - max(first, last))
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


def _fill(file: StoredFile, offset: int, into: memoryview, nbytes: int) -> None:
    """nbytes at the begin of into, which has room for whole pages. Raises OSError, EOFError where the file ends."""
    found = file.read(into[: align_up(nbytes)], offset, nbytes)
    if found < nbytes:
        raise EOFError(f"ends at byte {offset + found}")


def _check_header(part: Part, start: int, layout: Layout, save: SaveId, report: Report) -> None:
    """The safetensors header at start of the image."""
    try:
        found = read_some(part.file, start - part.start, layout.header_nbytes)
        check_header(found, layout, save, where=part.path)
    except (OSError, DamagedError) as error:
        report.problem(part.path, str(error))
