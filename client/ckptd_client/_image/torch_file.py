"""Lays out the file that torch.save would write of an object, so that each tensor is copied once, to its place.

torch itself can leave the tensors out (torch.serialization.skip_data), but writes whole storages, of which a trainer's
tensors are often small views, and needs memory for them. So this module writes the pickle, with torch's own rebuild
functions, and the archive around it. Payloads come first: equal tensors keep their offsets when the pickle changes.
Views that overlap without being equal come back as separate tensors of equal values.
"""
# ruff: noqa: SLF001 - the rebuild functions belong to the file format, though they are private in torch

import collections
import io
import pickle
from typing import Any, NamedTuple

import torch

from ckptd.shared.torchfile.zip_write import ALIGNMENT, Archive
from ckptd_client._image.file_bytes import FileBytes

_PROTOCOL = 2  # torch's
_STORAGES: dict[torch.dtype, str] = torch.storage._dtype_to_storage_type_map()


class _Region(NamedTuple):
    """Bytes of a storage that are saved as a separate storage."""

    key: str
    kind: type  # torch's class of the storage
    numel: int
    location: str
    flat: torch.Tensor  # the bytes, on any device


def torch_file(value: Any) -> FileBytes:
    """The file that torch.save(value, ...) would write, to torch.load. Refers to the value's tensors; copies none.

    Raises what pickle raises for an object that it cannot pickle.
    """
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.dump(value)
    return _archive(pickler.regions, buffer.getvalue())


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=_PROTOCOL)
        self._by_place: dict[tuple[Any, ...], _Region] = {}
        self._kept: list[Any] = []  # pickle identifies objects by id, so none may be freed before it ends

    @property
    def regions(self) -> list[_Region]:
        """The regions, in the order of their keys."""
        return list(self._by_place.values())

    def persistent_id(self, obj: Any) -> Any:
        """Replaces storages by references: they are outside the pickle."""
        if isinstance(obj, (torch.UntypedStorage, torch.TypedStorage)):
            obj = self._whole(obj)
        if isinstance(obj, _Region):
            return ("storage", obj.kind, obj.key, obj.location, obj.numel)
        return None

    def reducer_override(self, obj: Any) -> Any:
        """Reduces a plain tensor to the bytes that it covers; leaves other objects to torch."""
        if type(obj) is not torch.Tensor or not _is_plain(obj):
            return NotImplemented
        state = torch._utils._get_obj_state(obj)  # type: ignore[no-untyped-call]
        made = self._rebuilt(obj)
        if not state:
            return made
        return torch._tensor._rebuild_from_type_v2, (made[0], type(obj), made[1], state)

    def _rebuilt(self, tensor: torch.Tensor) -> tuple[Any, tuple[Any, ...]]:
        value = tensor.detach().resolve_conj().resolve_neg()
        region = self._region(value)
        place: tuple[Any, ...] = (
            region,
            0,
            tuple(value.size()),
            value.stride(),
            tensor.requires_grad,
            collections.OrderedDict(),
        )
        if value.dtype in _STORAGES:
            return torch._utils._rebuild_tensor_v2, place
        return torch._utils._rebuild_tensor_v3, (*place, value.dtype, {})

    def _region(self, tensor: torch.Tensor) -> _Region:
        spans = ((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
        numel = sum(spans) + 1 if tensor.numel() else 0
        flat = torch.as_strided(tensor, (numel,), (1,), tensor.storage_offset()).view(torch.uint8)
        typed = tensor.dtype in _STORAGES
        kind = getattr(torch, _STORAGES[tensor.dtype]) if typed else torch.UntypedStorage
        return self._keep(tensor, flat, kind, numel if typed else flat.numel())

    def _whole(self, storage: Any) -> _Region:
        """The region of a storage that is pickled alone, or for a tensor of a subclass."""
        self._kept.append(storage)
        typed = isinstance(storage, torch.TypedStorage)
        bare = storage._untyped_storage if typed else storage
        flat = torch.empty(0, dtype=torch.uint8, device=bare.device).set_(bare)
        kind = getattr(torch, storage._pickle_storage_type()) if typed else torch.UntypedStorage
        return self._keep(flat, flat, kind, storage._size() if typed else flat.numel())

    def _keep(self, tensor: torch.Tensor, flat: torch.Tensor, kind: type, numel: int) -> _Region:
        # An empty region has no address of its own.
        place = (tensor.device, flat.data_ptr() if numel else len(self._by_place), flat.numel(), kind)
        known = self._by_place.get(place)
        if known is None:
            location = torch.serialization.location_tag(tensor.untyped_storage())
            known = self._by_place[place] = _Region(str(len(self._by_place)), kind, numel, location, flat)
        return known


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_quantized and tensor.device.type in {"cpu", "cuda"}


def _archive(regions: list[_Region], pickled: bytes) -> FileBytes:
    zipped = Archive()
    copies = [(zipped.reserve(f"data/{each.key}", each.flat.numel(), ALIGNMENT), each.flat) for each in regions]
    for name, data in (("data.pkl", pickled), ("byteorder", b"little"), ("version", b"3\n")):
        zipped.add(name, data)
    zipped.close()
    made = FileBytes()
    made.nbytes, made.known = zipped.nbytes, zipped.blobs
    made.copies = [(offset, flat) for offset, flat in copies if flat.numel()]
    return made
