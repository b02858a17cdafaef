"""How bytes are proved: by XXH3, which finds accidents, or by keyed BLAKE3, which nobody makes without the key.

One value, passed to makers and checkers of digests. A key is never used itself: each purpose has one derived from it,
so that no digest of one purpose is one of another (a vote is no manifest). Where a block belongs stands in what is
above it: its digest in a table, the table's in a seal or a manifest, which name job, save and rank.
"""

import enum
from typing import Annotated, Any, Final

import msgspec
import xxhash

from ckptd.shared.base.errors import ConfigError, IntegrityError
from ckptd.shared.base.wording import shown
from ckptd.shared.format.digest import DIGEST_NBYTES, KIND, digest

KEY_NBYTES: Final = 32
KEYED_KIND: Final = "blake3-keyed-128/16MiB"
DigestKind = Annotated[str, msgspec.Meta(max_length=64)]
KeyId = Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{16})?\Z")]  # empty: not keyed
_CONTEXT: Final = "ckptd 2026-11-23 integrity: "
_KINDS: Final = {KIND, KEYED_KIND}
_UNKEYED_HINT: Final = (
    "if you trust who could write it, read it without proof: integrity='xxh3' in the call, --integrity xxh3, or "
    "CKPTD_INTEGRITY=xxh3"
)
_KEY_HINT: Final = (
    "give that key: --key FILE, CKPTD_INTEGRITY_KEY_FILE, integrity_key_file in connect, CkptdReader or config.toml"
)


class Purpose(enum.StrEnum):
    """What a digest is of."""

    BLOCK = "block"
    TABLE = "digest table"
    LAYOUT = "layout"
    LEAVES = "leaves"
    OBJECTS = "objects"
    SEAL = "slot seal"
    VOTE = "vote"
    VOTE_FILE = "file of a vote"
    MANIFEST = "manifest"
    MANIFEST_FILE = "file of a manifest"
    COMMITTED = "COMMITTED"
    STOCK = "file for stock readers"
    INDEX = "index of records"
    PARITY_SEAL = "parity seal"
    PARITY_RECORD = "parity record"
    LINK = "secret of a bulk link"
    KEY_ID = "key id"


class Hasher:
    """A digest of bytes that come in parts. running: a hash of xxhash or blake3, as it begins."""

    def __init__(self, running: Any) -> None:
        self._running = running

    def update(self, part: memoryview) -> None:
        """Takes in the next part. Releases the GIL for large ones."""
        self._running.update(part)

    def value(self) -> bytes:
        """The digest of all parts so far, end to end."""
        return self._running.digest()[:DIGEST_NBYTES]  # type: ignore[no-any-return]


def asks_for_key(text: str) -> bool:
    """Whether the message, or a part of it, is that something keyed was read without its key."""
    return _KEY_HINT in text


class Integrity:
    """XXH3-128: finds accidents. Base of Keyed."""

    kind = KIND
    key_id = ""  # of a key, no secret; empty without one

    def digest(self, data: bytes | bytearray | memoryview, _purpose: Purpose = Purpose.BLOCK) -> bytes:
        """16 bytes. Releases the GIL while it reads large buffers."""
        return digest(data)

    def hasher(self, _purpose: Purpose = Purpose.BLOCK) -> Hasher:
        """The same digest of what comes in parts."""
        return Hasher(xxhash.xxh3_128())

    @property
    def keyed(self) -> bool:
        """Whether there is a key."""
        return bool(self.key_id)

    @property
    def label(self) -> str:
        """Short text, for messages and comparisons: "xxh3", or "keyed:" and the key's id."""
        return f"keyed:{self.key_id}" if self.key_id else "xxh3"

    def link_secret(self, secret: bytes) -> bytes:
        """What proves two ends of a bulk link to each other."""
        return secret

    def check(self, kind: str, key_id: str, where: str) -> None:
        """Raises IntegrityError unless bytes that say so of themselves are of this kind and key."""
        if (kind, key_id) != (self.kind, self.key_id):
            raise self.stranger(kind, key_id, where)

    def stranger(self, kind: str, key_id: str, where: str) -> IntegrityError:
        """The error for bytes that are proved in another way."""
        if kind not in _KINDS or bool(key_id) != (kind == KEYED_KIND):
            return IntegrityError(
                f"{where}: has digests {shown(kind)} of key {key_id!r}, which this program does not know"
            )
        if not key_id:
            text = f"{where}: is not keyed: any writer could have forged it, and this reader has integrity = keyed"
            return IntegrityError(text, hint=_UNKEYED_HINT)
        if not self.key_id:
            return IntegrityError(
                f"{where}: is keyed (key id {key_id}), and no key was given to check it", hint=_KEY_HINT
            )
        return IntegrityError(
            f"{where}: is keyed with another key (key id {key_id}, not {self.key_id})", hint=_KEY_HINT
        )


XXH3: Final = Integrity()


class Keyed(Integrity):
    """BLAKE3 with a key, its first 128 bits."""

    kind = KEYED_KIND

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_NBYTES:
            raise ConfigError(
                f"an integrity key has {KEY_NBYTES} bytes, not {len(key)}", hint="ckptd keygen --integrity"
            )
        self._blake3 = _blake3()
        self.key = key
        self._keys = {purpose: self._blake3(key, derive_key_context=_CONTEXT + purpose).digest() for purpose in Purpose}
        self.key_id = self._keys[Purpose.KEY_ID][:8].hex()

    def __repr__(self) -> str:
        return f"Keyed(key_id={self.key_id!r})"  # the key must not reach a log

    def digest(self, data: bytes | bytearray | memoryview, purpose: Purpose = Purpose.BLOCK) -> bytes:
        """16 bytes that only a holder of the key can say. Releases the GIL while it reads large buffers."""
        return self._blake3(data, key=self._keys[purpose]).digest(DIGEST_NBYTES)  # type: ignore[no-any-return]

    def hasher(self, purpose: Purpose = Purpose.BLOCK) -> Hasher:
        """The same digest of what comes in parts."""
        return Hasher(self._blake3(key=self._keys[purpose]))

    def link_secret(self, secret: bytes) -> bytes:
        """Of the link's secret and of the key: a peer that lacks either proves nothing."""
        return self._blake3(secret, key=self._keys[Purpose.LINK]).digest()  # type: ignore[no-any-return]


def _blake3() -> Any:
    """Imported where a key is used: nobody else need have it, or pay for it."""
    try:
        from blake3 import blake3  # noqa: PLC0415
    except ImportError as error:
        text = f"integrity = keyed needs the package blake3, which cannot be imported: {error}"
        raise ConfigError(text, hint="pip install 'ckptd[keyed]'") from None
    return blake3
