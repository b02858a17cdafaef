"""The golden bytes of every message between processes of ckptd: what stands in tests/golden/wire/*.txt.

``python -m tests.golden.wire`` (``make golden-wire``) writes them anew. A line there that changes is a change of the
protocol: if it is meant, raise the version (``ckptd.peers.packets.VERSION``, ``ckptd.store.messages.VERSION``).

Each message stands there twice: with a value in every field, and (``bare``) with nothing but what it must have. The
values are made of the types and of the fields' names: what changes places changes the bytes. A new field needs no line
here; a new pattern needs an example in ``TEXTS``.
"""

import functools
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_args
from zlib import crc32

import msgspec
from msgspec import inspect

from ckptd.peers import packets
from ckptd.shared.format.rank_members import members_of
from ckptd.shared.format.replica_attestations import Attestation, Where
from ckptd.shared.protocol import node_facts, node_messages
from ckptd.shared.protocol.rank_sets import RankRun
from ckptd.shared.protocol.tier_runs import TierRun
from ckptd.shared.protocol.topology import Rendezvous
from ckptd.store import messages

HERE = Path(__file__).parent / "wire"
WIDTH = 112
TEXTS = (  # the first that fits a pattern; a number of two digits makes two of one pattern differ
    "text-{0}", "/store-{0}", "r000{0}-0000{0}.slot", "step-0000000{0}.i00{0}", "tcp://10.0.0.{0}:40{0}",
    "0123456789abcd{0}-00.parity", "r000{0}-p00.safetensors", "0123456789abcdef0123456789abcd{0}", "k{0}x" * 10,
    "0.1.{0}", ".metadata", "0123456789abcd{0}", "e000000{0}-0123abcd",
)  # fmt: skip
VALUES: dict[type[Any], dict[str, Any]] = {  # where the type does not say all
    Rendezvous: {"ticket": bytes(range(32))},
    RankRun: {"first": 3, "count": 5, "step": 2},
    TierRun: {"first": 3, "count": 5},
    Attestation: {"members": members_of(range(3, 8, 2))},
    Where: {"members": members_of(range(3, 8, 2))},
    node_facts.StagedSegment: {"rank": 3},  # of as many as the message says
    node_facts.HeldSegment: {"rank": 3},
    packets.Envelope: {"version": packets.VERSION},
    messages.Hello: {"version": messages.VERSION},
}


class Wire(NamedTuple):
    """One union of messages, and how it is told to the other side."""

    union: Any
    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]


def _decode_hello(raw: bytes) -> Any:
    return msgspec.msgpack.decode(raw, type=messages.Hello)


def _frame_body(message: Any) -> bytes:
    return messages.encode_frame(message)[4:]


WIRES = {
    "node_messages": Wire(node_messages.Message, node_messages.encode, node_messages.decode),
    "packets": Wire(packets.Body, packets.encode_body, packets.decode_body),
    "envelope": Wire(packets.Envelope, packets.encode_envelope, packets.decode_envelope),
    "store_hello": Wire(messages.Hello, _frame_body, _decode_hello),
    "store_requests": Wire(messages.Order, _frame_body, messages.decode_request),
    "store_replies": Wire(messages.Reply, _frame_body, messages.decode_reply),
}


# --- examples


def example(kind: inspect.Type, number: int, *, bare: bool = False) -> Iterator[Any]:  # noqa: C901, PLR0912 - one line per kind
    """Values of the type, one for each struct of a union of them. Two numbers give two, where the type has them."""
    match kind:
        case inspect.StructType(cls=cls):
            yield from structs(cls, bare=bare)
        case inspect.UnionType(types=types):
            some = [one for one in types if not isinstance(one, inspect.NoneType)]
            for one in some:
                yield from example(one, number, bare=bare)
        case inspect.VarTupleType(item_type=item):
            yield tuple(several(item, number))
        case inspect.ListType(item_type=item):
            yield several(item, number)
        case inspect.TupleType(item_types=items):
            yield tuple(next(example(item, number + place)) for place, item in enumerate(items))
        case inspect.NamedTupleType(cls=cls, fields=fields):
            yield cls(*(next(example(field.type, number + place)) for place, field in enumerate(fields)))
        case inspect.DictType(key_type=key, value_type=value):
            yield {next(example(key, number)): next(example(value, number))}
        case inspect.EnumType(cls=cls):
            yield list(cls)[-1]
        case inspect.LiteralType(values=values):
            yield values[-1]
        case inspect.BoolType():
            yield True
        case inspect.FloatType():
            yield number % 1000 + 0.5
        case inspect.IntType(ge=low, le=high, lt=end):
            most = high if high is not None else end - 1 if end is not None else 1 << 31
            yield (low or 0) + number % (most - (low or 0) + 1)
        case inspect.BytesType(min_length=nbytes):
            yield bytes([number % 256]) * (nbytes or 3)
        case inspect.StrType(pattern=pattern):
            texts = (text.format(f"{number % 100:02d}") for text in TEXTS)
            yield next(text for text in texts if pattern is None or re.search(pattern, text))
        case _:
            raise AssertionError(f"no example for {kind}: add one to tests/golden/wire.py")


def several(item: inspect.Type, number: int) -> list[Any]:
    """One struct, or two of anything else: no two are to be equal."""
    count = 1 if isinstance(item, inspect.StructType) else 2
    return [next(example(item, number + place)) for place in range(count)]


def structs(cls: type[Any], *, bare: bool = False) -> Iterator[Any]:
    """Examples of a struct: as many as the union that one of its fields may be has members."""
    found = inspect.type_info(cls)
    assert isinstance(found, inspect.StructType)
    fields = [field for field in found.fields if field.required or not bare]
    made = {field.name: list(example(field.type, crc32(field.name.encode()), bare=bare)) for field in fields}
    made |= {name: [value] for name, value in VALUES.get(cls, {}).items() if name in made}
    for turn in range(max((len(values) for values in made.values()), default=1)):
        yield cls(**{name: values[min(turn, len(values) - 1)] for name, values in made.items()})


def tag(message: Any) -> str:
    """As it stands on the wire; the class's name for what has none."""
    return str(message.__struct_config__.tag or type(message).__name__)


def name(message: Any) -> str:
    """The message's tag, and that of what it carries."""
    inner = [value for value in map(message.__getattribute__, message.__struct_fields__) if is_tagged(value)]
    return " ".join([tag(message), *map(tag, inner[:1])])


def is_tagged(value: Any) -> bool:
    """Whether it is a struct that says on the wire what it is."""
    return isinstance(value, msgspec.Struct) and value.__struct_config__.tag is not None


def members(union: Any) -> tuple[type[Any], ...]:
    """The classes of a union, or the class alone."""
    return get_args(union) or (union,)


@functools.cache
def examples(wire: Wire) -> dict[str, Any]:
    """By name: every message of the wire, with all its fields, and bare."""
    found: dict[str, Any] = {}
    for cls in members(wire.union):
        for one in structs(cls):
            found[name(one)] = one
        for one in structs(cls, bare=True):
            found[f"{name(one)} (bare)"] = one
    return found


# --- files


def read(wire: str) -> dict[str, bytes]:
    """The golden bytes, by name."""
    found: dict[str, str] = {}
    last = ""
    for line in (HERE / f"{wire}.txt").read_text().splitlines():
        if line.startswith(" "):
            found[last] += line.strip()
        elif line and not line.startswith("#"):
            found[last := line] = ""
    return {key: bytes.fromhex(text) for key, text in found.items()}


def write(wire: str) -> None:
    """The golden bytes of today's code."""
    lines = ["# Written by tests/golden/wire.py (make golden-wire): bytes of each message, in hex."]
    for key, message in examples(WIRES[wire]).items():
        raw = WIRES[wire].encode(message).hex()
        lines += [key, *(f"    {part}" for part in textwrap.wrap(raw, WIDTH))]
    (HERE / f"{wire}.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    for every in WIRES:
        write(every)
