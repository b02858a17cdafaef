"""A node's parity of a save to the store: the arena's file, without its seals, beside the images that it protects."""

import contextlib
import os
from collections.abc import Iterator

from ckptd.parity.record import decode_record, decode_seals
from ckptd.shared.base.errors import CkptdError, DamagedError
from ckptd.shared.base.ids import JobKey
from ckptd.shared.files.mapping import Mapping
from ckptd.shared.format.digest import DIGEST_NBYTES, blocks
from ckptd.shared.format.integrity import Integrity
from ckptd.shared.format.slot import SEALS_NBYTES, align_up
from ckptd.store.image import Flow, Image
from ckptd.store.interface import Store
from ckptd.store.messages import DrainParity


class ParityChangedError(CkptdError):
    """The arena's file does not hold the parity that was to be drained, or no longer."""

    code = "parity-changed"


def drain_parity(store: Store, order: DrainParity) -> None:
    """The parity put to the store. Nothing to do when the save is committed.

    Every block is compared with its digest first. Raises OSError of store or arena, DamagedError, ParityChangedError.
    """
    record, integrity = order.parity, store.integrity

    @contextlib.contextmanager
    def image() -> Iterator[Image]:
        fd = os.open(order.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:

            def check() -> None:
                nbytes = os.fstat(fd).st_size
                pages = os.pread(fd, SEALS_NBYTES, max(0, nbytes - SEALS_NBYTES))
                seal = decode_seals(pages, integrity, where=order.path)[2]
                held = (seal.job, seal.nbytes, seal.record_nbytes, seal.record_digest)
                of = JobKey(store.url, order.job)
                if held != (of, record.nbytes, record.record_nbytes, record.record_digest):
                    raise ParityChangedError(f"{order.path}: does not hold the parity of {order.save}")

            check()
            source = Mapping(fd, align_up(record.file_nbytes), writable=False)
            try:
                _check_blocks(source.view, order, integrity)
                yield Image(record.place, record.file_nbytes, source.view, check)
            finally:
                source.close()
        finally:
            os.close(fd)

    store.put_files(order.job, order.save, record.folder, [image], Flow(bytes_per_s=order.bytes_per_s))


def _check_blocks(view: memoryview, order: DrainParity, integrity: Integrity) -> None:
    parity = order.parity
    raw = bytes(view[parity.nbytes : parity.file_nbytes])
    table = decode_record(raw, parity.nbytes, parity.record_digest, order.path, integrity).table
    for index, (start, stop) in enumerate(blocks(parity.nbytes)):
        with view[start:stop] as block:
            if integrity.digest(block) != table[index * DIGEST_NBYTES : (index + 1) * DIGEST_NBYTES]:
                raise DamagedError(f"parity file {order.path} block {index} does not match its digest")
