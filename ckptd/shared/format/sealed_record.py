"""A record of the commit as bytes: magic, body, digest of both; and which version of it this program reads. Pure."""

import contextlib
from collections.abc import Callable
from functools import partial

import msgspec

from ckptd.shared.base.decoding import MALFORMED
from ckptd.shared.base.errors import DamagedError
from ckptd.shared.format.digest import DIGEST_NBYTES
from ckptd.shared.format.integrity import DigestKind, Integrity, KeyId, Purpose

VERSION = 5  # of votes, manifests and COMMITTED
_MAGIC = b"CKPTDMF1"


def sealed(body: bytes, integrity: Integrity, purpose: Purpose) -> bytes:
    """File content of a record that was encoded."""
    content = _MAGIC + body
    return content + integrity.digest(content, purpose)


class _Said(msgspec.Struct):
    """What a record says of its own digests."""

    digest_kind: DigestKind
    key_id: KeyId = ""


class _Numbered(msgspec.Struct):
    """The version of a vote or manifest, and of COMMITTED, whatever else one of another version says."""

    version: int = VERSION
    format: int = VERSION


_said_decoder = msgspec.msgpack.Decoder(_Said)


def check_version(number: int, where: str, what: str = "version") -> None:
    """Raises DamagedError, with both numbers, for a version that is not this program's."""
    if number != VERSION:
        raise DamagedError(f"{where}: {what} {number}, this program reads {VERSION}")


def _refuse_other_version(raw: bytes | memoryview, decode: Callable[..., _Numbered], where: str) -> None:
    """Of a record that cannot be decoded: one of another version may have other fields."""
    with contextlib.suppress(*MALFORMED):
        said = decode(raw)
        check_version(said.version, where)
        check_version(said.format, where, "format")


of_record = partial(_refuse_other_version, decode=msgspec.msgpack.Decoder(_Numbered).decode)
of_committed = partial(_refuse_other_version, decode=msgspec.json.Decoder(_Numbered).decode)


def open_record(data: bytes, where: str, integrity: Integrity, purpose: Purpose) -> memoryview:
    """The body in a file's content. Raises DamagedError on any flipped or missing byte; IntegrityError, which is one.

    The latter for a record that is proved in another way.
    """
    if len(data) < len(_MAGIC) + DIGEST_NBYTES or data[: len(_MAGIC)] != _MAGIC:
        raise DamagedError(f"{where}: not a ckptd record")
    body = memoryview(data)[len(_MAGIC) : -DIGEST_NBYTES]
    if integrity.digest(memoryview(data)[:-DIGEST_NBYTES], purpose) != data[-DIGEST_NBYTES:]:
        _check_not_anothers(body, where, integrity)
        raise DamagedError(f"{where}: digest does not match, the file is damaged")
    return body


def _check_not_anothers(body: memoryview, where: str, integrity: Integrity) -> None:
    """Raises IntegrityError for a record that, as far as one can tell, is not damaged: of another key, or of none."""
    try:
        said = _said_decoder.decode(body)
    except MALFORMED:
        return
    integrity.check(said.digest_kind, said.key_id, where)
