"""What goes over a bulk connection: proofs, then asks one way and frames the other. Encoding alone, no socket.

::

    client: hello   | magic 8 | link 96 | counter 8 | HMAC(secret, magic link counter "c") 32 |
    server: welcome | HMAC(secret, magic link counter "s") 32 |
    client: ask     | nbytes 4 | msgpack | MAC 16 if keyed |      as many as it likes, one after the other
    server: frame   | kind 4 | nbytes 4 | mark 16 | bytes |       one for each range of the ask, then DONE; or FAIL

The secret came over the authenticated control link. A counter is taken once, so a recorded connection is worth nothing.
With integrity = keyed the magic is another, and the secret is mixed with the site's key: marks.py says what a mark is.
"""

import hashlib
import hmac
import struct
from typing import Annotated, Final

import msgspec

from ckptd.shared.base.decoding import decoded
from ckptd.shared.base.errors import ProtocolError
from ckptd.shared.base.ids import MAX_RANKS, Incarnation, JobKey, Nbytes, SaveId
from ckptd.shared.format.integrity import XXH3, Integrity

MAGIC: Final = b"CKPTDBK1"
MAGIC_KEYED: Final = b"CKPTDBM1"
MARK_NBYTES: Final = 16
MAX_LINK_NBYTES: Final = 96
PROOF_NBYTES: Final = 32
HELLO: Final = struct.Struct(f"<8s{MAX_LINK_NBYTES}sQ{PROOF_NBYTES}s")
LENGTH: Final = struct.Struct("<I")
FRAME: Final = struct.Struct("<4sI16s")
MAX_ASK_NBYTES: Final = 1 << 20
MAX_RANGES: Final = 4096
MAX_FRAME_NBYTES: Final = 16 << 20
MAX_FAIL_NBYTES: Final = 4096
# In place of a rank. Of a daemon:
PARITY: Final = -1  # the parity file
# Of a rank that reads a checkpoint together with other nodes, asked by a node below it or one that it sends to:
SUMMARY: Final = -2  # said is a part of what a subtree wants, from the range's offset on; no bytes come back
ORDERS: Final = -3  # its length (u64), then the orders for that subtree
LEAVE: Final = -4  # the subtree reads without the asker's parent; no bytes come back
PAUSE: Final = -5  # the connection ends, and the node still wants blocks; no bytes come back
OVER: Final = 1  # offset of a pause that is over: the node wants nothing more

DATA: Final = b"DATA"
DONE: Final = b"DONE"
FAIL: Final = b"FAIL"


class Range(msgspec.Struct, array_like=True, frozen=True):
    """Bytes of a segment, up to the end of its tail, or of what rank names in its place. One frame answers it.

    checked: the server answers for them: it compares the whole block that they are of with its sealed digest, and the
    frame carries a digest of its own. Else the client compares, once the block is complete.
    """

    rank: Annotated[int, msgspec.Meta(ge=PAUSE, lt=MAX_RANKS)]
    offset: Nbytes
    nbytes: Annotated[int, msgspec.Meta(ge=0, le=MAX_FRAME_NBYTES)]
    checked: bool


class Ask(msgspec.Struct, array_like=True, frozen=True):
    """Ranges of one save. epoch says which parity of it is meant; said: what the asker reports."""

    job: JobKey
    save: SaveId
    epoch: Incarnation
    ranges: Annotated[list[Range], msgspec.Meta(max_length=MAX_RANGES)]
    said: Annotated[bytes, msgspec.Meta(max_length=MAX_ASK_NBYTES)] = b""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Ask)


def encode_ask(ask: Ask) -> bytes:
    """Its body."""
    return _encoder.encode(ask)


def decode_ask(body: bytes) -> Ask:
    """Raises ProtocolError."""
    return decoded(_decoder.decode, body, "a bulk ask that is none", ProtocolError)


def magic_of(integrity: Integrity) -> bytes:
    """What a hello begins with: two ends of which one is keyed never get further."""
    return MAGIC_KEYED if integrity.keyed else MAGIC


def proof(secret: bytes, link: str, counter: int, side: bytes, integrity: Integrity = XXH3) -> bytes:
    """What only a holder of the secret, and of the key if there is one, can say, for one connection and one side."""
    said = HELLO.pack(magic_of(integrity), link.encode(), counter, b"")[:-PROOF_NBYTES] + side
    return hmac.new(integrity.link_secret(secret), said, hashlib.sha256).digest()


def hello(secret: bytes, link: str, counter: int, integrity: Integrity = XXH3) -> bytes:
    """The client's first words."""
    told = proof(secret, link, counter, b"c", integrity)
    return HELLO.pack(magic_of(integrity), link.encode(), counter, told)


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
