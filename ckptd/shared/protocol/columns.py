"""A topology as bytes, column by column: at 10,000 nodes a tenth of what a map for each node takes.

Its digest is that of the columns before they are compressed: two versions of zlib may compress them differently.
"""

import hashlib
import itertools
import struct
import zlib
from collections.abc import Callable, Sequence
from typing import Annotated, Final, TypeVar

import msgspec

from ckptd.shared.base.decoding import MALFORMED
from ckptd.shared.base.errors import ProtocolError
from ckptd.shared.base.wording import cut

DIGEST_NBYTES: Final = 16
MAX_NODES: Final = 1 << 16
MAX_NBYTES: Final = 8 << 20  # of the compressed columns and the keys
_MAX_PLAIN_NBYTES = 64 << 20
_KEY_NBYTES, _KEY_CHARS = 32, 40
_LEVEL = 1  # a quarter of the time of 6, for 1 byte a node
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"  # Z85, ZeroMQ RFC 32
_VALUES = {ord(digit): value for value, digit in enumerate(_DIGITS)}
_PAIRS = [high + low for high, low in itertools.product(_DIGITS, repeat=2)]

T = TypeVar("T")
Row = tuple[str, str, str, str]  # node, arena, endpoint, domain
Settings = tuple[str, int, bool]


class Packed(msgspec.Struct, frozen=True, array_like=True):
    """``keys``: 32 bytes a node; ``rest``: the other columns, compressed."""

    digest: Annotated[bytes, msgspec.Meta(min_length=DIGEST_NBYTES, max_length=DIGEST_NBYTES)]
    keys: Annotated[bytes, msgspec.Meta(max_length=_KEY_NBYTES * MAX_NODES)]
    rest: Annotated[bytes, msgspec.Meta(max_length=MAX_NBYTES)]


class _Rest(msgspec.Struct, array_like=True):
    """``steps`` and ``counts``: runs of ranks on one node, each with how far its node lies behind that of the last."""

    columns: tuple[list[str], list[str], list[str], list[str]]
    steps: list[int]
    counts: list[int]
    settings: Settings


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Rest)


def pack(rows: Sequence[Row], keys: Sequence[str], homes: Sequence[int], settings: Settings) -> Packed:
    """The columns of a topology as bytes. keys: in Z85. Raises ProtocolError for a key that is none."""
    steps, counts, last = [], [], -1
    for home, run in itertools.groupby(homes):
        steps.append(home - last)
        counts.append(sum(1 for _ in run))
        last = home
    names, arenas, endpoints, domains = (list(column) for column in zip(*rows, strict=True))
    plain = _encoder.encode(_Rest((names, arenas, endpoints, domains), steps, counts, settings))
    raw = raw_keys(keys)
    return Packed(digest_of(raw, plain), raw, zlib.compress(plain, _LEVEL))


def unpack(packed: Packed) -> tuple[list[tuple[str, str, str, str, str]], list[int], Settings]:
    """Rows (node, arena, endpoint, key, domain), homes and settings. Raises ProtocolError.

    The caller checks the fields. What the columns expand to is limited before it is in memory.
    """
    inflater = zlib.decompressobj()
    try:
        plain = inflater.decompress(packed.rest, _MAX_PLAIN_NBYTES)
    except zlib.error as error:
        raise _malformed(error) from None
    if not inflater.eof or inflater.unused_data:
        raise _malformed("its columns do not end")
    if digest_of(packed.keys, plain) != packed.digest:
        raise _malformed("its digest is another one")
    rest = checked(lambda: _decoder.decode(plain))
    nodes, keys = len(packed.keys) // _KEY_NBYTES, text_keys(packed.keys)
    if any(len(column) != nodes for column in rest.columns) or len(rest.steps) != len(rest.counts):
        raise _malformed("its columns differ in length")
    names, arenas, endpoints, domains = rest.columns
    return list(zip(names, arenas, endpoints, keys, domains, strict=True)), _homes(rest), rest.settings


def _homes(rest: _Rest) -> list[int]:
    """The node of each rank. Every one is named before a list is made: a count may be any number."""
    if min(rest.counts, default=1) < 1 or sum(rest.counts) > 1 << 20:
        raise _malformed("it has too many ranks")
    nodes = itertools.accumulate(rest.steps, initial=-1)
    next(nodes)
    return list(itertools.chain.from_iterable(map(itertools.repeat, nodes, rest.counts)))


def checked(make: Callable[[], T]) -> T:
    """What make returns. Raises ProtocolError for bytes that hold no topology."""
    try:
        return make()
    except (*MALFORMED, ValueError) as error:
        raise _malformed(error) from None


def _malformed(error: object) -> ProtocolError:
    return ProtocolError(f"malformed topology: {cut(error)}")


def digest_of(keys: bytes, plain: bytes) -> bytes:
    """Of the keys and the other columns before they are compressed."""
    return hashlib.blake2b(plain, digest_size=DIGEST_NBYTES, key=hashlib.blake2b(keys).digest()).digest()


def raw_keys(keys: Sequence[str]) -> bytes:
    """Keys in Z85 as 32 bytes each. Raises ProtocolError for one that is none."""
    values, words = _VALUES, []
    try:
        digits = "".join(keys).encode("ascii")
        for at in range(0, len(digits), 5):
            word = 0
            for digit in digits[at : at + 5]:
                word = word * 85 + values[digit]
            words.append(word)
        raw = struct.pack(f">{len(words)}I", *words)
    except (KeyError, UnicodeEncodeError, struct.error):
        raise ProtocolError("a key of a daemon is no key") from None
    if any(len(key) != _KEY_CHARS for key in keys):
        raise ProtocolError("a key of a daemon is no key")
    return raw


def text_keys(raw: bytes) -> list[str]:
    """Keys of 32 bytes each in Z85. Raises ProtocolError where one is cut off."""
    if len(raw) % _KEY_NBYTES:
        raise _malformed("its keys are cut off")
    pairs, digits = _PAIRS, _DIGITS
    words = struct.unpack(f">{len(raw) // 4}I", raw)
    text = "".join([pairs[word // 614125] + pairs[word // 85 % 7225] + digits[word % 85] for word in words])
    return [text[at : at + _KEY_CHARS] for at in range(0, len(text), _KEY_CHARS)]
