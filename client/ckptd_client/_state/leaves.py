"""The encoding safe/1 of plain values: msgpack with a closed set of ext types; it imports nothing by name.

Every type is matched exactly, so that no subclass comes back as its base. An ext body is msgpack again. Classes of the
user are written and built only after register() was called with them.
"""

import dataclasses
import enum
import io
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from datetime import date, datetime, time, timedelta, timezone
from functools import partial
from pathlib import PosixPath, PurePath, PurePosixPath
from typing import Any, TypeVar

import msgpack

from ckptd.shared.base.errors import CkptdError, DamagedError, RestoreError, UsageError
from ckptd.shared.base.wording import cut, shown
from ckptd.shared.format.layout import Leaf
from ckptd_client._state import leaf_arrays as arrays
from ckptd_client._state.hashed import dict_of, set_of

CODEC = "safe/1"
MAX_DEPTH = 64  # of nested containers
_SCALARS = frozenset({type(None), bool, float, str, bytes})
_INT64 = range(-(1 << 63), 1 << 63)
# What constructors raise for arguments that no encoder wrote. A RecursionError is a RuntimeError.
_MALFORMED = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RuntimeError, MemoryError)

_Type = TypeVar("_Type", bound=type)


class _Code(enum.IntEnum):
    """Ext codes. Part of the format: never renumbered, never reused."""

    TUPLE = 1
    SET = 2
    FROZENSET = 3
    BIGINT = 4
    COMPLEX = 5
    DICT = 6  # with keys that are not all str
    ORDERED_DICT = 7
    DEFAULT_DICT = 8  # without its factory
    COUNTER = 9
    DEQUE = 10
    DATE = 11
    DATETIME = 12
    TIME = 13
    TIMEDELTA = 14
    PATH = 15
    ENUM = 16
    DATACLASS = 17
    NAMEDTUPLE = 18
    BYTESIO = 19
    TORCH_SIZE = 32
    TORCH_DTYPE = 33
    TORCH_DEVICE = 34
    TENSOR = 35
    NUMPY_SCALAR = 36
    NUMPY_ARRAY = 37


class _Refused(Exception):  # noqa: N818 - not an error of its own: encode_leaf turns it into a UsageError with the place
    """A value without an encoding: its description, and a hint."""

    def __init__(self, what: str, hint: str) -> None:
        super().__init__(what)
        self.hint = hint


_tag_of: dict[type, str] = {}
_class_of: dict[str, type] = {}


def register(cls: _Type, tag: str | None = None) -> _Type:
    """Allows an enum, dataclass or namedtuple among the plain values of a state, when saving and when loading.

    Args:
        cls: The class. A dataclass is built from its fields without a call of `__init__`.
        tag: Its name in checkpoints, "module:qualname" by default. Pass one if the class may move.

    Returns:
        The class: usable as a decorator.

    Raises:
        UsageError: The class is of another kind, or the tag is taken.
    """
    if not (issubclass(cls, enum.Enum) or dataclasses.is_dataclass(cls) or _is_namedtuple(cls)):
        raise UsageError(f"{_type_name(cls)} is no enum, dataclass or namedtuple", hint="save its plain values")
    tag = tag or f"{cls.__module__}:{cls.__qualname__}"
    if _class_of.get(tag, cls) is not cls or _tag_of.get(cls, tag) != tag:
        raise UsageError(
            f"the tag {tag!r} or the class {_type_name(cls)} is registered otherwise", hint="choose one tag"
        )
    _class_of[tag] = cls
    _tag_of[cls] = tag
    return cls


def encode_leaf(value: Any, where: str) -> Leaf:
    """A leaf in safe/1. where is its place, as in state['a'].

    Raises UsageError with the place inside the leaf that has no encoding, and a hint.
    """
    kind = type(value)
    if kind in _SCALARS or (kind is int and value in _INT64):  # most leaves
        data = value
    else:
        trail: list[Any] = []
        try:
            data = _plain(value, trail)
        except _Refused as refused:
            place = where + "".join(step if type(step) is str else f"[{step[0]!r}]" for step in trail)
            raise UsageError(f"{place} cannot be saved: {refused}", hint=refused.hint) from None
    try:
        return Leaf(CODEC, _pack(data))
    except (ValueError, OverflowError) as error:
        raise UsageError(f"{where} cannot be saved: {error}", hint="save less in one leaf") from None


def decode_leaf(leaf: Leaf, where: str) -> Any:
    """The value of a leaf. Allocates no more than a small multiple of its bytes.

    Raises DamagedError for bytes that encode nothing; RestoreError for what this process cannot build: another codec, a
    type of a newer version, a class that is not registered.
    """
    if leaf.codec != CODEC:
        raise RestoreError(f"{where} is encoded as {shown(leaf.codec)}, which this version cannot read")
    try:
        return _unpack(leaf.data, 0)
    except DamagedError as error:
        raise DamagedError(f"{where} is damaged: {error.message}") from error
    except RestoreError as error:
        raise RestoreError(f"{where}: {error.message}", hint=error.hint) from error
    except _MALFORMED as error:
        raise DamagedError(f"{where} is damaged: {cut(error)}") from error


# --- encoding: a value becomes one that msgpack knows, containers of it and ext types ---


def _pack(plain: Any) -> bytes:
    packed: bytes = msgpack.packb(plain, unicode_errors="surrogatepass")
    return packed


def _plain(value: Any, trail: list[Any]) -> Any:
    kind = type(value)
    if kind in _SCALARS:
        return value
    if kind is int:
        return value if value in _INT64 else _ext(_Code.BIGINT, _int_bytes(value))
    if len(trail) >= MAX_DEPTH:
        raise _Refused(f"it contains itself, or is nested deeper than {MAX_DEPTH} levels", "save flatter values")
    if kind is list:
        return _sequence(value, trail)
    if kind is dict and all(type(key) is str for key in value):
        return {key: _inside(item, (key,), trail) for key, item in value.items()}
    encoder = _ENCODERS.get(kind)
    if encoder is not None:
        return encoder(value, trail)
    if kind in _tag_of:
        return _registered(value, _tag_of[kind], trail)
    return _foreign(value)


def _inside(value: Any, step: Any, trail: list[Any]) -> Any:
    # The trail is shortened on success only, so after a refusal it is the place of the refused value.
    trail.append(step)
    plain = _plain(value, trail)
    trail.pop()
    return plain


def _sequence(items: Iterable[Any], trail: list[Any]) -> list[Any]:
    items = list(items)
    kinds = set(map(type, items))
    if kinds <= _SCALARS or (kinds == {int} and min(items) in _INT64 and max(items) in _INT64):
        return items
    return [_inside(item, (index,), trail) for index, item in enumerate(items)]


def _pairs(items: dict[Any, Any], trail: list[Any]) -> list[Any]:
    return [
        [
            _inside(key, " (a key)", trail),
            _inside(item, (key,) if type(key) in _SCALARS | {int} else " (a value)", trail),
        ]
        for key, item in items.items()
    ]


def _members(items: Iterable[Any], trail: list[Any]) -> list[Any]:
    # By their bytes, so that equal sets encode alike in every process.
    return sorted((_inside(item, " (a member)", trail) for item in items), key=_pack)


def _ext(code: _Code, body: Any) -> msgpack.ExtType:
    return msgpack.ExtType(code, _pack(body))


def _int_bytes(value: int) -> bytes:
    return value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)


def _offset(moment: datetime | time) -> int | None:
    """Microseconds east of UTC, None for a moment without a zone."""
    if moment.tzinfo is None:
        return None
    if type(moment.tzinfo) is not timezone:
        raise _Refused(
            f"its time zone is a {_type_name(type(moment.tzinfo))}, not a fixed offset",
            "use moment.astimezone(datetime.timezone.utc)",
        )
    return moment.tzinfo.utcoffset(None) // timedelta(microseconds=1)


def _datetime_fields(moment: datetime) -> list[Any]:
    return [moment.year, moment.month, moment.day, *_time_fields(moment)]


def _time_fields(moment: datetime | time) -> list[Any]:
    return [moment.hour, moment.minute, moment.second, moment.microsecond, moment.fold, _offset(moment)]


_ENCODERS: dict[type, Callable[[Any, list[Any]], msgpack.ExtType]] = {
    tuple: lambda v, trail: _ext(_Code.TUPLE, _sequence(v, trail)),
    dict: lambda v, trail: _ext(_Code.DICT, _pairs(v, trail)),
    set: lambda v, trail: _ext(_Code.SET, _members(v, trail)),
    frozenset: lambda v, trail: _ext(_Code.FROZENSET, _members(v, trail)),
    complex: lambda v, _: _ext(_Code.COMPLEX, [v.real, v.imag]),
    OrderedDict: lambda v, trail: _ext(_Code.ORDERED_DICT, _pairs(v, trail)),
    defaultdict: lambda v, trail: _ext(_Code.DEFAULT_DICT, _pairs(v, trail)),
    Counter: lambda v, trail: _ext(_Code.COUNTER, _pairs(v, trail)),
    deque: lambda v, trail: _ext(_Code.DEQUE, [v.maxlen, _sequence(v, trail)]),
    date: lambda v, _: _ext(_Code.DATE, [v.year, v.month, v.day]),
    datetime: lambda v, _: _ext(_Code.DATETIME, _datetime_fields(v)),
    time: lambda v, _: _ext(_Code.TIME, _time_fields(v)),
    timedelta: lambda v, _: _ext(_Code.TIMEDELTA, [v.days, v.seconds, v.microseconds]),
    io.BytesIO: lambda v, _: _ext(_Code.BYTESIO, [v.tell(), v.getvalue()]),
    PurePosixPath: lambda v, _: _ext(_Code.PATH, str(v)),
    PosixPath: lambda v, _: _ext(_Code.PATH, str(v)),
}


def _registered(value: Any, tag: str, trail: list[Any]) -> msgpack.ExtType:
    if isinstance(value, enum.Flag):  # a combination has no name of its own
        return _ext(_Code.ENUM, [tag, _plain(value.value, trail)])
    if isinstance(value, enum.Enum):
        return _ext(_Code.ENUM, [tag, value.name])
    if isinstance(value, tuple):
        return _ext(_Code.NAMEDTUPLE, [tag, _sequence(value, trail)])
    names = [field.name for field in dataclasses.fields(value)]
    return _ext(_Code.DATACLASS, [tag, {name: _inside(getattr(value, name), f".{name}", trail) for name in names}])


def _foreign(value: Any) -> msgpack.ExtType:
    """Values of numpy and torch, if they are imported already."""
    try:
        if "numpy" in sys.modules and (found := arrays.encode_numpy(value)) is not None:
            return _ext(_Code[found[0]], found[1])
        if "torch" in sys.modules and (found := arrays.encode_torch(value)) is not None:
            return _ext(_Code[found[0]], found[1])
    except ValueError as error:
        raise _Refused(str(error), "save it as a tensor of its own in a dict, or as plain values") from None
    raise _Refused(f"its type {_type_name(type(value))} has no safe encoding", _hint(value))


def _hint(value: Any) -> str:
    cls = type(value)
    if isinstance(value, enum.Enum) or dataclasses.is_dataclass(value) or _is_namedtuple(cls):
        return f"call ckptd_client.register({cls.__name__}) in every process that saves or loads"
    if isinstance(value, PurePath):
        return "save str(path)"
    return "save plain values from which it can be made again"


def _is_namedtuple(cls: type) -> bool:
    return issubclass(cls, tuple) and hasattr(cls, "_fields") and hasattr(cls, "_make")


def _type_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


# --- decoding ---


def _unpack(data: bytes, depth: int) -> Any:
    # Every length is checked by msgpack against the bytes that are there before anything is allocated for it.
    return msgpack.unpackb(
        data, ext_hook=partial(_build, depth + 1), strict_map_key=True, object_pairs_hook=dict_of,
        unicode_errors="surrogatepass", timestamp=0,
    )  # fmt: skip


def _build(depth: int, code: int, data: bytes) -> Any:
    decoder = _DECODERS.get(code)
    if decoder is None:
        raise RestoreError(f"a value of unknown type {code}", hint="read it with the version of ckptd that wrote it")
    if depth > MAX_DEPTH + 1:
        raise DamagedError(f"values nested deeper than {MAX_DEPTH} levels")
    try:
        return decoder(_unpack(data, depth))
    except CkptdError:
        raise
    except _MALFORMED as error:
        raise DamagedError(f"{_Code(code).name.lower()}: {cut(error)}") from error


def _need(kind: type, body: Any) -> Any:
    if type(body) is not kind:
        raise DamagedError(f"a {type(body).__name__} where a {kind.__name__} belongs")
    return body


def _dict(body: Any) -> dict[Any, Any]:
    return dict_of(_need(list, body))


def _deque(body: Any) -> deque[Any]:
    maxlen, items = body
    if maxlen is not None and len(_need(list, items)) > _need(int, maxlen):
        raise DamagedError("more items than a deque may have")
    return deque(items, maxlen)


def _bytes_io(body: Any) -> io.BytesIO:
    position, data = body
    made = io.BytesIO(_need(bytes, data))
    made.seek(_need(int, position))
    return made


def _moment(make: Callable[..., Any], body: Any) -> Any:
    *fields, fold, offset = _need(list, body)
    zone = None if offset is None else timezone(timedelta(microseconds=offset))
    return make(*fields, fold=fold, tzinfo=zone)


def _class(tag: Any, base: Callable[[type], bool]) -> Any:
    cls = _class_of.get(_need(str, tag))
    if cls is None or not base(cls):
        raise RestoreError(
            f"a value of the class {shown(tag)}, which is not registered here",
            hint="call ckptd_client.register with it before load",
        )
    return cls


def _enum(body: Any) -> Any:
    tag, member = body
    cls = _class(tag, lambda cls: issubclass(cls, enum.Enum))
    if issubclass(cls, enum.Flag):
        return cls(_need(int, member))
    if _need(str, member) not in cls.__members__:
        raise RestoreError(
            f"{shown(tag)} has no member {shown(member)} any more", hint="add it, or load an older checkpoint"
        )
    return cls[member]


def _dataclass(body: Any) -> Any:
    tag, values = body
    cls = _class(tag, dataclasses.is_dataclass)
    names = {field.name for field in dataclasses.fields(cls)}
    if names != _need(dict, values).keys():
        raise RestoreError(f"{tag} has the fields {sorted(names)}, the checkpoint {cut(sorted(map(str, values)))}")
    made = object.__new__(cls)
    for name, value in values.items():
        object.__setattr__(made, name, value)  # also into a frozen one
    return made


def _namedtuple(body: Any) -> Any:
    tag, values = body
    cls = _class(tag, _is_namedtuple)
    if len(_need(list, values)) != len(cls._fields):
        raise RestoreError(f"{tag} has {len(cls._fields)} fields, the checkpoint {len(values)}")
    return cls._make(values)


_DECODERS: dict[int, Callable[[Any], Any]] = {
    _Code.TUPLE: lambda body: tuple(_need(list, body)),
    _Code.SET: lambda body: set_of(_need(list, body)),
    _Code.FROZENSET: lambda body: frozenset(set_of(_need(list, body))),
    _Code.BIGINT: lambda body: int.from_bytes(_need(bytes, body), "little", signed=True),
    _Code.COMPLEX: lambda body: complex(*body),
    _Code.DICT: _dict,
    _Code.ORDERED_DICT: lambda body: OrderedDict(_dict(body)),
    _Code.DEFAULT_DICT: _dict,
    _Code.COUNTER: lambda body: Counter(_dict(body)),
    _Code.DEQUE: _deque,
    _Code.DATE: lambda body: date(*body),
    _Code.DATETIME: partial(_moment, datetime),
    _Code.TIME: partial(_moment, time),
    _Code.TIMEDELTA: lambda body: timedelta(*body),
    _Code.PATH: lambda body: PurePosixPath(_need(str, body)),
    _Code.ENUM: _enum,
    _Code.DATACLASS: _dataclass,
    _Code.NAMEDTUPLE: _namedtuple,
    _Code.BYTESIO: _bytes_io,
    _Code.TORCH_SIZE: arrays.decode_size,
    _Code.TORCH_DTYPE: arrays.decode_dtype,
    _Code.TORCH_DEVICE: arrays.decode_device,
    _Code.TENSOR: arrays.decode_tensor,
    _Code.NUMPY_SCALAR: arrays.decode_numpy_scalar,
    _Code.NUMPY_ARRAY: arrays.decode_numpy_array,
}
