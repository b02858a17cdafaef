"""The rules for tensor leaves: which tensors can be saved, the codes of their dtypes, which share their bytes."""

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch
from torch.nn.parameter import is_lazy

from ckptd.shared.base.errors import UsageError
from ckptd.shared.base.ids import MAX_PARTS
from ckptd.shared.format.dtypes import DTYPES
from ckptd_client._state.sharded import is_dtensor, is_sharded_tensor
from ckptd_client._state.strided import boxes_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# Older torch lacks some of them.
DTYPE_OF: dict[str, torch.dtype] = {
    code: getattr(torch, known.torch) for code, known in DTYPES.items() if hasattr(torch, known.torch)
}
CODE_OF: dict[torch.dtype, str] = {dtype: code for code, dtype in DTYPE_OF.items()}
_PACKED = getattr(torch, "float4_e2m1fn_x2", None)
# nn.Buffer, where it exists, only marks plain tensors.
PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})


def is_tensor(value: Any) -> TypeGuard[torch.Tensor]:
    """Whether value is a tensor of any kind, also one that cannot be saved."""
    return isinstance(value, torch.Tensor)


class Chunk(NamedTuple):
    """A box of a tensor on this rank."""

    offsets: tuple[int, ...]  # in the whole tensor
    sizes: tuple[int, ...]
    local: torch.Tensor  # shares the tensor's memory

    @property
    def box(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Offsets and sizes."""
        return self.offsets, self.sizes


class Shard(NamedTuple):
    """This rank's part of a tensor: all of a plain one, any number of boxes of a sharded one.

    No box of a tensor with elements is empty: a rank without elements has no chunk.
    """

    code: str  # of the dtype
    global_shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def absent(self) -> bool:
        """Whether the tensor has elements and this rank none of them."""
        return not self.chunks


def shard_of(tensor: torch.Tensor, where: str) -> Shard:
    """This rank's part of a tensor that can be saved. where is its place in the state. Raises UsageError."""
    if is_dtensor(tensor):
        if any(placement.is_partial() for placement in tensor.placements):
            raise UsageError(f"{where} is a DTensor with a partial placement", hint="redistribute() it before saving")
        chunks = _of_dtensor(tensor, where)
    elif is_sharded_tensor(tensor):
        chunks = [
            Chunk(tuple(s.metadata.shard_offsets), tuple(s.metadata.shard_sizes), s.tensor)
            for s in tensor.local_shards()
        ]
    elif type(tensor) not in PLAIN_TYPES and _is_checkpointable(tensor):
        chunks = _of_checkpointable(tensor)
    else:
        code, sizes = describe(tensor, where)
        return Shard(code, sizes, (Chunk((0,) * len(sizes), sizes, tensor),))
    return _checked(tensor, chunks, where)


def _of_dtensor(tensor: "DTensor", where: str) -> list[Chunk]:
    if _is_checkpointable(tensor._local_tensor):  # noqa: SLF001 - as in local_of
        return _of_checkpointable(tensor)
    local = local_of(tensor)
    boxes = boxes_of(tensor, local, where)
    if len(boxes) == 1:
        return [Chunk(boxes[0].offsets, boxes[0].sizes, local)]
    return [Chunk(box.offsets, box.sizes, local[box.local]) for box in boxes]


def _is_checkpointable(tensor: torch.Tensor) -> bool:
    """Whether it implements the protocol of torch.distributed.checkpoint for boxes and their tensors."""
    return hasattr(tensor, "__create_chunk_list__") and hasattr(tensor, "__get_tensor_shard__")


def _of_checkpointable(tensor: Any) -> list[Chunk]:
    from torch.distributed.checkpoint.metadata import MetadataIndex  # noqa: PLC0415 - see sharded.py

    found = []
    for number, chunk in enumerate(tensor.__create_chunk_list__()):
        offsets, sizes = torch.Size(chunk.offsets), tuple(chunk.sizes)
        if 0 not in sizes:
            found.append(Chunk(tuple(offsets), sizes, tensor.__get_tensor_shard__(MetadataIndex("", offsets, number))))
    return found


def _checked(tensor: torch.Tensor, chunks: list[Chunk], where: str) -> Shard:
    code = CODE_OF.get(tensor.dtype, "")
    for chunk in chunks:
        code, sizes = describe(chunk.local, where)
        inside = all(o + s <= n for o, s, n in zip(chunk.offsets, sizes, tensor.shape, strict=True))
        if sizes != chunk.sizes or not inside:
            text = f"{where} says it has {list(chunk.sizes)} at {list(chunk.offsets)} of {list(tensor.shape)}"
            raise UsageError(f"{text}, but holds {list(sizes)}", hint="save the plain tensors that it is made of")
    if len(chunks) > MAX_PARTS:  # each needs a file of its own
        text = f"{where} has {len(chunks)} separate boxes on this rank; {MAX_PARTS} are possible"
        raise UsageError(text, hint="redistribute() it to placements without strides")
    shape = tuple(tensor.shape)
    if 0 in shape:
        return Shard(code, shape, tuple(chunks[:1]))
    return Shard(code, shape, tuple(chunk for chunk in chunks if 0 not in chunk.sizes))


def locals_of(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """local_of for each."""
    return tensors if PLAIN_TYPES.issuperset(map(type, tensors)) else list(map(local_of, tensors))


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor that holds this rank's elements. No copy, no autograd, no collective."""
    if tensor.__class__ in PLAIN_TYPES:  # the usual case; called for each tensor of each save
        return tensor
    return tensor._local_tensor if is_dtensor(tensor) else tensor  # noqa: SLF001 - to_local() costs 20 us


def describe(tensor: torch.Tensor, where: str) -> tuple[str, tuple[int, ...]]:
    """(safetensors dtype code, sizes) of a tensor that can be saved. where is its place in the state, for errors.

    Accepts strided views, also lazily conjugated or negated ones: the copy resolves them. Raises UsageError for all
    other kinds.
    """
    if type(tensor) not in PLAIN_TYPES:
        _refuse_subclass(tensor, where)
    if tensor.is_nested:
        raise UsageError(f"{where} is a nested tensor", hint="save its values() and offsets(), or unbind() it")
    if tensor.is_quantized:
        raise UsageError(f"{where} is quantized", hint="save int_repr(), scale and zero point, or dequantize() it")
    if tensor.layout is not torch.strided:
        raise UsageError(f"{where} is sparse ({tensor.layout})", hint="save its indices and values, or to_dense()")
    if tensor.is_meta:
        raise UsageError(
            f"{where} is on the meta device and has no values",
            hint="save after model.to_empty(device=...) and its initialisation",
        )
    code = CODE_OF.get(tensor.dtype)
    if code is None:
        raise UsageError(f"{where} has dtype {tensor.dtype}, which cannot be saved", hint=_dtype_hint(tensor))
    if tensor.numel() and not tensor.untyped_storage().nbytes():
        raise UsageError(f"{where} has no memory: its storage was freed", hint="gather or unshard it before saving")
    return code, tuple(tensor.shape)


def _refuse_subclass(tensor: torch.Tensor, where: str) -> None:
    kind = type(tensor)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if tensor.is_nested:
        hint = "save its values() and offsets(), or unbind() it"
    elif is_lazy(tensor):
        hint = "run the module once, so that its shape is known"
    else:
        hint = "save the plain tensors that it is made of"
    raise UsageError(f"{where} is a {name}, a tensor subclass that cannot be saved", hint=hint)


def _dtype_hint(tensor: torch.Tensor) -> str:
    if tensor.is_complex():
        return "save torch.view_as_real(tensor), and read it back with view_as_complex"
    return "save tensor.view(torch.uint8) and keep the dtype beside it, or convert it"


def copied_as(dtype: torch.dtype) -> torch.dtype:
    """The dtype as which to copy a tensor: torch cannot copy all of its dtypes."""
    return torch.uint8 if dtype is _PACKED else dtype


def copyable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a view of it that torch can copy."""
    return tensor.view(copied_as(tensor.dtype)) if copied_as(tensor.dtype) is not tensor.dtype else tensor


def alias_key(tensor: torch.Tensor) -> Hashable | None:
    """A key that is equal for views of the same bytes in the same form (tied weights); None for an empty tensor.

    Valid only while the tensors exist, because memory is reused.
    """
    if not tensor.numel():
        return None
    return (
        tensor.device,
        tensor.untyped_storage().data_ptr(),
        tensor.storage_offset(),
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
    )
