"""Damaged images of a committed checkpoint written again from slots that hold the same save."""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

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


@dataclass(frozen=True)
class Copied:
    """Ranks whose images were written again, those whose images were sound, and why the others' were not written."""

    written: set[int] = field(default_factory=set)
    sound: set[int] = field(default_factory=set)
    problems: dict[int, str] = field(default_factory=dict)


def mend_from_copies(
    path: str, copies: Mapping[int, str], progress: Callable[[int], None], integrity: Integrity
) -> Copied:
    """Mends the images of these ranks in the checkpoint at path. copies: by rank, a file that begins with the image.

    A copy may be damaged, or something else by now: every block is compared with the votes before a file gets its
    name. The page cache is passed by. Raises UsageError, DamagedError, OSError.
    """
    buffer, done = block_buffer(), Copied()
    with (
        held_checkpoint(path, integrity, cached=False) as (checkpoint, held),
        OpenFiles(checkpoint.files, cached=False, progress=progress) as files,
    ):
        images = checkpoint.images
        for rank in sorted(copies.keys() & images.keys()):
            image = images[rank]
            target = Target(file_name(rank), image, image.damage(files, buffer), image.misfits())
            if not (target.damage or target.misfits):
                done.sound.add(rank)
                continue
            try:
                _copy(target, copies[rank], held, files, buffer)
                done.written.add(rank)
            except (OSError, EOFError, CkptdError) as error:
                done.problems[rank] = f"from memory: {error}"
    return done


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
