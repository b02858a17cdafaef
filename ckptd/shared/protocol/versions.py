"""Two processes of ckptd that speak to each other: what either says of itself, and what is wrong when they differ."""

from typing import Annotated, Any, NamedTuple, get_args

import msgspec

from ckptd import __version__
from ckptd.shared.base.decoding import MALFORMED
from ckptd.shared.base.errors import ProtocolError, UnknownMessageError

MAX_TAG_CHARS = 64
SAME_CKPTD = "install the same ckptd on both sides and restart the daemon"

Release = Annotated[str, msgspec.Meta(pattern=r"^[0-9A-Za-z.+!_-]{0,64}\Z")]  # of ckptd, as pip calls it
_Tag = Annotated[str, msgspec.Meta(max_length=MAX_TAG_CHARS)]


class Speaker(NamedTuple):
    """One side, as a sentence names it."""

    name: str
    version: int  # of the protocol between the two
    release: str

    def __str__(self) -> str:
        return f"{self.name} (protocol {self.version or 'unknown'}, ckptd {self.release or 'of unknown version'})"


class _InMap(msgspec.Struct):
    type: _Tag
    event: msgspec.Raw = msgspec.Raw()


class _SignedMap(msgspec.Struct):
    type: _Tag
    version: int = 0
    release: Release = ""


class _InArray(msgspec.Struct, array_like=True):
    type: _Tag


_map_decoder = msgspec.msgpack.Decoder(_InMap)
_signed_decoder = msgspec.msgpack.Decoder(_SignedMap)
_array_decoder = msgspec.msgpack.Decoder(_InArray)


def tags(union: Any) -> frozenset[str]:
    """The tags of a union of structs."""
    return frozenset(str(member.__struct_config__.tag) for member in get_args(union))


def tag_in_map(raw: bytes | msgspec.Raw) -> tuple[str, msgspec.Raw]:
    """Tag of the MessagePack map in raw, and what its field ``event`` holds. Raises one of decoding.MALFORMED."""
    found = _map_decoder.decode(raw)
    return found.type, found.event


def tag_in_array(raw: bytes) -> str:
    """Tag of the MessagePack array in raw. Raises one of decoding.MALFORMED."""
    return _array_decoder.decode(raw).type


def refuse_unknown(raw: bytes, known: frozenset[str], *, array: bool = False) -> None:
    """Raises UnknownMessageError when the tag in raw is none of those known; returns when raw has a known one or none.

    For bytes that could not be decoded: it costs a second look at them.
    """
    try:
        tag = tag_in_array(raw) if array else tag_in_map(raw)[0]
    except MALFORMED:
        return
    if tag not in known:
        raise UnknownMessageError(tag)


def refuse_foreign(raw: bytes, known: frozenset[str], theirs: str, version: int, *, ours: str) -> None:
    """As refuse_unknown, of a map that says itself by what it was sent. Raises ProtocolError that names both sides."""
    try:
        found = _signed_decoder.decode(raw)
    except MALFORMED:
        return
    if found.type not in known:
        sender = Speaker(theirs, found.version, found.release)
        raise not_known(found.type, sender, Speaker(ours, version, __version__), SAME_CKPTD)


def not_known(kind: str, theirs: Speaker, ours: Speaker, hint: str) -> ProtocolError:
    """A message of the other side that this side does not have."""
    return ProtocolError(f"message {kind!r} of {theirs}: {ours} does not know it", hint=hint)


def other_version(theirs: Speaker, ours: Speaker, hint: str) -> ProtocolError:
    """Another version of the protocol between the two."""
    return ProtocolError(f"{theirs} cannot speak with {ours}", hint=hint)
