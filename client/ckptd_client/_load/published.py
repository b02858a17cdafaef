"""Opens a directory that ckptd published for a trainer: the checkpoint on the store that has its files.

There, because a checkpoint's digests lie there. The directory's own files are second names of the store's, or links.
"""

import os

import msgspec

from ckptd.shared.base.decoding import MALFORMED
from ckptd.shared.base.errors import DamagedError, UsageError
from ckptd.shared.base.ids import JobKey, parse_dirname
from ckptd.shared.base.wording import cut
from ckptd.shared.files.regular import contents
from ckptd.shared.format.committed import RECORDS, open_sound
from ckptd.shared.format.integrity import Integrity, Purpose
from ckptd.shared.format.manifest import STOCK_METADATA, Manifest
from ckptd.shared.format.origin import MARKER, Origin
from ckptd.shared.stores.kinds import open_files
from ckptd_client._load.checkpoint import Checkpoint, open_directory

_MAX_MARKER_NBYTES = 64 << 20  # it lists the files that were published


def open_published(directory: str, integrity: Integrity) -> Checkpoint | None:
    """The checkpoint that was published in the directory; None if it has no marker.

    Raises UsageError when it is gone, or something else was saved over it; DamagedError, OSError.
    """
    marker = os.path.join(directory, MARKER)
    try:
        raw = contents(marker, _MAX_MARKER_NBYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise DamagedError(f"{marker}: {error.strerror}", hint=_plainly(directory)) from error
    origin = _decoded(raw, marker, directory)
    stored = open_files(origin.path, integrity)
    try:
        stored.names()
    except (FileNotFoundError, NotADirectoryError):
        text = f"{directory}: its checkpoint {origin.path} is gone, and its digests with it"
        raise UsageError(text, hint=_plainly(directory)) from None
    manifest = open_sound(stored, RECORDS, job=origin.job)
    if manifest.save.text != origin.save_id:
        text = f"{marker}: says save {origin.save_id!r}, but {origin.path} holds {manifest.save}"
        raise DamagedError(text, hint=_plainly(directory))
    _check_listing(directory, origin, manifest, integrity)
    return open_directory(origin.path, manifest.save, integrity)


def _decoded(raw: bytes, marker: str, directory: str) -> Origin:
    """The decoded marker. Raises DamagedError, with its path, unless it names a checkpoint of a job."""
    try:
        origin = msgspec.json.decode(raw, type=Origin)
        msgspec.convert((origin.store, origin.job), JobKey)
    except MALFORMED as error:
        raise DamagedError(f"{marker}: {cut(error)}", hint=_plainly(directory)) from error
    if parse_dirname(origin.checkpoint) is None:
        raise DamagedError(f"{marker}: {origin.checkpoint!r} is no checkpoint's name", hint=_plainly(directory))
    return origin


def _check_listing(directory: str, origin: Origin, manifest: Manifest, integrity: Integrity) -> None:
    """Raises UsageError if the directory has another index: it was overwritten. It may have none yet."""
    there = os.path.join(directory, STOCK_METADATA)
    if not os.path.lexists(there):
        return
    stock = next((file for file in manifest.stock if file.name == STOCK_METADATA), None)
    try:
        data = contents(there, stock.nbytes, follow=True) if stock else b""
    except OSError:
        data = b""
    if stock is None or (len(data), integrity.digest(data, Purpose.STOCK)) != (stock.nbytes, stock.digest):
        text = f"{there} is not that of {origin.path}: something else was saved here"
        raise UsageError(text, hint=_plainly(directory))


def _plainly(directory: str) -> str:
    return f"dcp.load(state, checkpoint_id={directory!r}) or load_from({directory!r}, state), without digests"
