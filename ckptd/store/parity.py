"""A node's parity of a save to the store: the arena's file, without its seals, beside the images that it protects."""

import os

from ckptd.parity.record import decode_record, decode_seals
from ckptd.shared.base.errors import CkptdError, DamagedError
from ckptd.shared.base.ids import JobKey
from ckptd.shared.files.mapping import Mapping
from ckptd.shared.format.digest import DIGEST_NBYTES, blocks
from ckptd.shared.format.integrity import Integrity
from ckptd.shared.format.manifest import PARITY_DIR
from ckptd.shared.format.slot import SEALS_NBYTES, align_up
from ckptd.store.files import FileLayer
from ckptd.store.image_writer import Flow, Image, make_partial, sync_partial, write_image
from ckptd.store.messages import DrainParity
from ckptd.store.scan import Place, committed_at


class ParityChangedError(CkptdError):
    """The arena's file does not hold the parity that was to be drained, or no longer."""

    code = "parity-changed"


def drain_parity(fs: FileLayer, store: str, order: DrainParity) -> None:
    """The parity in the save's partial directory, data and names synced. Nothing to do when the save is committed.

    Every block is compared with its digest first. Raises OSError of store or arena, DamagedError, ParityChangedError.
    """
    place, record = Place(JobKey(store, order.job), order.save), order.parity
    if committed_at(fs, place) is not None:
        return
    make_partial(fs, place)
    directory = os.path.join(place.partial, PARITY_DIR)
    if fs.mkdir(directory):
        sync_partial(fs, place)
    fd = os.open(order.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:

        def check() -> None:
            nbytes = os.fstat(fd).st_size
            pages = os.pread(fd, SEALS_NBYTES, max(0, nbytes - SEALS_NBYTES))
            seal = decode_seals(pages, fs.integrity, where=order.path)[2]
            held = (seal.job, seal.nbytes, seal.record_nbytes, seal.record_digest)
            if held != (place.key, record.nbytes, record.record_nbytes, record.record_digest):
                raise ParityChangedError(f"{order.path}: does not hold the parity of {order.save}")

        check()
        source = Mapping(fd, align_up(record.file_nbytes), writable=False)
        try:
            _check_blocks(source.view, order, fs.integrity)
            image = Image(os.path.join(PARITY_DIR, record.name), record.file_nbytes, source.view, check)
            write_image(fs, place, image, Flow(bytes_per_s=order.bytes_per_s))
        finally:
            source.close()
    finally:
        os.close(fd)
    fs.fsync_dir(directory)


def _check_blocks(view: memoryview, order: DrainParity, integrity: Integrity) -> None:
    parity = order.parity
    raw = bytes(view[parity.nbytes : parity.file_nbytes])
    table = decode_record(raw, parity.nbytes, parity.record_digest, order.path, integrity).table
    for index, (start, stop) in enumerate(blocks(parity.nbytes)):
        with view[start:stop] as block:
            if integrity.digest(block) != table[index * DIGEST_NBYTES : (index + 1) * DIGEST_NBYTES]:
                raise DamagedError(f"parity file {order.path} block {index} does not match its digest")
