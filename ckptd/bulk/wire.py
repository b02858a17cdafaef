"""What goes over a bulk connection: proofs, then asks one way and frames the other. Encoding alone, no socket.

::

    client: hello   | magic 8 | link 64 | counter 8 | HMAC(secret, magic link counter "c") 32 |
    server: welcome | HMAC(secret, magic link counter "s") 32 |
    client: ask     | nbytes 4 | msgpack |                        as many as it likes, one after the other
    server: frame   | kind 4 | nbytes 4 | XXH3-128 16 | bytes |   one for each range of the ask, then DONE; or FAIL

The secret came over the authenticated control link. A counter is taken once, so a recorded connection is worth nothing.
"""

import hashlib
import hmac
import struct
from typing import Annotated, Final

import msgspec
import xxhash

from ckptd.protocol.decoding import MALFORMED
from ckptd.protocol.errors import ProtocolError
from ckptd.protocol.ids import MAX_RANKS, Incarnation, JobKey, Nbytes, SaveId

MAGIC: Final = b"CKPTDBK1"
MAX_LINK_NBYTES: Final = 64
PROOF_NBYTES: Final = 32
HELLO: Final = struct.Struct(f"<8s{MAX_LINK_NBYTES}sQ{PROOF_NBYTES}s")
LENGTH: Final = struct.Struct("<I")
FRAME: Final = struct.Struct("<4sI16s")
MAX_ASK_NBYTES: Final = 1 << 20
MAX_RANGES: Final = 4096
MAX_FRAME_NBYTES: Final = 16 << 20
MAX_FAIL_NBYTES: Final = 4096
PARITY: Final = -1  # in place of a rank: the parity file

DATA: Final = b"DATA"
DONE: Final = b"DONE"
FAIL: Final = b"FAIL"


class Range(msgspec.Struct, array_like=True, frozen=True):
    """Bytes of a segment, up to the end of its tail, or of the parity (rank PARITY). One frame answers it.

    checked: the server answers for them: it compares the whole block that they are of with its sealed digest, and the
    frame carries a digest of its own. Else whoever asks compares, when the block is whole.
    """

    rank: Annotated[int, msgspec.Meta(ge=-1, lt=MAX_RANKS)]
    offset: Nbytes
    nbytes: Annotated[int, msgspec.Meta(ge=0, le=MAX_FRAME_NBYTES)]
    checked: bool


class Ask(msgspec.Struct, array_like=True, frozen=True):
    """Ranges of one save. epoch tells which parity of it is meant."""

    job: JobKey
    save: SaveId
    epoch: Incarnation
    ranges: Annotated[list[Range], msgspec.Meta(max_length=MAX_RANGES)]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Ask)


def encode_ask(ask: Ask) -> bytes:
    """Length and body."""
    body = _encoder.encode(ask)
    return LENGTH.pack(len(body)) + body


def decode_ask(body: bytes) -> Ask:
    """Raises ProtocolError."""
    try:
        return _decoder.decode(body)
    except MALFORMED as error:
        raise ProtocolError(f"a bulk ask that is none: {error}") from None


def proof(secret: bytes, link: str, counter: int, side: bytes) -> bytes:
    """What only a holder of the secret can say, for one connection and one side of it."""
    said = HELLO.pack(MAGIC, link.encode(), counter, b"")[:-PROOF_NBYTES] + side
    return hmac.new(secret, said, hashlib.sha256).digest()


def hello(secret: bytes, link: str, counter: int) -> bytes:
    """The client's first words."""
    return HELLO.pack(MAGIC, link.encode(), counter, proof(secret, link, counter, b"c"))


def seed(secret: bytes, link: str, counter: int) -> int:
    """Of the digests of all frames of a connection."""
    return int.from_bytes(proof(secret, link, counter, b"d")[:8], "little")


def frame_digest(data: memoryview | bytes, seeded: int) -> bytes:
    """XXH3-128 of a frame's bytes. Releases the GIL while it reads large ones."""
    return xxhash.xxh3_128_digest(data, seeded)


class Counters:
    """Which counters of a link were used. Connections may arrive out of order, within a window."""

    WINDOW = 4096

    def __init__(self) -> None:
        self._highest = 0
        self._used: set[int] = set()

    def take(self, counter: int) -> bool:
        """Whether it was not used before; from now on it is."""
        if counter in self._used or counter <= self._highest - self.WINDOW:
            return False
        self._used.add(counter)
        if counter > self._highest:
            self._highest = counter
            self._used = {used for used in self._used if used > counter - self.WINDOW}
        return True
