"""The header of an image, as stock readers take it: parsed strictly, and held against the layout that ckptd goes by."""

import json
from typing import Any

from ckptd.protocol.errors import DamagedError
from ckptd.protocol.ids import SaveId
from ckptd.protocol.layout import Layout, TensorEntry, box_nbytes, file_view

LENGTH_NBYTES = 8
MAX_HEADER_NBYTES = 100_000_000  # more is refused by safetensors
_METADATA = "__metadata__"
_FIELDS = {"dtype", "shape", "data_offsets"}
_MAX_OFFSET = 1 << 62
# json raises a ValueError for what is no JSON, no UTF-8, or a number of thousands of digits.
_NO_JSON = (ValueError, RecursionError, MemoryError)


def check_header(start: bytes, layout: Layout, save: SaveId, *, where: str) -> None:
    """Raises DamagedError, naming where, unless the first header_nbytes of the image say what the layout says.

    That is: strict JSON with every key once, the save and rank, each tensor of the layout at its place and with its
    offsets in the global tensor, and nothing between them but fillers of bytes, from the header's end to the file's.
    """
    header = _parse(start, where)
    metadata = _metadata(header.pop(_METADATA, {}), where)
    said = metadata.get("ckptd.save_id"), metadata.get("ckptd.rank"), metadata.get("ckptd.world_size")
    expected = save.text, str(layout.rank), str(layout.world_size)
    if said != expected:
        raise DamagedError(f"{where}: header: of save, rank and ranks {said}, not {expected}")
    places = {name: _place(name, entry, where) for name, entry in header.items()}
    _check_tensors(places, layout, where)
    _check_sharding(metadata.get("DCP_SHARDING_INFO", ""), header.keys(), layout, where)
    end = 0
    for offset, stop in sorted(place[2] for place in places.values()):
        if offset != end:
            raise DamagedError(f"{where}: header: a hole or an overlap at byte {min(offset, end)} of the payload")
        end = stop
    if end != layout.image_nbytes - layout.header_nbytes:
        raise DamagedError(f"{where}: header: tensors of {end} bytes in all, not of the whole file")


def _parse(start: bytes, where: str) -> dict[str, Any]:
    nbytes = int.from_bytes(start[:LENGTH_NBYTES], "little")
    if nbytes > MAX_HEADER_NBYTES or nbytes != len(start) - LENGTH_NBYTES:
        raise DamagedError(f"{where}: header: {nbytes} bytes, not {len(start) - LENGTH_NBYTES}")
    try:
        header = json.loads(start[LENGTH_NBYTES:].decode(), object_pairs_hook=_unique)
    except _NO_JSON as error:
        raise DamagedError(f"{where}: header: no JSON: {str(error)[:200]}") from error
    if type(header) is not dict:
        raise DamagedError(f"{where}: header: no map")
    return header


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a key that is there twice")
    return made


def _metadata(found: Any, where: str) -> dict[str, str]:
    if type(found) is not dict or not all(type(value) is str for value in found.values()):
        raise DamagedError(f"{where}: header: {_METADATA} must be a map of strings")
    return found


def _place(name: str, entry: Any, where: str) -> tuple[str, tuple[int, ...], tuple[int, int]]:
    """(dtype, shape, (start, stop)) of a tensor, each of the right kind, and of one size."""
    place = f"{where}: header: tensor {name[:80]!r}"
    if type(entry) is not dict or entry.keys() != _FIELDS or type(entry["dtype"]) is not str:
        raise DamagedError(f"{place}: {sorted(_FIELDS)} expected")
    shape, offsets = (_numbers(entry[field], f"{place}: {field}") for field in ("shape", "data_offsets"))
    if len(offsets) != 2 or box_nbytes(entry["dtype"], shape) != offsets[1] - offsets[0]:  # noqa: PLR2004 - a pair
        raise DamagedError(f"{place}: {list(shape)[:8]} of {entry['dtype'][:20]} at {list(offsets)[:8]} do not fit")
    return entry["dtype"], shape, (offsets[0], offsets[1])


def _numbers(found: Any, place: str) -> tuple[int, ...]:
    if type(found) is not list or not all(type(n) is int and 0 <= n < _MAX_OFFSET for n in found):
        raise DamagedError(f"{place}: {str(found)[:80]} are no counts")
    return tuple(found)


def _check_tensors(places: dict[str, tuple[str, tuple[int, ...], tuple[int, int]]], layout: Layout, where: str) -> None:
    for entry in layout.tensors:
        start = entry.data_offset - layout.header_nbytes
        expected = *file_view(entry.dtype, entry.sizes), (start, start + entry.nbytes)
        if places.get(entry.name) != expected:
            raise DamagedError(f"{where}: header: tensor {entry.name[:80]!r} is not what the layout says")
    strays = places.keys() - {entry.name for entry in layout.tensors}
    for name in strays:
        if not name.startswith("__ckptd_pad__."):
            raise DamagedError(f"{where}: header: tensor {name[:80]!r}, of which the layout knows nothing")


def _check_sharding(text: str, names: Any, layout: Layout, where: str) -> None:
    """Readers of safetensors files of several ranks go by these offsets."""
    try:
        found = json.loads(text, object_pairs_hook=_unique)
        offsets = {name: tuple(found[name]["saved_offsets"]) for name in names}
    except (*_NO_JSON, TypeError, LookupError) as error:
        raise DamagedError(f"{where}: header: DCP_SHARDING_INFO does not name every tensor") from error
    if any(offsets[entry.name] != _file_offsets(entry) for entry in layout.tensors):
        raise DamagedError(f"{where}: header: DCP_SHARDING_INFO is not what the layout says")


def _file_offsets(entry: TensorEntry) -> tuple[int, ...]:
    _, sizes = file_view(entry.dtype, entry.sizes)
    return (*entry.offsets, *[0] * (len(sizes) - len(entry.sizes)))
