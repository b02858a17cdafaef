"""The bytes of a slot file: image, tail, and two seal pages. docs/format.md draws them.

::

    0                 image_nbytes    tail_offset                                          capacity-8192  capacity
    | image (the file) | pad to 4096 | digest table | layout | leaves | objects | unused .. | seal A | seal B |

The two seal pages alternate: a writer overwrites the older (or broken) one, so a crash in the middle of a write leaves
the younger valid one in force. No valid page means the slot is free. The owner of the slot writes the seal: the rank
while it is granted to it, the daemon otherwise.
"""

import enum
import re
import struct
from typing import Annotated, NamedTuple

import msgspec

from ckptd.shared.base.decoding import MALFORMED
from ckptd.shared.base.errors import DamagedError, OtherVersionError
from ckptd.shared.base.ids import MAX_PARTS, Digest, JobKey, Nbytes, Rank, SaveId, WorldSize
from ckptd.shared.format.digest import DIGEST_NBYTES, KIND, block_count
from ckptd.shared.format.integrity import KEYED_KIND, XXH3, Integrity, KeyId, Purpose
from ckptd.shared.format.replica_attestations import MAX_ATTESTATIONS, Attestation

PAGE = 4096
SEAL_NBYTES = PAGE
SEALS_NBYTES = 2 * SEAL_NBYTES
VERSION = 4
_MAGIC = b"CKPTDSL%d" % VERSION  # a version has one digit
_OF_ANY_VERSION = re.compile(rb"CKPTDSL(\d)")
_PREFIX = struct.Struct("<8sQI")  # magic, sequence, body length
_BODY_MAX = SEAL_NBYTES - _PREFIX.size - DIGEST_NBYTES
MAX_LAYOUT_NBYTES = 1 << 30
MAX_LEAVES_NBYTES = 1 << 30
MAX_OBJECTS_NBYTES = 1 << 30


class SlotState(enum.StrEnum):
    """What a slot's bytes are worth to a process that finds them."""

    FREE = "free"
    SEALED = "sealed"  # the rank wrote all of it
    DIGESTED = "digested"  # and the daemon took the digest of every block


class Part(NamedTuple):
    """Bytes of the tail, and the digest that the seal has of them."""

    offset: int
    nbytes: int
    digest: bytes


class Seal(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Everything needed to finish the job without the rank that wrote the slot."""

    state: SlotState = SlotState.FREE
    job: JobKey | None = None
    save: SaveId | None = None
    rank: Rank = 0
    world_size: WorldSize = 1
    image_nbytes: Nbytes = 0
    header_nbytes: Nbytes = 0
    layout_nbytes: Annotated[int, msgspec.Meta(ge=0, le=MAX_LAYOUT_NBYTES)] = 0
    leaves_nbytes: Annotated[int, msgspec.Meta(ge=0, le=MAX_LEAVES_NBYTES)] = 0
    layout_digest: Digest = bytes(16)
    leaves_digest: Digest = bytes(16)
    objects_nbytes: Annotated[int, msgspec.Meta(ge=0, le=MAX_OBJECTS_NBYTES)] = 0
    objects_digest: Digest = bytes(16)
    table_digest: Digest = bytes(16)
    parts: Annotated[tuple[Nbytes, ...], msgspec.Meta(max_length=MAX_PARTS)] = ()  # bytes of each file, if several
    raw: bool = False  # the files after the first are a trainer's own
    attestations: Annotated[
        tuple[Attestation, ...], msgspec.Meta(max_length=MAX_ATTESTATIONS)
    ] = ()  # of tensors that replicas hold too
    key_id: KeyId = ""  # of the key that all its digests are made with

    @property
    def table_offset(self) -> int:
        """Byte offset of the digest table, one 16-byte digest per block of the image."""
        return align_up(self.image_nbytes)

    @property
    def table_nbytes(self) -> int:
        """Bytes of the digest table."""
        return block_count(self.image_nbytes) * DIGEST_NBYTES

    @property
    def layout_offset(self) -> int:
        """Byte offset of the encoded Layout."""
        return self.table_offset + self.table_nbytes

    @property
    def leaves_offset(self) -> int:
        """Byte offset of the encoded Leaves."""
        return self.layout_offset + self.layout_nbytes

    @property
    def objects_offset(self) -> int:
        """Byte offset of the encoded StockObjects, which only rank 0 has."""
        return self.leaves_offset + self.leaves_nbytes

    @property
    def tail(self) -> dict[str, Part]:
        """The parts of the tail in their order, by the Purpose of their digest; without objects when there are none."""
        parts = {
            "digest table": Part(self.table_offset, self.table_nbytes, self.table_digest),
            "layout": Part(self.layout_offset, self.layout_nbytes, self.layout_digest),
            "leaves": Part(self.leaves_offset, self.leaves_nbytes, self.leaves_digest),
        }
        if self.objects_nbytes:
            parts["objects"] = Part(self.objects_offset, self.objects_nbytes, self.objects_digest)
        return parts

    @property
    def content_nbytes(self) -> int:
        """Bytes from the start of the slot to the end of the tail."""
        return self.objects_offset + self.objects_nbytes


def align_up(nbytes: int, unit: int = PAGE) -> int:
    """Rounds a number of bytes up to a multiple of unit."""
    return -(-nbytes // unit) * unit


def slot_capacity(image_nbytes: int, layout_nbytes: int, plain_nbytes: int) -> int:
    """Bytes of the smallest slot file that holds such a segment, a multiple of PAGE. plain: leaves and objects."""
    tail = block_count(image_nbytes) * DIGEST_NBYTES + layout_nbytes + plain_nbytes
    return align_up(image_nbytes) + align_up(tail) + SEALS_NBYTES


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Seal)


def encode_seal(seal: Seal, sequence: int, integrity: Integrity = XXH3) -> bytes:
    """One seal page of exactly SEAL_NBYTES, with the id of the key that proves it."""
    seal = msgspec.structs.replace(seal, key_id=integrity.key_id)
    body = _encoder.encode(seal)
    if not _has_room(seal):
        raise DamagedError(f"seal body of {len(body)} bytes exceeds {_BODY_MAX}, or will when it is digested")
    head = (_PREFIX.pack(_MAGIC, sequence, len(body)) + body).ljust(SEAL_NBYTES - DIGEST_NBYTES, b"\0")
    return head + integrity.digest(head, Purpose.SEAL)


def _has_room(seal: Seal) -> bool:
    """Whether it fits its page also when the daemon has digested what the rank sealed."""
    last = msgspec.structs.replace(seal, state=SlotState.DIGESTED, table_digest=b"\xff" * DIGEST_NBYTES)
    return len(_encoder.encode(last)) <= _BODY_MAX


def _parse_page(page: bytes) -> tuple[int, Seal] | None:
    """What a page says, proved by nothing."""
    if len(page) < SEAL_NBYTES:
        return None
    magic, sequence, body_nbytes = _PREFIX.unpack_from(page)
    if magic != _MAGIC or body_nbytes > _BODY_MAX:
        return None
    try:
        seal = _decoder.decode(page[_PREFIX.size : _PREFIX.size + body_nbytes])
    except MALFORMED:
        return None
    return (sequence, seal) if _has_room(seal) else None


def _is_whole(page: bytes, integrity: Integrity) -> bool:
    return integrity.digest(page[:-DIGEST_NBYTES], Purpose.SEAL) == page[-DIGEST_NBYTES:]


def _decode_page(page: bytes, integrity: Integrity) -> tuple[int, Seal] | None:
    found = _parse_page(page) if _is_whole(page, integrity) else None
    return found if found is not None and found[1].key_id == integrity.key_id else None


def is_page(page: bytes, integrity: Integrity = XXH3) -> bool:
    """Whether it is a seal page that counts."""
    return _decode_page(page, integrity) is not None


def other_version(where: str, theirs: int, ours: int) -> OtherVersionError:
    """The error of a sealed page of a version that this program does not read."""
    text = f"{where}: its seal is of version {theirs}, this program reads {ours}"
    return OtherVersionError(text, hint="drain it with the ckptd that wrote it: ckptd drain --wait")


class _Said(msgspec.Struct):
    """What a seal of any version says of itself."""

    state: SlotState = SlotState.FREE
    key_id: KeyId = ""


_said_decoder = msgspec.msgpack.Decoder(_Said)


def _refuse_foreign(pages: bytes, integrity: Integrity, where: str) -> None:
    """Raises OtherVersionError when a page that does not count is no torn one, but of another version.

    IntegrityError when it is of another key, or of none.
    """
    for index in (0, 1):
        page = pages[index * SEAL_NBYTES : (index + 1) * SEAL_NBYTES]
        magic, _, body_nbytes = _PREFIX.unpack_from(page.ljust(_PREFIX.size, b"\0"))
        version = _OF_ANY_VERSION.fullmatch(magic)
        try:
            said = _said_decoder.decode(page[_PREFIX.size : _PREFIX.size + body_nbytes])
        except MALFORMED:
            continue
        if version is None or said.state is SlotState.FREE or not (said.key_id or _is_whole(page, XXH3)):
            continue
        if magic != _MAGIC:
            raise other_version(where, int(version[1]), VERSION)
        if said.key_id != integrity.key_id:
            raise integrity.stranger(KEYED_KIND if said.key_id else KIND, said.key_id, where)


def decode_seals(pages: bytes, integrity: Integrity = XXH3, *, where: str = "slot") -> tuple[int, int, Seal]:
    """(index, sequence, seal) of the younger valid page of the two; a free seal of sequence 0 when neither is valid.

    Raises OtherVersionError, naming where and both versions, when neither is valid here and one is a seal of another
    version; IntegrityError when one is a seal with another key, or without one.
    """
    best = (1, 0, Seal())
    for index in (0, 1):
        found = _decode_page(pages[index * SEAL_NBYTES : (index + 1) * SEAL_NBYTES], integrity)
        if found is not None and found[0] > best[1]:
            best = (index, *found)
    if not best[1]:
        _refuse_foreign(pages, integrity, where)
    return best


def next_seal(pages: bytes, seal: Seal, integrity: Integrity = XXH3) -> tuple[int, bytes]:
    """(offset within the two pages, page bytes) that put seal in force; the page in force now is not touched."""
    index, sequence, _ = decode_seals(pages, integrity)
    return (1 - index) * SEAL_NBYTES, encode_seal(seal, sequence + 1, integrity)
