"""Integrity keys in files of their owner alone, and what settings make of them. The client uses this too."""

import os
import secrets
import stat
from collections.abc import Mapping
from typing import Final

import msgspec

from ckptd.protocol.errors import ConfigError
from ckptd.protocol.integrity import KEY_NBYTES, XXH3, Integrity, Keyed

KINDS: Final = ("auto", "xxh3", "keyed")
_MAX_NBYTES: Final = 4096
_MAKE: Final = "ckptd keygen --integrity makes one"


class _KeyFile(msgspec.Struct, frozen=True):
    integrity_key: str


def write_key(path: str) -> Keyed:
    """Makes a file with a new key, for its owner alone. Raises ConfigError when it is there or cannot be made."""
    made = Keyed(secrets.token_bytes(KEY_NBYTES))
    text = (
        f"# Integrity key {made.key_id} of ckptd, for integrity_key_file. Who has it can forge checkpoints.\n"
        f'integrity_key = "{made.key.hex()}"\n'
    )
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError as error:
        raise ConfigError(f"{path} is there already", hint="choose another name, or remove it first") from error
    except OSError as error:
        raise ConfigError(f"cannot make {path}: {error.strerror}") from error
    with os.fdopen(fd, "w", encoding="ascii") as file:
        os.fchmod(fd, 0o600)
        file.write(text)
    return made


def read_key(path: str) -> Keyed:
    """The key in a file of `ckptd keygen --integrity`. Raises ConfigError when it is none, or others may read it."""
    named = f"integrity_key_file {path}"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(fd, "rb") as file:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
                text = f"{named} must be a file of uid {os.geteuid()} that nobody else can read"
                raise ConfigError(text, hint=f"chmod 600 {path}, or make another: ckptd keygen --integrity")
            text = file.read(_MAX_NBYTES).decode("ascii")
    except OSError as error:
        raise ConfigError(f"cannot read {named}: {error.strerror}", hint=_MAKE) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{named} holds no integrity key", hint=_MAKE) from error
    import tomllib  # noqa: PLC0415 - a client without a key starts without it

    try:
        key = bytes.fromhex(msgspec.convert(tomllib.loads(text), _KeyFile).integrity_key)
    except (ValueError, msgspec.ValidationError):
        key = b""
    if len(key) != KEY_NBYTES:
        raise ConfigError(f"{named} holds no integrity key", hint=_MAKE)
    return Keyed(key)


def integrity_of(kind: str | None, key_file: str | None) -> Integrity:
    """What the two settings say. None and "auto": keyed if there is a key file, else xxh3. Raises ConfigError."""
    if kind is not None and kind not in KINDS:
        raise ConfigError(f"integrity={kind!r}", hint='"keyed", with integrity_key_file, or "xxh3"')
    if kind == "keyed" and not key_file:
        hint = f"integrity_key_file, CKPTD_INTEGRITY_KEY_FILE or --key; {_MAKE}"
        raise ConfigError("integrity = keyed without a key", hint=hint)
    return read_key(os.path.expanduser(key_file)) if key_file and kind != "xxh3" else XXH3


def chosen(
    kind: str | None, key_file: str | os.PathLike[str] | None, environ: Mapping[str, str] = os.environ
) -> Integrity:
    """What a caller said, else the environment; a key file that is said means keyed. Raises ConfigError."""
    if kind is None and key_file is None:
        kind = environ.get("CKPTD_INTEGRITY") or None
    file = os.fspath(key_file) if key_file is not None else environ.get("CKPTD_INTEGRITY_KEY_FILE")
    return integrity_of(kind, file)
