"""The header of an image, as stock readers take it: parsed strictly, and held against the layout that ckptd goes by."""

import json
from typing import Any, NamedTuple

import msgspec

from ckptd.shared.base.decoding import MALFORMED
from ckptd.shared.base.errors import DamagedError
from ckptd.shared.base.ids import Nbytes, SaveId
from ckptd.shared.base.wording import cut, shown
from ckptd.shared.format.dtypes import DTYPES, file_view
from ckptd.shared.format.layout import Layout, TensorEntry, box_nbytes
from ckptd.shared.format.placement import Shape

LENGTH_NBYTES = 8
MAX_HEADER_NBYTES = 100_000_000  # more is refused by safetensors
_METADATA = "__metadata__"
# json raises a ValueError for what is no JSON, no UTF-8, or a number of thousands of digits.
_NO_JSON = (ValueError, RecursionError, MemoryError)
MALFORMED_HEADER = (*MALFORMED, *_NO_JSON)


def check_header(start: bytes, layout: Layout, save: SaveId, *, where: str) -> None:
    """Raises DamagedError, naming where, unless the first header_nbytes of the image say what the layout says.

    That is: strict JSON with every key once, the save and rank, each tensor of the layout at its place and with its
    offsets in the global tensor, and nothing between them but fillers of bytes, from the header's end to the file's.
    """
    nbytes = int.from_bytes(start[:LENGTH_NBYTES], "little")
    if nbytes > MAX_HEADER_NBYTES or nbytes != len(start) - LENGTH_NBYTES:
        raise DamagedError(f"{where}: header: {nbytes} bytes, not {len(start) - LENGTH_NBYTES}")
    header = parse_header(start[LENGTH_NBYTES:], layout.image_nbytes - layout.header_nbytes, where=where)
    said = tuple(header.metadata.get(f"ckptd.{field}", "") for field in ("save_id", "rank", "world_size"))
    expected = save.text, str(layout.rank), str(layout.world_size)
    if said != expected:
        text = ", ".join(map(shown, said))
        raise DamagedError(f"{where}: header: of save, rank and ranks {text}, not {expected}")
    _check_tensors(header.tensors, layout, where)
    _check_sharding(header.metadata.get("DCP_SHARDING_INFO", ""), header.tensors.keys(), layout, where)


class HeaderTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a header says of a tensor. data_offsets count from the header's end."""

    dtype: str
    shape: Shape
    data_offsets: tuple[Nbytes, Nbytes]


class Header(NamedTuple):
    """All that one says."""

    metadata: dict[str, str]
    tensors: dict[str, HeaderTensor]


class _Sharding(msgspec.Struct):
    saved_offsets: Shape


_tensor_decoder = msgspec.json.Decoder(HeaderTensor)
_sharding_decoder = msgspec.json.Decoder(dict[str, _Sharding])


def parse_header(text: bytes, payload_nbytes: int, *, where: str) -> Header:
    """The header before so many bytes. Raises DamagedError, naming where, for one that safetensors refuses.

    That is: each key once and no field more, and tensors that lie one after the other from the header's end to the
    file's. A dtype that safetensors does not have yet is taken; its size is not known.
    """
    try:
        raw = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(raw.pop(_METADATA, b"{}"), type=dict[str, str])
        tensors = {name: _tensor_decoder.decode(entry) for name, entry in raw.items()}
        _check_keys(text)
    except MALFORMED_HEADER as error:
        raise DamagedError(f"{where}: header: {cut(error)}") from error
    end = 0
    for (start, stop), name in sorted((tensor.data_offsets, name) for name, tensor in tensors.items()):
        if start != end or stop < start:
            raise DamagedError(f"{where}: header: a hole or an overlap at {shown(name)}, byte {start} of the payload")
        end = stop
    if end != payload_nbytes:
        raise DamagedError(f"{where}: header: tensors of {end} bytes in all, not {payload_nbytes}")
    for name, tensor in tensors.items():
        start, stop = tensor.data_offsets
        if tensor.dtype in DTYPES and box_nbytes(tensor.dtype, tensor.shape) != stop - start:
            raise DamagedError(f"{where}: header: tensor {shown(name)}: {stop - start} bytes do not fit its shape")
    return Header(metadata, tensors)


def parse_sharding(text: str) -> dict[str, Shape]:
    """DCP_SHARDING_INFO: the offsets of each name's box in its tensor. Raises those of MALFORMED_HEADER."""
    found = {name: sharding.saved_offsets for name, sharding in _sharding_decoder.decode(text).items()}
    _check_keys(text.encode())
    return found


def _check_keys(text: bytes) -> None:
    """Raises ValueError for a key that is there twice. To be called when the shape of what it says is known.

    Of anything else this would take twenty times the memory of the text.
    """
    json.loads(text.decode(), object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a key that is there twice")
    return made


def _check_tensors(places: dict[str, HeaderTensor], layout: Layout, where: str) -> None:
    for entry in layout.tensors:
        start = entry.data_offset - layout.header_nbytes
        expected = HeaderTensor(*file_view(entry.dtype, entry.sizes), (start, start + entry.nbytes))
        if places.get(entry.name) != expected:
            raise DamagedError(f"{where}: header: tensor {shown(entry.name)} is not what the layout says")
    strays = places.keys() - {entry.name for entry in layout.tensors}
    for name in strays:
        if not name.startswith("__ckptd_pad__."):
            raise DamagedError(f"{where}: header: tensor {shown(name)}, of which the layout knows nothing")


def _check_sharding(text: str, names: Any, layout: Layout, where: str) -> None:
    """Readers of safetensors files of several ranks go by these offsets."""
    try:
        found = parse_sharding(text)
        offsets = {name: found[name] for name in names}
    except (*MALFORMED_HEADER, LookupError) as error:
        raise DamagedError(f"{where}: header: DCP_SHARDING_INFO does not name every tensor") from error
    if any(offsets[entry.name] != _file_offsets(entry) for entry in layout.tensors):
        raise DamagedError(f"{where}: header: DCP_SHARDING_INFO is not what the layout says")


def _file_offsets(entry: TensorEntry) -> tuple[int, ...]:
    _, sizes = file_view(entry.dtype, entry.sizes)
    return (*entry.offsets, *[0] * (len(sizes) - len(entry.sizes)))
