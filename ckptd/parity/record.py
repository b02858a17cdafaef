"""The bytes that say what a parity file holds: its record, and in an arena its seals. No file is opened here."""

import re
import struct
from typing import Annotated, Final

import msgspec

from ckptd.parity.code import code_of
from ckptd.shared.base.decoding import MALFORMED
from ckptd.shared.base.errors import CkptdError, DamagedError
from ckptd.shared.base.ids import Digest, JobKey, Nbytes
from ckptd.shared.base.wording import cut
from ckptd.shared.format.digest import DIGEST_NBYTES, KIND, block_count, digest
from ckptd.shared.format.integrity import KEYED_KIND, XXH3, Integrity, KeyId, Purpose
from ckptd.shared.format.manifest import ParityRecord
from ckptd.shared.format.set_places import set_folder
from ckptd.shared.format.slot import SEAL_NBYTES, SEALS_NBYTES, align_up, other_version
from ckptd.shared.protocol.parity_types import ParityChunk

MAX_MEMBERS: Final = 100
VERSION: Final = 2
_MAGIC: Final = b"CKPTDPY%d" % VERSION  # a version has one digit
_OF_ANY_VERSION: Final = re.compile(rb"CKPTDPY(\d)")
_PREFIX: Final = struct.Struct("<8sQI")  # magic, sequence, body length


class ParitySeal(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Vouches for the record, which vouches for the parity. nbytes 0 and no job: the file is free."""

    job: JobKey | None = None
    nbytes: Nbytes = 0
    record_nbytes: Nbytes = 0
    record_digest: Digest = bytes(16)
    key_id: KeyId = ""

    @property
    def record_offset(self) -> int:
        """Where the record begins."""
        return align_up(self.nbytes)


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """What the parity is of, and the digests of its blocks."""

    parity_chunk: ParityChunk
    table: Annotated[bytes, msgspec.Meta(max_length=1 << 30)]


_seal_decoder = msgspec.msgpack.Decoder(ParitySeal)
_record_decoder = msgspec.msgpack.Decoder(Record)


# --- the record


def encode_record(parity_chunk: ParityChunk, table: bytes) -> bytes:
    """As it lies behind the parity."""
    return msgspec.msgpack.encode(Record(parity_chunk=parity_chunk, table=table))


def decode_record(raw: bytes, nbytes: int, record_digest: bytes, where: str, integrity: Integrity = XXH3) -> Record:
    """The record of so many bytes of parity. Raises DamagedError that names where."""
    if integrity.digest(raw, Purpose.PARITY_RECORD) != record_digest:
        raise DamagedError(f"parity file {where}: its record does not match its digest")
    try:
        record = _record_decoder.decode(raw)
        code = code_of(record.parity_chunk)
    except (*MALFORMED, ValueError) as error:
        raise DamagedError(f"parity file {where}: its record is malformed: {cut(error)}") from None
    if code.members > MAX_MEMBERS:
        raise DamagedError(f"parity file {where}: its record is of {code.members} members")
    if code.parity_nbytes != nbytes or len(record.table) != block_count(nbytes) * DIGEST_NBYTES:
        raise DamagedError(f"parity file {where}: its record and its bytes do not fit together")
    if not 0 <= record.parity_chunk.index < len(record.parity_chunk.columns):
        raise DamagedError(f"parity file {where}: its record is of member {record.parity_chunk.index}, which is none")
    return record


def read_record(view: memoryview, seal: ParitySeal, name: str, integrity: Integrity = XXH3) -> Record:
    """The record in a parity file's bytes."""
    raw = bytes(view[seal.record_offset : seal.record_offset + seal.record_nbytes])
    return decode_record(raw, seal.nbytes, seal.record_digest, name, integrity)


def set_name(parity_chunk: ParityChunk) -> str:
    """Of the parity chunk's set, by its content: what is protected, how, and for which topology."""
    said = msgspec.msgpack.encode((parity_chunk.save, parity_chunk.epoch, parity_chunk.scheme, parity_chunk.columns))
    return digest(said).hex()[:16]


def store_record(parity_chunk: ParityChunk, seal: ParitySeal) -> ParityRecord:
    """The vote's record of the parity chunk. Its file is named by content, so no file is ever written twice."""
    name = f"{set_name(parity_chunk)}-{parity_chunk.index:02d}.parity"
    folder = set_folder(parity_chunk.epoch, (column.node for column in parity_chunk.columns))
    return ParityRecord(folder, name, seal.nbytes, seal.record_nbytes, seal.record_digest)


# --- seals


def seal_of(view: memoryview, integrity: Integrity = XXH3) -> ParitySeal:
    """The seal in force of a parity file's bytes."""
    return decode_seals(bytes(view[-SEALS_NBYTES:]), integrity)[2]


def _parse_page(page: bytes) -> tuple[int, int, ParitySeal] | None:
    """(version, sequence, seal) that a page says, proved by nothing. A seal has these fields in every version."""
    magic, sequence, nbytes = _PREFIX.unpack_from(page)
    version = _OF_ANY_VERSION.fullmatch(magic)
    try:
        seal = _seal_decoder.decode(page[_PREFIX.size : _PREFIX.size + nbytes]) if version else None
    except MALFORMED:
        return None
    return (int(version[1]), sequence, seal) if version and seal is not None else None


def _is_whole(page: bytes, integrity: Integrity) -> bool:
    return integrity.digest(page[:-DIGEST_NBYTES], Purpose.PARITY_SEAL) == page[-DIGEST_NBYTES:]


def decode_seals(
    pages: bytes, integrity: Integrity = XXH3, *, where: str = "parity file"
) -> tuple[int, int, ParitySeal]:
    """(index, sequence, seal) of the younger valid page; that of a free file when neither is valid.

    Raises OtherVersionError or IntegrityError, naming where, when neither is valid here and one is a seal of another
    version, or with another key, or without one.
    """
    best = (1, 0, ParitySeal())
    others: list[CkptdError] = []
    for index in (0, 1):
        page = pages[index * SEAL_NBYTES : (index + 1) * SEAL_NBYTES]
        found = _parse_page(page)
        if found is None:
            continue
        version, sequence, seal = found
        if version != VERSION or seal.key_id != integrity.key_id:
            if seal.job is not None and (seal.key_id or _is_whole(page, XXH3)):
                others.append(_foreign(version, seal, integrity, where))
        elif sequence > best[1] and _is_whole(page, integrity):
            best = (index, sequence, seal)
    if others and not best[1]:
        raise others[0]
    return best


def _foreign(version: int, seal: ParitySeal, integrity: Integrity, where: str) -> CkptdError:
    if version != VERSION:
        return other_version(where, version, VERSION)
    return integrity.stranger(KEYED_KIND if seal.key_id else KIND, seal.key_id, where)


def put_seal(view: memoryview, seal: ParitySeal, integrity: Integrity = XXH3) -> None:
    """Puts the seal in force; the page in force until then is not touched."""
    index, sequence, _ = decode_seals(bytes(view[-SEALS_NBYTES:]), integrity)
    body = msgspec.msgpack.encode(msgspec.structs.replace(seal, key_id=integrity.key_id))
    head = (_PREFIX.pack(_MAGIC, sequence + 1, len(body)) + body).ljust(SEAL_NBYTES - DIGEST_NBYTES, b"\0")
    start = len(view) - SEALS_NBYTES + (1 - index) * SEAL_NBYTES
    view[start : start + SEAL_NBYTES] = head + integrity.digest(head, Purpose.PARITY_SEAL)
