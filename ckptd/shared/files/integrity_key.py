"""Integrity keys in files of their owner alone, and what settings make of them. The client uses this too."""

import os
import secrets
from collections.abc import Mapping
from typing import Final

import msgspec

from ckptd.shared.base.errors import ConfigError
from ckptd.shared.base.refusals import CONNECT, Origin, not_allowed, variable
from ckptd.shared.files.paths import resolved
from ckptd.shared.files.regular import read_private, write_private
from ckptd.shared.format.integrity import KEY_NBYTES, XXH3, Integrity, Keyed

KINDS: Final = ("auto", "xxh3", "keyed")
_MAKE: Final = "ckptd keygen --integrity"  # a new key fits no checkpoint that was made with another


class _KeyFile(msgspec.Struct, frozen=True):
    integrity_key: str


def write_key(path: str) -> Keyed:
    """Makes a file with a new key, for its owner alone. Raises ConfigError when it is there or cannot be made."""
    made = Keyed(secrets.token_bytes(KEY_NBYTES))
    text = (
        f"# Integrity key {made.key_id} of ckptd, for integrity_key_file. Who has it can forge checkpoints.\n"
        f'integrity_key = "{made.key.hex()}"\n'
    )
    write_private(path, text)
    return made


def read_key(path: str) -> Keyed:
    """The key in a file of `ckptd keygen --integrity`. Raises ConfigError when it is none, or others may read it."""
    named = f"integrity_key_file {path}"
    make = f"only for a job that has no keyed checkpoints yet, a new key: {_MAKE} FILE"
    text = read_private(path, named=named, make=make)
    import tomllib  # noqa: PLC0415 - a client without a key starts without it

    try:
        key = bytes.fromhex(msgspec.convert(tomllib.loads(text), _KeyFile).integrity_key)
    except (ValueError, msgspec.ValidationError):
        key = b""
    if len(key) != KEY_NBYTES:
        raise ConfigError(f"{named} holds no integrity key", hint=make)
    return Keyed(key)


def integrity_of(kind: str | None, key_file: str | None, origin: Origin = CONNECT) -> Integrity:
    """What the two settings say. None and "auto": keyed if there is a key file, else xxh3. Raises ConfigError.

    origin: where kind was said.
    """
    if kind is not None and kind not in KINDS:
        must = '"keyed", with integrity_key_file, or "xxh3"'
        raise not_allowed(ConfigError, "integrity", kind, must, "xxh3", origin=origin)
    if kind == "keyed" and not key_file:
        hint = f"integrity_key_file, CKPTD_INTEGRITY_KEY_FILE or --key; {_MAKE} FILE makes one"
        raise ConfigError("integrity='keyed' needs a key, and no file of one is set", hint=hint)
    return read_key(resolved(key_file)) if key_file and kind != "xxh3" else XXH3


def chosen(
    kind: str | None, key_file: str | os.PathLike[str] | None, environ: Mapping[str, str] = os.environ
) -> Integrity:
    """What a caller said, else the environment; a key file that is said means keyed. Raises ConfigError."""
    origin = CONNECT
    if kind is None and key_file is None:
        kind, origin = environ.get("CKPTD_INTEGRITY") or None, variable("CKPTD_INTEGRITY")
    file = os.fspath(key_file) if key_file is not None else environ.get("CKPTD_INTEGRITY_KEY_FILE")
    return integrity_of(kind, file, origin)
