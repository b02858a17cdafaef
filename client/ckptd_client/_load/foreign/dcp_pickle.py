"""Reads the `.metadata` of torch.distributed.checkpoint, a pickle, without ever making one of its classes.

Only the names on a list are known, and each stands for an inert record made here; only the opcodes that such a file
needs are run, by Python's own unpickler in Python, whose memory grows with the file alone. So a crafted file imports,
calls and changes nothing: at worst it is refused.
"""

import io
import pickle
import pickletools
from collections.abc import Callable
from typing import Any

import torch

from ckptd.shared.base.errors import DamagedError
from ckptd.shared.base.wording import cut, shown

_METADATA = "torch.distributed.checkpoint.metadata"
_RECORDS = {
    (_METADATA, name)
    for name in (
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
        "TensorProperties", "StorageMeta",
    )
} | {("torch.distributed.checkpoint.filesystem", "_StorageInfo")}  # fmt: skip
_IGNORED = {
    ("torch.serialization", "_get_layout"),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("pathlib", "Path"),
    ("pathlib._local", "PosixPath"),
    ("pathlib._local", "PurePosixPath"),
}
_OPCODES = frozenset({
    "PROTO", "FRAME", "STOP", "POP", "POP_MARK", "DUP", "MARK", "NONE", "NEWTRUE", "NEWFALSE",
    "BININT", "BININT1", "BININT2", "INT", "LONG", "LONG1", "BINFLOAT", "FLOAT",
    "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES", "BINSTRING", "SHORT_BINSTRING",
    "EMPTY_LIST", "APPEND", "APPENDS", "LIST", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3",
    "EMPTY_DICT", "DICT", "SETITEM", "SETITEMS", "GET", "BINGET", "LONG_BINGET", "PUT", "BINPUT", "LONG_BINPUT",
    "MEMOIZE", "GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD", "NEWOBJ",
})  # fmt: skip
_ALLOWED = {ord(opcode.code) for opcode in pickletools.opcodes if opcode.name in _OPCODES}


class Record:
    """An instance of a class of torch's: its name and its state, as they were pickled. No code of the class."""

    __slots__ = ("kind", "state")

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.state: Any = None


class Dtype(str):
    """A torch dtype, by its name in torch."""

    __slots__ = ()


class _Kind:
    """Stands for a class."""

    def __init__(self, name: str) -> None:
        self.name = name


class _Size:
    """Stands for torch.Size."""


class _Ignored:
    """Stands for a function whose result nobody needs."""


class _Member:
    """Stands for getattr, by which some versions of Python name a member of an enumeration."""


class _Unpickler(pickle._Unpickler):  # noqa: SLF001 - the one with replaceable opcodes
    dispatch = {code: load for code, load in pickle._Unpickler.dispatch.items() if code in _ALLOWED}  # noqa: SLF001, RUF012

    stack: list[Any]
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _RECORDS:
            return _Kind(name)
        if (module, name) in _IGNORED:
            return _Ignored()
        if (module, name) == ("builtins", "getattr"):
            return _Member()
        if (module, name) == ("torch", "Size"):
            return _Size()
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return Dtype(name)
        raise pickle.UnpicklingError(
            f"it wants {shown(module)}, {shown(name)}, which is not on the list of what DCP's metadata needs"
        )

    def load_reduce(self) -> None:
        args = self.stack.pop()
        function = self.stack[-1]
        if type(function) is _Size and type(args) is tuple and len(args) == 1 and type(args[0]) in (tuple, list):
            self.stack[-1] = tuple(args[0])
        elif type(function) is _Ignored or (type(function) is _Member and _names_a_member(args)):
            self.stack[-1] = None
        elif type(function) is _Kind and args == ():
            self.stack[-1] = Record(function.name)
        else:
            raise pickle.UnpicklingError("it calls what is no function of DCP's metadata")

    def load_newobj(self) -> None:
        args = self.stack.pop()
        kind = self.stack.pop()
        if type(kind) is not _Kind or args != ():
            raise pickle.UnpicklingError("it makes an object of no class of DCP's metadata")
        self.append(Record(kind.name))

    def load_build(self) -> None:
        state = self.stack.pop()
        if type(self.stack[-1]) is not Record:
            raise pickle.UnpicklingError("it sets the state of what is no record")
        self.stack[-1].state = state

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        _put(self.stack[-1], key, value)

    def load_setitems(self) -> None:
        items = self.pop_mark()
        for key, value in zip(items[::2], items[1::2], strict=True):
            _put(self.stack[-1], key, value)

    def load_dict(self) -> None:
        items = self.pop_mark()
        made: dict[Any, Any] = {}
        for key, value in zip(items[::2], items[1::2], strict=True):
            _put(made, key, value)
        self.append(made)


_OVERRIDES: dict[str, Callable[[Any], None]] = {
    "REDUCE": _Unpickler.load_reduce,
    "NEWOBJ": _Unpickler.load_newobj,
    "BUILD": _Unpickler.load_build,
    "SETITEM": _Unpickler.load_setitem,
    "SETITEMS": _Unpickler.load_setitems,
    "DICT": _Unpickler.load_dict,
}
_Unpickler.dispatch |= {ord(o.code): _OVERRIDES[o.name] for o in pickletools.opcodes if o.name in _OVERRIDES}


def _names_a_member(args: Any) -> bool:
    return type(args) is tuple and len(args) == 2 and type(args[0]) is _Ignored and type(args[1]) is str  # noqa: PLR2004


def _put(made: Any, key: Any, value: Any) -> None:
    """Only keys whose hash takes no time, and is no other's: that of nested tuples can take for ever."""
    if type(made) is not dict or type(key) not in (str, Record):
        raise pickle.UnpicklingError(f"it has a {type(key).__name__} as a key")
    made[key] = value


def read_metadata(data: bytes, *, where: str) -> Record:
    """The Metadata record in data. Raises DamagedError, naming where, for anything else. Runs no code of the file."""
    try:
        found = _Unpickler(io.BytesIO(data)).load()
    except Exception as error:  # noqa: BLE001 - there is no end to what a crafted one can raise
        # Others say what they were given, which may take for ever to be made.
        why = (
            cut(error) if isinstance(error, pickle.UnpicklingError) else f"it breaks off with a {type(error).__name__}"
        )
        text = f"{where} is no metadata of torch.distributed.checkpoint: {why}"
        raise DamagedError(text, hint="do not open it with dcp.load, which would run what it holds") from None
    if type(found) is not Record or found.kind != "Metadata" or type(found.state) is not dict:
        raise DamagedError(f"{where} is no metadata of torch.distributed.checkpoint: it holds something else")
    return found
