"""Equality to the bit, of types too."""

import struct
from collections import deque

import torch


def bits(tensor):
    """A tensor's dtype, shape and bytes."""
    whole = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return tensor.dtype, tuple(tensor.shape), whole.view(torch.uint8).numpy().tobytes()


def difference(left, right, where="state"):
    """Where two states differ first, empty when they are the same to the bit."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return "" if bits(left) == bits(right) else f"{where}: {left} != {right}"
    if type(left) is not type(right):
        return f"{where}: {type(left)} != {type(right)}"
    if isinstance(left, dict):
        if list(left) != list(right):
            return f"{where}: keys {list(left)} != {list(right)}"
        return next((d for key in left if (d := difference(left[key], right[key], f"{where}[{key!r}]"))), "")
    if isinstance(left, list | tuple | deque):
        if len(left) != len(right):
            return f"{where}: {len(left)} != {len(right)} items"
        pairs = enumerate(zip(left, right, strict=True))
        return next((d for i, (a, b) in pairs if (d := difference(a, b, f"{where}[{i}]"))), "")
    if isinstance(left, float):
        return "" if struct.pack("d", left) == struct.pack("d", right) else f"{where}: {left} != {right}"
    if hasattr(left, "state_dict"):
        return difference(left.state_dict(), right.state_dict(), where)
    if hasattr(left, "dtype"):  # of numpy
        same = (left.dtype, left.shape, left.tobytes()) == (right.dtype, right.shape, right.tobytes())
        return "" if same else f"{where}: {left!r} != {right!r}"
    return "" if left == right else f"{where}: {left!r} != {right!r}"
