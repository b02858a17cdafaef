"""The `.metadata` of stock readers, made from the ranks' layouts: what torch.distributed.checkpoint would have written.

Without torch and without a collective, from the votes alone, so any committer makes the same bytes. Only an output.
"""

import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from ckptd.shared.base.errors import CkptdError
from ckptd.shared.format.boxes import is_whole
from ckptd.shared.format.dtypes import DTYPES
from ckptd.shared.format.layout import Layout, Path, TensorEntry
from ckptd.shared.format.manifest import STOCK_OBJECTS
from ckptd.shared.format.placement import Shape
from ckptd.shared.format.tensor_holders import FirstHolders
from ckptd.shared.format.together import Alive, silent
from ckptd.shared.torchfile.pickling import DCP_FILESYSTEM, DCP_METADATA, Call, Global, Items, New, dumps

VERSION = "1.0.0"  # of torch's format, which has had no other
# A reader unpickles the whole file on every rank, at some 10 us a box, and the commit waits for it to be made.
MAX_BOXES = 1_000_000
T = TypeVar("T")


class TooManyBoxesError(CkptdError):
    """There are more than MAX_BOXES: stock readers are given no ``.metadata``."""

    code = "too-many-boxes"


_METADATA = Global(DCP_METADATA, "Metadata")
_INDEX = Global(DCP_METADATA, "MetadataIndex")
_TENSOR = Global(DCP_METADATA, "TensorStorageMetadata")
_BYTES = Global(DCP_METADATA, "BytesStorageMetadata")
_CHUNK = Global(DCP_METADATA, "ChunkStorageMetadata")
_PROPERTIES = Global(DCP_METADATA, "TensorProperties")
_STORAGE_META = Global(DCP_METADATA, "StorageMeta")
_STORAGE_INFO = Global(DCP_FILESYSTEM, "_StorageInfo")
_SIZE = Global("torch", "Size")
_STRIDED = Call(Global("torch.serialization", "_get_layout"), ("torch.strided",))
_CONTIGUOUS = Call(Global(DCP_METADATA, "_MEM_FORMAT_ENCODING"), (0,))
_DTYPES = {code: Global("torch", dtype.torch) for code, dtype in DTYPES.items()}


class _Box(NamedTuple):
    file: str
    start: int  # of the archive, in the file
    entry: TensorEntry


class _Content(NamedTuple):
    """What the layouts add up to. Boxes are by offsets, in the order of ranks; the first speaks for its tensor."""

    tensors: dict[str, dict[Shape, _Box]]
    paths: dict[str, Path]


class _Sizes(dict[Shape, Call]):
    """Every torch.Size of the file, each once."""

    def __missing__(self, shape: Shape) -> Call:
        made = self[shape] = Call(_SIZE, (shape,))
        return made


def metadata_bytes(  # noqa: PLR0913 - keyword-only
    layouts: Iterable[Layout],
    objects: Mapping[str, tuple[int, int]],
    *,
    checkpoint_id: str,
    save_id: str,
    objects_file: str = STOCK_OBJECTS,
    alive: Alive = silent,
) -> bytes | None:
    """Content of `.metadata` for layouts by rank; None when stock readers have no way to these files.

    That is: a tensor without a torch.save archive around it, or nothing to list. Raises TooManyBoxesError. objects:
    (offset, length) of each leaf in objects_file. Of boxes at one place the lowest rank's is listed, of ranks that
    disagree about type or shape of a name the lowest, and of tensors that parts of the job hold the lowest part's. A
    tensor that its boxes don't add up to is not listed: a reader has to find it missing, since the gaps would keep
    whatever its memory held. alive: called three times a tensor when all layouts are there; a million boxes take half
    a minute from then on.
    """
    content = _collect(layouts)
    if content is None:
        return None
    tensors = {
        name: list(boxes.values())
        for name, boxes in _seen(content.tensors, alive)
        if is_whole(box.entry for box in boxes.values())
    }
    leaves = {name: place for name, place in objects.items() if name not in tensors}
    if not tensors and not leaves:
        return None
    sizes = _Sizes()
    meta: dict[str, Any] = {"checkpoint_id": checkpoint_id, "save_id": save_id, "load_id": None, "modules": []}
    state = {
        "state_dict_metadata": Items(_described(_seen(tensors, alive), leaves, sizes)),
        "planner_data": Items(_nested(content.paths, {*tensors, *leaves})),
        "storage_data": Items(_stored(_seen(tensors, alive), leaves, sizes, objects_file)),
        "storage_meta": New(_STORAGE_META, meta),
        "version": VERSION,
    }
    return dumps(New(_METADATA, state))


def check_count(boxes: int) -> None:
    """Raises TooManyBoxesError for more than stock readers can bear."""
    if boxes > MAX_BOXES:
        raise TooManyBoxesError(f"its tensors are in more than {MAX_BOXES:,} boxes")


def _collect(layouts: Iterable[Layout]) -> _Content | None:
    content = _Content({}, {})
    first = FirstHolders()
    count = 0
    for layout in layouts:
        twins: dict[str, list[str]] = {}
        for alias, holder in layout.aliases.items():
            twins.setdefault(holder, []).append(alias)
        count += len(layout.tensors) + len(layout.aliases)
        if not all(entry.slice_nbytes for entry in layout.tensors):
            return None
        check_count(count)
        for entry in layout.tensors:
            file, start = layout.place(entry.slice_offset)
            box = _Box(file, start, entry)
            for name in filter(functools.partial(first.takes, layout), (entry.name, *twins.get(entry.name, ()))):
                _add(content.tensors.setdefault(name, {}), box)
        for name, path in layout.paths.items():
            content.paths.setdefault(name, path)
    return content


def _add(boxes: dict[Shape, _Box], box: _Box) -> None:
    """Adds box to those of its tensor, unless the place is taken or its rank means another tensor by the name."""
    entry = box.entry
    if boxes:
        first = next(iter(boxes.values())).entry
        if (entry.dtype, entry.global_shape) != (first.dtype, first.global_shape):
            return
    if entry.nbytes or 0 in entry.global_shape:  # an empty box of a tensor that is not would only take a place
        boxes.setdefault(entry.offsets, box)


def _seen(tensors: dict[str, T], alive: Alive) -> Iterator[tuple[str, T]]:
    """All of them, with a sign of life after each."""
    for item in tensors.items():
        yield item
        alive()


def _described(
    tensors: Iterator[tuple[str, list[_Box]]], leaves: dict[str, tuple[int, int]], sizes: _Sizes
) -> Iterator[tuple[str, New]]:
    for name, boxes in tensors:
        first = boxes[0].entry
        chunks = [New(_CHUNK, {"offsets": sizes[entry.offsets], "sizes": sizes[entry.sizes]}) for *_, entry in boxes]
        # Of the properties only the dtype says something; torch calls the others deprecated.
        properties = New(_PROPERTIES, (_DTYPES[first.dtype], _STRIDED, False, _CONTIGUOUS, False))
        yield name, New(_TENSOR, {"properties": properties, "size": sizes[first.global_shape], "chunks": chunks})
    for name in leaves:
        yield name, New(_BYTES, {})


def _stored(
    tensors: Iterator[tuple[str, list[_Box]]], leaves: dict[str, tuple[int, int]], sizes: _Sizes, objects_file: str
) -> Iterator[tuple[New, New]]:
    for name, boxes in tensors:
        for number, (file, start, entry) in enumerate(boxes):
            index = {"fqn": name, "index": number, "offset": sizes[entry.offsets]}
            yield New(_INDEX, index), _info(file, start, entry.slice_nbytes)
    for name, (offset, nbytes) in leaves.items():
        yield New(_INDEX, {"fqn": name, "index": None}), _info(objects_file, offset, nbytes)


def _info(file: str, offset: int, nbytes: int) -> New:
    return New(_STORAGE_INFO, {"relative_path": file, "offset": offset, "length": nbytes})


def _nested(paths: dict[str, Path], listed: set[str]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Where in the nesting each listed name belongs. To torch a key of a dict is text, also one that was a number."""
    for name, path in paths.items():
        if name in listed:
            yield name, tuple(str(key) if kind in "ki" else key for kind, key in path)
