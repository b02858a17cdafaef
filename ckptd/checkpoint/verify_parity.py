"""The drained parity of a checkpoint, held against the votes: every record and every block."""

import contextlib
import itertools
from collections.abc import Iterator, Sequence

from ckptd.checkpoint.repair.checkpoint import read_record
from ckptd.checkpoint.repair.files import OpenFiles, block_buffer
from ckptd.checkpoint.report import Found
from ckptd.checkpoint.verify_image import EVERY_BLOCK
from ckptd.shared.base.errors import DamagedError
from ckptd.shared.format.committed import vote_places
from ckptd.shared.format.digest import DIGEST_NBYTES, blocks
from ckptd.shared.format.manifest import Manifest, ParityRecord
from ckptd.shared.format.set_places import SETS_DIR
from ckptd.shared.format.stored_files import StoredFiles
from ckptd.system.files import is_temp


def check_parity(
    files: StoredFiles, records: Sequence[ParityRecord], span: range = EVERY_BLOCK, *, cached: bool
) -> Iterator[Found | int]:
    """What is wrong with the files of these records, and after each block its bytes. Reads only, as OpenFiles does it.

    span: only these blocks, by number; what concerns a file as a whole is said with the first of all.
    """
    buffer = block_buffer() if records else memoryview(b"")
    with OpenFiles(files, cached=cached) as opened:
        for record in records:
            name = record.place
            path = files.where(name)
            try:
                nbytes = files.size(name)
                table = read_record(opened, record).table
            except FileNotFoundError:
                if span.start == 0:
                    yield path, "missing", None
                continue
            except (OSError, DamagedError) as error:
                if span.start == 0:
                    yield path, str(error), None
                continue
            if nbytes != record.file_nbytes and span.start == 0:
                yield path, f"{nbytes} bytes, should be {record.file_nbytes}", None
            for index, (start, stop) in itertools.islice(enumerate(blocks(record.nbytes)), span.start, span.stop):
                block = buffer[: stop - start]
                try:
                    opened.read(name, start, block)
                except (OSError, EOFError) as error:
                    yield path, f"cannot be read: {error}", (start, stop)
                    continue
                if files.integrity.digest(block) != table[index * DIGEST_NBYTES : (index + 1) * DIGEST_NBYTES]:
                    yield path, "digest does not match, the bytes are damaged", (start, stop)
                yield stop - start


def strangers(files: StoredFiles, records: Sequence[ParityRecord], manifest: Manifest | None) -> Iterator[str]:
    """Notes on files in the sets' directories: votes that the manifest does not pin, parity that no vote names."""
    known = {record.place for record in records}
    votes: set[str] = set()
    with contextlib.suppress(OSError):  # said already
        votes = set(vote_places(files))
    pinned = votes if manifest is None else set(map(manifest.place_of, manifest.votes))
    for place in _below_sets(files):
        where, name = files.where(place), place.rpartition("/")[2]
        if is_temp(name):
            yield f"{where}: left by a killed writer, may be deleted unless a daemon is at work"
        elif place in votes - pinned:
            yield f"{where}: a vote that the manifest does not pin: its node voted again; may be deleted"
        elif place not in known | pinned:
            yield f"{where}: no vote names it, may be deleted"


def _below_sets(files: StoredFiles) -> Iterator[str]:
    try:
        sets = files.names(SETS_DIR)
    except OSError:
        return
    for name in sets:
        try:
            yield from (f"{SETS_DIR}/{name}/{found}" for found in files.names(f"{SETS_DIR}/{name}"))
        except OSError:
            yield f"{SETS_DIR}/{name}"
