"""Damaged images of a committed checkpoint written again from slots that hold the same save."""

import contextlib
from collections.abc import Callable, Mapping

from ckptd.checkpoint.repair.checkpoint import held_checkpoint
from ckptd.checkpoint.repair.files import Bytes, OpenFiles, block_buffer
from ckptd.checkpoint.repair.target import Target
from ckptd.shared.base.errors import CkptdError
from ckptd.shared.base.ids import file_name
from ckptd.shared.files.regular import open_regular
from ckptd.shared.format.integrity import Integrity
from ckptd.shared.format.stored_files import read_exactly
from ckptd.shared.stores.directory import OpenedFile
from ckptd.store.interface import Held


def mend_from_copies(
    path: str, copies: Mapping[int, str], progress: Callable[[int], None], integrity: Integrity
) -> set[int]:
    """Mends the images of these ranks in the checkpoint at path. copies: by rank, a file that begins with the image.

    Returns the ranks whose images are sound now; of the others the copy is damaged, or is something else by now. Every
    block is compared with the votes before a file gets its name. Raises UsageError, DamagedError, OSError.
    """
    buffer, done, sound = block_buffer(), 0, set[int]()

    def count(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        progress(done)

    with held_checkpoint(path, integrity) as (checkpoint, held):
        images = checkpoint.images
        for rank in sorted(copies.keys() & images.keys()):
            image = images[rank]
            with OpenFiles(checkpoint.files) as files:
                target = Target(file_name(rank), image, image.damage(files, buffer, count), image.misfits())
                if not (target.damage or target.misfits):
                    sound.add(rank)
                    continue
                with contextlib.suppress(OSError, EOFError, CkptdError):
                    _copy(target, copies[rank], held, files, buffer)
                    sound.add(rank)
    return sound


def _copy(target: Target, source: str, held: Held, files: OpenFiles, buffer: memoryview) -> None:
    content: Bytes = target.content
    try:
        with contextlib.closing(OpenedFile(open_regular(source))) as slot:
            target.begin(held, files, buffer)
            for start, stop in target.damage:
                for first in range(start, min(stop, content.nbytes), len(buffer)):
                    data = buffer[: min(len(buffer), stop - first)]
                    read_exactly(slot, first, data)
                    target.write(files, first, data)
        target.check(files, buffer)
        target.publish()
    finally:
        target.close()
