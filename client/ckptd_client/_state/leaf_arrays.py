"""Encodes values of torch and numpy inside leaves as plain lists. Imports each library when it is needed.

Encoders return None for a value of another type, and raise ValueError for one that cannot be written. Decoders compare
every length with the bytes that exist before they build a value.
"""

import math
import re
import sys
from typing import TYPE_CHECKING, Any

from ckptd.shared.base.errors import DamagedError, RestoreError
from ckptd.shared.base.wording import cut, shown
from ckptd.shared.format.dtypes import DTYPES

if TYPE_CHECKING:
    import numpy as np
    import torch

MAX_TENSOR_NBYTES = 16 << 20  # a larger one belongs into the image, not into a message
_MAX_DIMS = 64  # of numpy arrays and of ckptd's tensors
_INT63 = range(1 << 63)
_DEVICE_RE = re.compile(r"[a-z]+(:[0-9]{1,4})?")
_NUMPY_DTYPE_RE = re.compile(r"[<>|](b1|[iufcSUV][0-9]{1,9}|[mM]8(\[([1-9][0-9]{0,8})?[a-zA-Zμ]{1,2}\])?)")
# No element of which is a part of a byte.
_NBYTES = {each.torch: each.nbytes for code, each in DTYPES.items() if code != "float4_e2m1fn_x2"} | {"complex32": 4}


def encode_torch(value: Any) -> tuple[str, Any] | None:
    """(code name, body) of a torch.Size, dtype, device or plain small tensor. A tensor's device is not kept."""
    import torch  # noqa: PLC0415 - lazily, as everywhere in this file

    if type(value) is torch.Size:
        return "TORCH_SIZE", list(value)
    if type(value) is torch.dtype:
        return "TORCH_DTYPE", _dtype_name(value)
    if type(value) is torch.device:
        return "TORCH_DEVICE", str(value)
    return ("TENSOR", _tensor_body(value)) if type(value) is torch.Tensor else None


def _dtype_name(dtype: "torch.dtype") -> str:
    name = str(dtype).removeprefix("torch.")
    if name not in _NBYTES:
        raise ValueError(f"its dtype {dtype} has no safe encoding")
    return name


def _tensor_body(tensor: "torch.Tensor") -> list[Any]:
    import torch  # noqa: PLC0415

    name = _dtype_name(tensor.dtype)
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta:
        raise ValueError("it is a sparse, nested or meta tensor")
    nbytes = tensor.numel() * _NBYTES[name]
    if nbytes > MAX_TENSOR_NBYTES:
        raise ValueError(f"it holds a tensor of {nbytes:,} bytes, more than the {MAX_TENSOR_NBYTES:,} of a leaf")
    whole = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return [name, list(tensor.shape), whole.view(torch.uint8).numpy().tobytes()]


def decode_size(body: Any) -> Any:
    """A torch.Size."""
    import torch  # noqa: PLC0415

    return torch.Size(_shape(body))


def decode_dtype(name: Any) -> Any:
    """A torch.dtype of the fixed table."""
    import torch  # noqa: PLC0415

    if type(name) is not str or name not in _NBYTES:
        raise DamagedError(f"{shown(name)} is no dtype")
    if not hasattr(torch, name):
        raise RestoreError(f"this torch {torch.__version__} has no {name}", hint="load with a newer torch")
    return getattr(torch, name)


def decode_device(text: Any) -> Any:
    """A torch.device."""
    import torch  # noqa: PLC0415

    if type(text) is not str or not _DEVICE_RE.fullmatch(text):
        raise DamagedError(f"{shown(text)} is no device")
    return torch.device(text)


def decode_tensor(body: Any) -> Any:
    """A tensor on the CPU, with memory of its own."""
    import torch  # noqa: PLC0415

    name, shape, data = body
    dtype = decode_dtype(name)
    _check_nbytes(_NBYTES[name], _shape(shape), data)
    if name == "bool":
        _check_bools(data)
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).reshape(shape)


def encode_numpy(value: Any) -> tuple[str, Any] | None:
    """(code name, body) of a numpy scalar or array that holds no objects."""
    import numpy as np  # noqa: PLC0415

    if isinstance(value, np.generic) and type(value) is value.dtype.type:
        return "NUMPY_SCALAR", [_dtype_text(value.dtype), value.tobytes()]
    if type(value) is np.ndarray:
        return "NUMPY_ARRAY", [_dtype_text(value.dtype), list(value.shape), value.tobytes()]
    return None


def _dtype_text(dtype: "np.dtype[Any]") -> str:
    import numpy as np  # noqa: PLC0415

    text = dtype.str
    # This text does not describe structured dtypes and those of other packages.
    if not _NUMPY_DTYPE_RE.fullmatch(text) or not dtype.itemsize or np.dtype(text) != dtype:
        raise ValueError(f"its numpy dtype {dtype} has no safe encoding")
    return text


def decode_numpy_scalar(body: Any) -> Any:
    """A numpy scalar."""
    text, data = body
    return _array(text, [], data)[()]


def decode_numpy_array(body: Any) -> Any:
    """A numpy array in C order, with memory of its own."""
    text, shape, data = body
    return _array(text, shape, data)


def _array(text: Any, shape: Any, data: Any) -> "np.ndarray[Any, Any]":
    import numpy as np  # noqa: PLC0415

    if type(text) is not str or not _NUMPY_DTYPE_RE.fullmatch(text):
        raise DamagedError(f"{shown(text)} is no dtype of numpy")
    dtype = np.dtype(text)
    if not dtype.itemsize:
        raise DamagedError("items of no bytes")
    _check_nbytes(dtype.itemsize, _shape(shape), data)
    if dtype.kind == "b":
        _check_bools(data)
    if not data:
        return np.empty(shape, dtype)
    if dtype.kind == "U" and np.frombuffer(data, f"{text[0]}u4").max() > sys.maxunicode:
        raise DamagedError("text that is no Unicode")  # numpy itself notices when it is read
    return np.frombuffer(data, dtype).reshape(shape).copy()


def _shape(shape: Any) -> list[int]:
    if type(shape) is not list or len(shape) > _MAX_DIMS or any(type(n) is not int or n not in _INT63 for n in shape):
        raise DamagedError(f"{_shape_text(shape)} is no shape")
    return shape


def _shape_text(shape: Any) -> str:
    return cut([shown(n) for n in shape[:8]]) if type(shape) is list else shown(shape)


def _check_nbytes(itemsize: int, shape: list[int], data: Any) -> None:
    if type(data) is not bytes or math.prod(shape) * itemsize != len(data):
        raise DamagedError(f"data that does not fill the shape {_shape_text(shape)}")


def _check_bools(data: bytes) -> None:
    if data.translate(None, b"\0\1"):  # what is left; other bytes make a bool that is neither
        raise DamagedError("a bool that is neither 0 nor 1")
