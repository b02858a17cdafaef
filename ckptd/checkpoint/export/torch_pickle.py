"""The pickle inside a torch.save file: nested containers of tensors. Nothing here imports or runs a pickle module."""

from collections.abc import Iterator

from ckptd.shared.format.layout import Shape
from ckptd.shared.torchfile.tensor_pickle import integer, tensor, text


class TensorRef:
    """A tensor that fills the storage with this key, contiguous. nbytes: of the storage."""

    def __init__(self, key: int, dtype: str, shape: Shape, nbytes: int) -> None:
        self.key = key
        self.dtype = dtype
        self.shape = shape
        self.nbytes = nbytes


Value = TensorRef | dict[str | int, "Value"] | list["Value | None"] | tuple["Value | None", ...]


def dumps(value: Value) -> bytes:
    """The pickle (protocol 2) of nested containers of tensors."""
    return b"\x80\x02" + b"".join(_value(value)) + b"."


def _value(value: "Value | None") -> Iterator[bytes]:
    match value:
        case None:
            yield b"N"
        case TensorRef():
            yield tensor(value.key, value.dtype, value.shape, value.nbytes)
        case dict():
            yield b"}("
            for key, below in value.items():
                yield text(key) if isinstance(key, str) else integer(key)
                yield from _value(below)
            yield b"u"
        case list():
            yield b"]("
            for item in value:
                yield from _value(item)
            yield b"e"
        case tuple():
            yield b"("
            for item in value:
                yield from _value(item)
            yield b"t"
