"""Messages between nodes as bytes. Classes come from ckptd.core.events, so a new message needs no line here.

A message is ``[class name, {field: value}]`` in msgpack; an event inside a Report likewise. Every field is converted to
its annotated type. Names, ranges and lengths that the core leaves open, because it trusts its own, are bound here.
"""

import dataclasses
import functools
import types
import typing
from typing import Annotated, Any

import msgspec

from ckptd.core import events as ev
from ckptd.protocol.decoding import MALFORMED
from ckptd.protocol.errors import ProtocolError
from ckptd.protocol.ids import MAX_RANKS

MAX_MESSAGE_NBYTES = (8 << 20) - 64
MAX_TEXT_CHARS = 1 << 16
MAX_ITEMS = MAX_RANKS

_INTEGER = Annotated[int, msgspec.Meta(ge=-1, lt=1 << 62)]
_TEXT = Annotated[str, msgspec.Meta(max_length=MAX_TEXT_CHARS)]
_NODE = Annotated[str, msgspec.Meta(pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]{0,254})?\Z")]
_BY_NAME: dict[str, Any] = {  # fields of plain types whose values reach a table or a path
    "node": Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,254}\Z")],
    "holder": _NODE,
    "rank": Annotated[int, msgspec.Meta(ge=-1, lt=MAX_RANKS)],
    "world_size": Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)],
    "slot": Annotated[str, msgspec.Meta(pattern=r"^(r[0-9]{5,7}-[0-9]{6,12}\.slot)?\Z")],
    "session": Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._:-]{0,128}\Z")],
    "dirname": Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._-]{0,255}\Z")],
}
_mirrors: dict[type[Any], type[msgspec.Struct]] = {}
_CLASS_NAME = Annotated[str, msgspec.Meta(max_length=64)]


class _Event:
    """Stands for an event inside a message: its class is named beside it."""

    def __init__(self, real: Any) -> None:
        self.real = real


class _Record(_Event):
    """Base of what stands for a dataclass inside a message that is no event."""

    of: type[Any]


def _subclasses(base: type[Any]) -> dict[str, type[Any]]:
    found: dict[str, type[Any]] = {}
    for cls in base.__subclasses__():
        found |= {cls.__name__: cls} | _subclasses(cls)
    return found


@functools.cache
def messages() -> dict[str, type[ev.NodeMessage]]:
    """Every message that nodes may send each other, by name."""
    return _subclasses(ev.NodeMessage)


@functools.cache
def reportable() -> dict[str, type[ev.Event]]:
    """Every event that a message may carry: all but messages themselves, so that nothing nests without end."""
    return {name: cls for name, cls in _subclasses(ev.Event).items() if not issubclass(cls, ev.NodeMessage)}


def encode(message: ev.NodeMessage) -> bytes:
    """The message as bytes. Raises ProtocolError when it is too large."""
    raw = msgspec.msgpack.encode(_wire(message))
    if len(raw) > MAX_MESSAGE_NBYTES:
        raise ProtocolError(f"{type(message).__name__} of {len(raw)} bytes exceeds {MAX_MESSAGE_NBYTES}")
    return raw


def decode(raw: bytes) -> ev.NodeMessage:
    """The message in the bytes, each field of its type. Raises ProtocolError for anything else."""
    if len(raw) > MAX_MESSAGE_NBYTES:
        raise ProtocolError(f"message between nodes of {len(raw)} bytes exceeds {MAX_MESSAGE_NBYTES}")
    try:
        name, fields = msgspec.msgpack.decode(raw, type=tuple[_CLASS_NAME, msgspec.Raw])
        if name not in messages():
            raise ProtocolError(f"no message between nodes: {name!r}")
        mirror = msgspec.msgpack.decode(fields, type=_mirror(messages()[name]), dec_hook=_nested)
        return typing.cast("ev.NodeMessage", _real(messages()[name], mirror))
    except (*MALFORMED, ValueError, TypeError) as error:  # the last two: of a class that checks itself when it is made
        raise ProtocolError(f"malformed message between nodes: {error}") from error


def _wire(value: Any) -> Any:
    """Events by name; msgspec knows how to encode the rest."""
    if isinstance(value, ev.Event):
        fields = {field.name: _wire(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return [type(value).__name__, fields]
    if dataclasses.is_dataclass(value):
        return {field.name: _wire(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if type(value) in (tuple, list):
        return [_wire(item) for item in value]
    return value


def _nested(kind: type[_Event], value: Any) -> Any:
    if issubclass(kind, _Record):
        return kind(_real(kind.of, msgspec.convert(value, _mirror(kind.of), dec_hook=_nested)))
    name, fields = msgspec.convert(value, tuple[_CLASS_NAME, dict[str, Any]])
    if name not in reportable():
        raise ValueError(f"no event: {name!r}")
    return kind(_real(reportable()[name], msgspec.convert(fields, _mirror(reportable()[name]), dec_hook=_nested)))


def _real(cls: type[Any], mirror: msgspec.Struct) -> Any:
    return cls(**{field.name: _plain(getattr(mirror, field.name)) for field in dataclasses.fields(cls)})


def _plain(value: Any) -> Any:
    if isinstance(value, _Event):
        return value.real
    if type(value) is tuple:
        return tuple(_plain(item) for item in value)
    if type(value) is list:
        return [_plain(item) for item in value]
    if type(value) is dict:
        return {key: _plain(item) for key, item in value.items()}
    return value


def _mirror(cls: type[Any]) -> type[msgspec.Struct]:
    """A struct with the fields of the class, in the types of the wire."""
    if cls not in _mirrors:
        _mirrors[cls] = _make_mirror(cls)
    return _mirrors[cls]


def _make_mirror(cls: type[Any]) -> type[msgspec.Struct]:
    hints = typing.get_type_hints(cls, include_extras=True)
    fields: list[Any] = []
    for field in dataclasses.fields(cls):
        hint = _on_wire(hints[field.name], _BY_NAME.get(field.name))
        if field.default_factory is not dataclasses.MISSING:
            fields.append((field.name, hint, msgspec.field(default_factory=field.default_factory)))
        elif field.default is not dataclasses.MISSING:
            fields.append((field.name, hint, field.default))
        else:
            fields.append((field.name, hint))
    return msgspec.defstruct(cls.__name__, fields, kw_only=True, frozen=True)


def _record(cls: type[Any]) -> type[_Record]:
    return type(cls.__name__, (_Record,), {"of": cls})


def _on_wire(hint: Any, bound: Any = None) -> Any:
    """The type as it is checked on arrival."""
    if hint in (int, str):
        return bound or {int: _INTEGER, str: _TEXT}[hint]
    if isinstance(hint, type) and issubclass(hint, ev.Event):
        return _Event
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _record(hint)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return functools.reduce(lambda a, b: a | b, [_on_wire(arg, bound) for arg in args])
    if origin is tuple and len(args) == 2 and args[1] is Ellipsis:  # noqa: PLR2004 - tuple[X, ...]
        return Annotated[tuple[_on_wire(args[0]), ...], msgspec.Meta(max_length=MAX_ITEMS)]  # type: ignore[misc]
    if origin is tuple:
        return tuple[tuple(_on_wire(arg) for arg in args)]  # type: ignore[misc]
    if origin is list:
        return Annotated[list[_on_wire(args[0])], msgspec.Meta(max_length=MAX_ITEMS)]  # type: ignore[misc]
    if origin is dict:
        return dict[_on_wire(args[0]), _on_wire(args[1])]  # type: ignore[misc]
    return hint
