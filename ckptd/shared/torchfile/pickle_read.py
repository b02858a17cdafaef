"""Pickles of other programs, such as that in a torch.save file, run over inert values. Pure: bytes in, values out.

Nothing that a pickle names is imported or called: a class or function is its name, and what a call of it would have
made is a record of that name. Tensors become a note of where their bytes lie. So a crafted pickle does nothing; what it
can take is a little time and memory, both bounded by its length.
"""
# ruff: noqa: D102 - a method for each opcode

import math
import pickletools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ckptd.shared.base.errors import DamagedError
from ckptd.shared.base.wording import cut
from ckptd.shared.format.dtypes import CODE_OF_STORAGE, DTYPES, itemsize
from ckptd.shared.format.placement import MAX_DIMS

MAX_NBYTES = 32 << 20  # of a pickle: some 100,000 parameters; at worst 64 times as much memory, and 30 s
_MAX_ARGS = 8  # of a call that is looked into: many calls with one long tuple would take for ever
_MAX_NAME = 1000
_INT64 = range(-(1 << 63), 1 << 63)
_KEYS = range(-(1 << 31), 1 << 31)  # ints that are their own hash
_MAX_INT_KEYS = 1 << 15  # of a file: however they were chosen, their dicts are made in a second

_DTYPES = {f"torch.{dtype.torch}": code for code, dtype in DTYPES.items()}


class Global(NamedTuple):
    """What a module calls by this name."""

    name: str  # with the module


class Made:
    """What a call of a class or function would have made: the name, the arguments, the state it was given."""

    __slots__ = ("args", "of", "state")

    def __init__(self, of: object, args: object) -> None:
        self.of = of.name if isinstance(of, Global) else ""
        self.args = args
        self.state: Any = None


class Storage(NamedTuple):
    """A record of the file. dtype: a code of safetensors, "" for bytes."""

    key: str
    dtype: str


class Stored(NamedTuple):
    """A tensor: elements of a storage."""

    key: str
    dtype: str
    offset: int  # elements
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def elements(self) -> int:
        """How many."""
        return math.prod(self.shape)

    @property
    def contiguous(self) -> bool:
        """Whether the elements follow each other in the storage, in their order."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return not self.elements
            expected *= size
        return True


def loads(data: bytes, *, where: str, storages: Mapping[str, int] | None = None) -> Any:
    """The value in data: plain values and containers, and the classes above for all else.

    A dict has the items of its string and int keys alone. Raises DamagedError, naming where, for what is no pickle.
    storages: bytes of each storage that there is. Then also for what torch's unpickler would take long for, or read
    beyond a storage's end: a call of what is no name, keys of one hash, a storage of another size.
    """
    if len(data) > MAX_NBYTES:
        raise DamagedError(f"{where}: a pickle of {len(data)} bytes, more than any checkpoint of DeepSpeed's has")
    machine = Machine() if storages is None else _Strict(storages)
    try:
        return machine.run(data)
    except MALFORMED as error:
        raise DamagedError(f"{where}: its pickle cannot be read: {cut(error)}") from None


MALFORMED = (ValueError, TypeError, LookupError, OverflowError, MemoryError)


# -- what calls make --


def _made(function: object, args: object) -> Any:
    maker = _MAKERS.get(function.name) if isinstance(function, Global) else None
    value = maker(args) if maker and isinstance(args, tuple) and len(args) <= _MAX_ARGS else None
    return Made(function, args) if value is None else value


def _dict(args: tuple[Any, ...]) -> Any:
    return {} if all(isinstance(arg, Global) for arg in args) else None


def _size(args: tuple[Any, ...]) -> Any:
    match args:
        case (list() | tuple() as sizes,) if _are_sizes(sizes):
            return tuple(sizes)
    return None


def _tensor(args: tuple[Any, ...]) -> Any:
    """_rebuild_tensor_v2 (storage, offset, size, stride, requires_grad, hooks), v3 with the dtype after those."""
    match args:
        case (Storage(key, dtype), int(offset), tuple(shape), tuple(stride), *rest):
            if any(rest[2:]) and any(isinstance(part, dict) and part for part in rest):
                return None  # conjugated, say: the bytes are not its values
            if len(rest) > 2 and isinstance(rest[2], Global):  # noqa: PLR2004
                dtype = _DTYPES.get(rest[2].name, "")
            if dtype and _are_sizes((offset,)) and _are_sizes(shape) and _are_sizes(stride):
                return Stored(key, dtype, offset, shape, stride) if len(shape) == len(stride) else None
    return None


def _parameter(args: tuple[Any, ...]) -> Any:
    return args[0] if args else None


def _of_a_subclass(args: tuple[Any, ...]) -> Any:
    match args:
        case (Global(name), _, tuple(inner), *_) if name in _TENSORS and len(inner) <= _MAX_ARGS:
            return _tensor(inner)
    return None


_TENSORS = ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3")
_MAKERS: dict[str, Callable[[tuple[Any, ...]], Any]] = {
    "collections.OrderedDict": _dict,
    "collections.defaultdict": _dict,
    "torch.Size": _size,
    **dict.fromkeys(_TENSORS, _tensor),
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._tensor._rebuild_from_type_v2": _of_a_subclass,
}


def _are_sizes(numbers: Sequence[object]) -> bool:
    return len(numbers) <= MAX_DIMS and all(type(number) is int and 0 <= number < 1 << 62 for number in numbers)


def _storage(pid: object) -> Any:
    """What torch's persistent ids stand for: ("storage", its type, key, device, elements)."""
    match pid:
        case ("storage", Global(name), str(key), _, _):
            return Storage(key, CODE_OF_STORAGE.get(name.rpartition(".")[2], ""))
    return Made(None, ())


# -- the opcodes --


class Machine:
    """The stack, and below it those that marks have set aside."""

    refused: frozenset[str] = frozenset()  # opcodes
    lax = True  # what is put into something else than a list is lost
    check: Callable[[Any], None] | None = None  # raises ValueError for an argument that may not be there

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self._below: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        self._int_keys = 0

    def run(self, data: bytes) -> Any:
        """The value of the pickle. Raises one of MALFORMED for what has no place in it."""
        known = {name: act for name, act in _OPCODES.items() if name not in self.refused}
        for opcode, arg, _ in pickletools.genops(data):
            if self.check is not None:
                self.check(arg)
            if opcode.name in _VALUES:
                self.stack.append(arg)
            elif opcode.name in known:
                known[opcode.name](self, arg)
            else:
                raise ValueError(f"it has the opcode {opcode.name}")
        (value,) = self.stack
        return value

    def mark(self, _: None) -> None:
        self._below.append(self.stack)
        self.stack = []

    def marked(self) -> list[Any]:
        """What came after the last mark, taken off with it."""
        items, self.stack = self.stack, self._below.pop()
        return items

    def pop(self, _: None) -> None:
        if self.stack:
            self.stack.pop()
        else:
            self.marked()

    def pop_mark(self, _: None) -> None:
        self.marked()

    def dup(self, _: None) -> None:
        self.stack.append(self.stack[-1])

    def put(self, number: int | None) -> None:
        self._memo[len(self._memo) if number is None else number] = self.stack[-1]

    def get(self, number: int) -> None:
        self.stack.append(self._memo[number])

    def container(self, kind: Callable[[list[Any]], Any]) -> None:
        items = self.marked()
        self.stack.append(kind(items))

    def extend(self, items: list[Any]) -> None:
        if type(self.stack[-1]) is list:
            self.stack[-1].extend(items)
        elif not self.lax:
            raise ValueError("it puts items into what is no list")

    def update(self, items: list[Any]) -> None:
        """Of other keys the hash could take for ever."""
        made = self.stack[-1]
        if isinstance(made, dict):
            for key, value in zip(items[::2], items[1::2], strict=True):
                if type(key) is str or (type(key) is int and key in _KEYS):
                    made[key] = value
                    self._count_key(key)

    def _count_key(self, key: object) -> None:
        self._int_keys += type(key) is int
        if self._int_keys > _MAX_INT_KEYS:
            raise ValueError(f"it has more than {_MAX_INT_KEYS} numbers as keys")

    def dict_of(self, _: None) -> None:
        items = self.marked()
        self.stack.append({})
        self.update(items)

    def last(self, count: int) -> list[Any]:
        """What lies on top, taken off."""
        items = self.stack[-count:]
        if len(items) < count:
            raise ValueError("it takes more than there is")
        del self.stack[-count:]
        return items

    def call(self, _: None) -> None:
        function, args = self.last(2)
        self.stack.append(_made(function, args))

    def call_with_names(self, _: None) -> None:
        function, args, _names = self.last(3)
        self.stack.append(_made(function, args))

    def build(self, _: None) -> None:
        (state,) = self.last(1)
        if isinstance(self.stack[-1], Made):
            self.stack[-1].state = state

    def named(self, name: str) -> None:
        self.stack.append(Global(name.replace(" ", ".")))

    def stack_global(self, _: None) -> None:
        """A name too long for anybody is none: joined again and again it would take more memory than the file."""
        module, name = self.last(2)
        known = all(isinstance(part, str) and len(part) < _MAX_NAME for part in (module, name))
        self.stack.append(Global(f"{module}.{name}" if known else ""))

    def instance(self, name: str) -> None:
        self.stack.append(Made(Global(name.replace(" ", ".")), tuple(self.marked())))

    def object(self, _: None) -> None:
        function, *args = self.marked()
        self.stack.append(Made(function, tuple(args)))

    def persistent(self, _: None) -> None:
        (pid,) = self.last(1)
        self.stack.append(_storage(pid))


class _Strict(Machine):
    """Of a pickle that torch's unpickler will be given: what makes that take long, or say a lot, is refused."""

    lax = False

    def __init__(self, storages: Mapping[str, int]) -> None:
        super().__init__()
        self._storages = storages

    def check(self, value: Any) -> None:
        """Of 64 bits."""
        if type(value) is int and value not in _INT64:
            raise ValueError("it has a number of more than 64 bits")

    def call(self, _: None) -> None:
        """Of a name, with a tuple of what there is little of."""
        function, args = self.last(2)
        if not isinstance(function, Global) or type(args) is not tuple or len(args) > _MAX_ARGS:
            raise ValueError("it calls what is no function")
        if function.name == "_codecs.encode" and args[1:] != ("latin1",):
            raise ValueError("it has bytes in another code than latin1")
        if function.name.endswith(".bytearray") and not all(isinstance(arg, (str, bytes, Made)) for arg in args):
            raise ValueError("it has bytes by their number alone")
        if function.name.endswith(".set") and not all(isinstance(arg, (list, tuple)) for arg in args):
            raise ValueError("it makes a set of what is no list")
        if function.name.endswith((".set", "collections.Counter")):
            for key in (key for arg in args for key in (arg if isinstance(arg, (list, tuple)) else ())):
                self._check_key(key)
        self.stack.append(_made(function, args))

    def _check_key(self, key: object) -> None:
        parts = key if type(key) is tuple and len(key) <= _MAX_ARGS else (key,)
        if not all(part is None or type(part) in _PLAIN for part in parts):
            raise ValueError("it has a key that is no plain value")
        self._int_keys += type(key) is not str
        self._count_key(None)

    def update(self, items: list[Any]) -> None:
        """Every key."""
        for key in items[::2]:
            self._check_key(key)
        super().update(items)

    def persistent(self, _: None) -> None:
        """A storage of the size that it has, and nothing else."""
        (pid,) = self.last(1)
        match pid:
            case ("storage", Global(name), str(key), str(), int(numel)) if key in self._storages:
                found = _storage(pid)
                typed = name.rpartition(".")[2] in {*CODE_OF_STORAGE, "UntypedStorage"}
                if typed and numel * (itemsize(found.dtype) if found.dtype else 1) == self._storages[key]:
                    self.stack.append(found)
                    return
        raise ValueError("it refers to what is no storage of its size")


_PLAIN = frozenset({str, bytes, bool, int, float})
_VALUES = frozenset({
    "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT",
    "STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8",
    "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8",
})  # fmt: skip
_OPCODES: dict[str, Callable[[Machine, Any], None]] = {
    "PROTO": lambda _machine, _: None,
    "FRAME": lambda _machine, _: None,
    "STOP": lambda _machine, _: None,
    "NONE": lambda machine, _: machine.stack.append(None),
    "NEWTRUE": lambda machine, _: machine.stack.append(True),
    "NEWFALSE": lambda machine, _: machine.stack.append(False),
    "EMPTY_TUPLE": lambda machine, _: machine.stack.append(()),
    "PERSID": lambda machine, _: machine.stack.append(Made(None, ())),
    "MARK": Machine.mark,
    "POP": Machine.pop,
    "POP_MARK": Machine.pop_mark,
    "DUP": Machine.dup,
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"), Machine.put),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), Machine.get),
    "EMPTY_LIST": lambda machine, _: machine.stack.append([]),
    "EMPTY_DICT": lambda machine, _: machine.stack.append({}),
    "EMPTY_SET": lambda machine, _: machine.stack.append([]),
    "LIST": lambda machine, _: machine.container(list),
    "TUPLE": lambda machine, _: machine.container(tuple),
    "FROZENSET": lambda machine, _: machine.container(list),
    "TUPLE1": lambda machine, _: machine.stack.append(tuple(machine.last(1))),
    "TUPLE2": lambda machine, _: machine.stack.append(tuple(machine.last(2))),
    "TUPLE3": lambda machine, _: machine.stack.append(tuple(machine.last(3))),
    "DICT": Machine.dict_of,
    "APPEND": lambda machine, _: machine.extend(machine.last(1)),
    "APPENDS": lambda machine, _: machine.extend(machine.marked()),
    "ADDITEMS": lambda machine, _: machine.extend(machine.marked()),
    "SETITEM": lambda machine, _: machine.update(machine.last(2)),
    "SETITEMS": lambda machine, _: machine.update(machine.marked()),
    "GLOBAL": lambda machine, arg: machine.named(arg),
    "STACK_GLOBAL": lambda machine, arg: machine.stack_global(arg),
    "REDUCE": lambda machine, _: machine.call(_),
    "NEWOBJ": lambda machine, _: machine.call(_),
    "NEWOBJ_EX": Machine.call_with_names,
    "BUILD": lambda machine, arg: machine.build(arg),
    "INST": Machine.instance,
    "OBJ": Machine.object,
    "BINPERSID": lambda machine, _: machine.persistent(_),
}
