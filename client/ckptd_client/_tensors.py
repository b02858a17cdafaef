"""The rules for tensor leaves: which tensors can be saved, how their type is written, which share their bytes."""

from collections.abc import Hashable
from typing import Any, NamedTuple, TypeGuard

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from ckptd.protocol.errors import UsageError
from ckptd.protocol.layout import TORCH_DTYPES

# Older torch lacks some of them.
DTYPE_OF: dict[str, torch.dtype] = {
    code: getattr(torch, name) for code, name in TORCH_DTYPES.items() if hasattr(torch, name)
}
CODE_OF: dict[torch.dtype, str] = {dtype: code for code, dtype in DTYPE_OF.items()}
# nn.Buffer, where it exists, only marks plain tensors.
_PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})


def is_tensor(value: Any) -> TypeGuard[torch.Tensor]:
    """Whether value is a tensor of any kind, also one that cannot be saved."""
    return isinstance(value, torch.Tensor)


class Shard(NamedTuple):
    """This rank's part of a tensor: all of a plain one, one box of a DTensor."""

    code: str  # safetensors dtype code
    sizes: tuple[int, ...]
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    local: torch.Tensor  # shares the tensor's memory

    @property
    def absent(self) -> bool:
        """Whether the tensor has elements and this rank none of them."""
        return 0 in self.sizes and 0 not in self.global_shape


def shard_of(tensor: torch.Tensor, where: str) -> Shard:
    """This rank's part of a tensor that can be saved. where is its place in the state. Raises UsageError."""
    if not isinstance(tensor, DTensor):
        code, sizes = describe(tensor, where)
        return Shard(code, sizes, sizes, (0,) * len(sizes), tensor)
    code, sizes = describe(local_of(tensor), where)
    if any(placement.is_partial() for placement in tensor.placements):
        raise UsageError(f"{where} is a DTensor with a partial placement", hint="redistribute() it before saving")
    chunks = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]  # DCP's own question
    if len(chunks) > 1:
        text = f"{where} is a DTensor whose shard on this rank is {len(chunks)} separate boxes"
        raise UsageError(text, hint="redistribute() it to placements without strides")
    offsets = tuple(chunks[0].offsets) if chunks else (0,) * len(sizes)
    return Shard(code, sizes, tuple(tensor.shape), offsets, local_of(tensor))


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor that holds this rank's elements. No copy, no autograd, no collective."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor  # noqa: SLF001 - to_local() costs 20 us


def describe(tensor: torch.Tensor, where: str) -> tuple[str, tuple[int, ...]]:
    """(safetensors dtype code, sizes) of a tensor that can be saved. where is its place in the state, for errors.

    Strided views, also lazily conjugated or negated ones, are fine: the copy resolves them. Anything else is a
    UsageError.
    """
    if type(tensor) not in _PLAIN_TYPES:
        _refuse_subclass(tensor, where)
    if tensor.is_nested:
        raise UsageError(f"{where} is a nested tensor", hint="save its values() and offsets(), or unbind() it")
    if tensor.is_quantized:
        raise UsageError(f"{where} is quantized", hint="save int_repr(), scale and zero point, or dequantize() it")
    if tensor.layout is not torch.strided:
        raise UsageError(f"{where} is sparse ({tensor.layout})", hint="save its indices and values, or to_dense()")
    if tensor.is_meta:
        raise UsageError(f"{where} is on the meta device and has no values", hint="materialise it before saving")
    code = CODE_OF.get(tensor.dtype)
    if code is None:
        raise UsageError(f"{where} has dtype {tensor.dtype}, which safetensors cannot hold", hint=_dtype_hint(tensor))
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


def alias_key(tensor: torch.Tensor) -> Hashable | None:
    """Equal for tensors that are the same bytes seen in the same way (tied weights); None for an empty tensor.

    Holds only while the tensors live, since memory is reused.
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
