"""The contents of another program's checkpoint, as ckptd fits a checkpoint to a state, and reads of its byte ranges."""

import ctypes
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ckptd.shared.base.errors import DamagedError
from ckptd.shared.files.mapping import Mapping
from ckptd.shared.files.regular import open_regular
from ckptd.shared.format.layout import Path
from ckptd_client._load.reader import Target
from ckptd_client._local.destination import Place, deliver
from ckptd_client._state.reshard import Saved

_READERS = 4
_PIECE_NBYTES = 16 << 20


@dataclass(slots=True)
class Foreign:
    """Tensors by name, in boxes of numbered sources; functions that read the sources; plain values."""

    kind: str
    boxes: dict[str, list[Saved]] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)
    sources: list[Callable[[list[Target]], None]] = field(default_factory=list)  # fills targets from source i
    values: dict[str, Callable[[], Any]] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)  # name to reason: an error only if the state wants it


class _Piece(NamedTuple):
    offset: int
    nbytes: int
    place: Place


def read_ranges(path: str, targets: Iterable[Target], *, base: int = 0) -> None:
    """Fills the targets from a file; their offsets count from base. Raises DamagedError if it is too short, OSError."""
    pieces = [piece for target in targets for piece in _split(target, base)]
    fd = open_regular(path, follow=True)
    try:
        with ThreadPoolExecutor(_READERS) as pool:
            parts = [pieces[i::_READERS] for i in range(min(_READERS, len(pieces)))]
            list(pool.map(lambda part: _read_all(fd, path, part), parts))
    finally:
        os.close(fd)


def _split(target: Target, base: int) -> Iterable[_Piece]:
    for done in range(0, target.nbytes, _PIECE_NBYTES):
        nbytes = min(_PIECE_NBYTES, target.nbytes - done)
        yield _Piece(base + target.data_offset + done, nbytes, target.place(done, nbytes))


def _read_all(fd: int, path: str, pieces: list[_Piece]) -> bool:
    for piece in pieces:
        _read(fd, path, piece)
    return True


def _read(fd: int, path: str, piece: _Piece) -> None:
    if isinstance(piece.place, int):
        _read_to(fd, path, piece.offset, memoryview((ctypes.c_char * piece.nbytes).from_address(piece.place)).cast("B"))
    else:
        block = Mapping(None, piece.nbytes)
        _read_to(fd, path, piece.offset, block.view)
        deliver([(0, piece.place, piece.nbytes)], block.address)


def _read_to(fd: int, path: str, offset: int, view: memoryview) -> None:
    done = 0
    while done < len(view):
        got = os.preadv(fd, [view[done:]], offset + done)
        if got == 0:
            raise DamagedError(f"{path}: ends at byte {offset + done}, something should lie there")
        done += got
