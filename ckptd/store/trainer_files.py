"""Which files of a checkpoint are a trainer's own, by the names that it has for them: the checkpoint's `files.json`."""

import os
from collections.abc import Iterable

import msgspec

from ckptd.shared.base.decoding import decoded
from ckptd.shared.base.errors import DamagedError
from ckptd.shared.format.layout import Layout, SavedFor, is_plain, is_trainer_file
from ckptd.shared.format.manifest import STOCK_FILES
from ckptd.shared.format.origin import MARKER
from ckptd.shared.format.stored_files import StoredFiles

_MAX_INDEX_NBYTES = 1 << 30


class TrainerFiles(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Content of `files.json`: the trainer's names of the checkpoint's files. saved_for: to be compared, no more."""

    save_id: str
    files: dict[str, str]  # the trainer's name, and the file's in the checkpoint's directory
    saved_for: SavedFor | None = None


_decoder = msgspec.json.Decoder(TrainerFiles)


def index_of(layouts: Iterable[Layout], save_id: str) -> bytes | None:
    """`files.json` of a checkpoint, None when it has no trainer's files. Of two ranks' of one name the lower has it."""
    files: dict[str, str] = {}
    saved_for = None
    raw = False
    for layout in layouts:
        raw = raw or layout.raw
        saved_for = saved_for or layout.saved_for
        for name, extent in zip(layout.names, layout.extents()[1:], strict=False):
            files.setdefault(name, extent.name)
    if not raw:
        return None
    index = TrainerFiles(save_id=save_id, files=files, saved_for=saved_for)
    return msgspec.json.format(msgspec.json.encode(index)) + b"\n"


def read_index(files: StoredFiles) -> TrainerFiles:
    """What anybody may have written: good for keeping something from being done, and for nothing else."""
    return decode_index(files.read(STOCK_FILES, _MAX_INDEX_NBYTES), files.where(STOCK_FILES))


def decode_index(raw: bytes, where: str) -> TrainerFiles:
    """The index in raw. Raises DamagedError, naming where, for what is none, or has a name that leads elsewhere."""
    index = decoded(_decoder.decode, raw, where)
    if not is_plain(index.saved_for):
        raise DamagedError(f"{where}: a directory that is no plain path")
    for name, file in index.files.items():
        if not is_trainer_file(name) or name == MARKER or not is_trainer_file(file) or "/" in file:
            raise DamagedError(f"{where}: a file's name leads elsewhere")
    return index


def sources_of(path: str, index: TrainerFiles) -> dict[str, str]:
    """The trainer's name of each file of the checkpoint at path, and where the file is."""
    return {name: os.path.join(path, file) for name, file in index.files.items()}


def how_to_publish(path: str) -> str:
    """What to type where a checkpoint's place is not known any more."""
    return f"type: ckptd publish {path} --to DIRECTORY"
