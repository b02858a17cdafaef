"""The drained parity of a checkpoint, held against its manifest: every record and every block."""

import os
from collections.abc import Iterator, Sequence

from ckptd.checkpoint.repair.checkpoint import read_record
from ckptd.checkpoint.repair.files import OpenFiles, block_buffer
from ckptd.shared.base.errors import DamagedError
from ckptd.shared.format.digest import DIGEST_NBYTES, blocks
from ckptd.shared.format.integrity import XXH3, Integrity
from ckptd.shared.format.manifest import PARITY_DIR, ParityRecord
from ckptd.system.files import FileLayer, is_temp

Found = tuple[str, str, tuple[int, int] | None]  # path, what is wrong, which bytes


def check_parity(directory: str, records: Sequence[ParityRecord], integrity: Integrity = XXH3) -> Iterator[Found | int]:
    """What is wrong with the files of these records, and after each block its bytes. Reads only."""
    buffer = block_buffer() if records else memoryview(b"")
    with OpenFiles() as files:
        for record in records:
            path = os.path.join(directory, PARITY_DIR, record.name)
            try:
                nbytes = FileLayer().size(path)
                table = read_record(directory, record, integrity).table
            except FileNotFoundError:
                yield path, "missing", None
                continue
            except (OSError, DamagedError) as error:
                yield path, str(error), None
                continue
            if nbytes != record.file_nbytes:
                yield path, f"{nbytes} bytes, should be {record.file_nbytes}", None
            for index, (start, stop) in enumerate(blocks(record.nbytes)):
                block = buffer[: stop - start]
                try:
                    files.read(path, start, block)
                except (OSError, EOFError) as error:
                    yield path, f"cannot be read: {error}", (start, stop)
                    continue
                if integrity.digest(block) != table[index * DIGEST_NBYTES : (index + 1) * DIGEST_NBYTES]:
                    yield path, "digest does not match, the bytes are damaged", (start, stop)
                yield stop - start


def strangers(directory: str, records: Sequence[ParityRecord]) -> Iterator[str]:
    """Notes on other files beside the parity: a late copy that no vote names is no damage."""
    folder, known = os.path.join(directory, PARITY_DIR), {record.name for record in records}
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return
    for name in names:
        if is_temp(name):
            yield f"{os.path.join(folder, name)}: left by a killed writer, may be deleted unless a daemon is at work"
        elif name not in known:
            yield f"{os.path.join(folder, name)}: no vote names it, may be deleted"
