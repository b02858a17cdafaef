"""Changes values and bytes as one does who knows the format: sizes, counts, names, nesting, kinds, repetitions."""

import json
import random
import struct
from typing import Any

import msgpack

INTS = [
    0, 1, 2, 3, 7, 15, 63, 64, 255, 4095, 4096, 4097, 65_535, 1 << 20, 99_999_999, (1 << 31) - 1, 1 << 31, 1 << 32,
    (1 << 53) + 1, (1 << 61) - 1, 1 << 61, (1 << 62) - 1, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -1, -2,
    -4096, -(1 << 31), -(1 << 63),
]  # fmt: skip
TEXTS = [
    "", ".", "..", "/", "a", "a\0b", "\n", "../../x", "/etc/passwd", "x" * 300, "x" * 70_000, "\U0001f600" * 40,
    "r00000-p00.safetensors", "r00001-p00.safetensors", "latest", "COMMITTED", "U8", "F64", "pickle", "safe/1", "1e999",
    "é", "A" * 64, "step-000000010.i0001", "data.pkl", "model.weight", "__metadata__", "0" * 32,
]  # fmt: skip
FLOATS = [0.0, -1.0, 0.5, 1e308, -1e308, 5e-324, float("inf"), float("-inf"), float("nan")]
DATA = [b"", b"\0", b"\0" * 16, b"\xff" * 17, b"x" * 100_000, b"\x91" * 2000]
MAX_NESTING = 3000
MAX_PLACES = 5000


class Twice(list):
    """Pairs of a map that has a key twice."""


class Deep:
    """A value in so many lists, or maps."""

    def __init__(self, levels: int, value: Any, *, lists: bool) -> None:
        self.levels, self.value, self.lists = levels, value, lists


def places(value: Any) -> list[tuple[Any, ...]]:
    """Of everything in a value, itself first; of large ones the first few thousand."""
    found: list[tuple[Any, ...]] = []
    left: list[tuple[tuple[Any, ...], Any]] = [((), value)]
    while left and len(found) < MAX_PLACES:
        place, item = left.pop()
        found.append(place)
        if isinstance(item, dict):
            left += [((*place, key), inner) for key, inner in item.items()]
        elif type(item) is list:
            left += [((*place, index), inner) for index, inner in enumerate(item[:200])]
    return found


def at(value: Any, place: tuple[Any, ...]) -> Any:
    """What lies there."""
    for key in place:
        value = value[key]
    return value


def edgy(chance: random.Random, like: Any = None) -> Any:
    """A value that a reader may not expect; most of the kind of another."""
    if like is not None and chance.random() < 0.7:
        if isinstance(like, bool):
            return not like
        if isinstance(like, int):
            near = [like - 1, like + 1, like * 2, like // 2, -like, like + 4096, like ^ (1 << chance.randrange(40))]
            return chance.choice(near + INTS)
        if isinstance(like, str):
            turned = [like + "\0", like + "x", like[:-1], like.upper(), like * 2, "\ud800" + like, like + "\n"]
            return chance.choice(turned + TEXTS)
        if isinstance(like, bytes):
            return chance.choice([like[:-1], like + b"\0", like[::-1], flipped(chance, like), *DATA])
        if isinstance(like, list):
            return chance.choice([[], like * 2, like[:-1], like[::-1], [like], like * 50])
        if isinstance(like, dict):
            return chance.choice([{}, {"": like}, [like], dict(list(like.items())[:-1])])
    kinds = [INTS, TEXTS, FLOATS, DATA, [None, True, False], [[], {}, [[]], [0] * 1000, {str(i): i for i in range(50)}]]
    return chance.choice(chance.choice(kinds))


def deep(chance: random.Random, value: Any) -> Any:
    """Nested."""
    return Deep(chance.choice([2, 30, 101, MAX_NESTING]), value, lists=chance.random() < 0.5)


def mutated(chance: random.Random, value: Any) -> Any:
    """The value with one to three changes. May be changed in place."""
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        value = _changed(chance, value)
    return value


def _changed(chance: random.Random, value: Any) -> Any:
    place = chance.choice(places(value))
    if not place:
        return edgy(chance, value) if chance.random() < 0.1 else _inside(chance, value)
    holder, key = at(value, place[:-1]), place[-1]
    how = chance.random()
    if how < 0.6:
        holder[key] = edgy(chance, holder[key])
    elif how < 0.7 and isinstance(holder, dict):
        del holder[key]
    elif how < 0.8:
        other = chance.choice(places(value))
        holder[key] = json_copy(at(value, other))
    elif how < 0.87 and isinstance(holder, list):
        holder[key:key] = [json_copy(holder[key])] * chance.choice([1, 2, 300])
    elif how < 0.94 and isinstance(holder, dict):
        holder[str(edgy(chance, str(key)))[:70_000]] = json_copy(holder[key])
    else:
        holder[key] = deep(chance, holder[key])
    return value


def _inside(chance: random.Random, value: Any) -> Any:
    if isinstance(value, dict) and value:
        return Twice([*value.items(), chance.choice(list(value.items()))])
    return [value, edgy(chance)]


def json_copy(value: Any) -> Any:
    """A copy of containers."""
    if isinstance(value, dict):
        return {key: json_copy(item) for key, item in value.items()}
    return [json_copy(item) for item in value] if type(value) is list else value


def to_msgpack(value: Any) -> bytes:
    """Any value, ints beyond 64 bits cut off; maps with a key twice, and halves of characters, as they are."""
    if isinstance(value, Deep):
        return (b"\x91" if value.lists else b"\x81\xa1x") * value.levels + to_msgpack(value.value)
    if isinstance(value, Twice):
        head = b"\xdf" + struct.pack(">I", len(value))
        return head + b"".join(to_msgpack(key) + to_msgpack(item) for key, item in value)
    if isinstance(value, dict):
        return (
            b"\xdf" + struct.pack(">I", len(value)) + b"".join(to_msgpack(k) + to_msgpack(v) for k, v in value.items())
        )
    if isinstance(value, list | tuple):
        return b"\xdd" + struct.pack(">I", len(value)) + b"".join(map(to_msgpack, value))
    if isinstance(value, int) and not isinstance(value, bool):
        value = max(-(1 << 63), min((1 << 64) - 1, value))
    return msgpack.packb(value, unicode_errors="surrogatepass")


def to_json(value: Any) -> bytes:
    """Any value: NaN and infinities as Python writes them, bytes as text."""
    if isinstance(value, Deep):
        opening, closing = (b"[", b"]") if value.lists else (b'{"x":', b"}")
        return opening * value.levels + to_json(value.value) + closing * value.levels
    if isinstance(value, Twice):
        return b"{" + b",".join(to_json(str(k)) + b":" + to_json(v) for k, v in value) + b"}"
    if isinstance(value, dict):
        return b"{" + b",".join(to_json(str(k)) + b":" + to_json(v) for k, v in value.items()) + b"}"
    if isinstance(value, list | tuple):
        return b"[" + b",".join(map(to_json, value)) + b"]"
    if isinstance(value, bytes):
        value = value.decode("latin-1")
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


def flipped(chance: random.Random, data: bytes) -> bytes:
    """Bits and runs of bytes changed."""
    made = bytearray(data)
    for _ in range(chance.choice([1, 1, 2, 8]) if made else 0):
        at_byte = chance.randrange(len(made))
        how = chance.random()
        if how < 0.4:
            made[at_byte] ^= 1 << chance.randrange(8)
        elif how < 0.7:
            made[at_byte] = chance.choice([0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)])
        elif how < 0.85:
            made[at_byte : at_byte + 4] = struct.pack("<I", chance.choice([0, 1, 0xFFFFFFFF, 0x7FFFFFFF, len(data)]))[
                : len(made) - at_byte
            ]
        else:
            made[at_byte : at_byte + 8] = struct.pack("<Q", chance.choice([0, (1 << 64) - 1, 1 << 40, len(data)]))[
                : len(made) - at_byte
            ]
    return bytes(made)


def torn(chance: random.Random, data: bytes) -> bytes:
    """Cut off, flipped, repeated, swapped, grown, or something else altogether."""
    how = chance.random()
    cut = chance.randrange(len(data) + 1)
    if how < 0.25:
        return data[:cut]
    if how < 0.7:
        return flipped(chance, data)
    if how < 0.8:
        start = chance.randrange(len(data) + 1)
        return data[:cut] + data[start : start + chance.choice([1, 8, 64, 4096])] + data[cut:]
    if how < 0.9:
        return data[:cut] + data[cut + chance.choice([1, 2, 8, 512]) :]
    return chance.choice([b"", data + data, bytes(len(data)), chance.randbytes(200), data + bytes(5000)])
