"""CURVE key pairs: made, written to a file of their owner alone, read."""

import os
import stat
import tomllib

import msgspec
import zmq

from ckptd.protocol.errors import ConfigError
from ckptd.protocol.topology import PublicKey


class KeyPair(msgspec.Struct, frozen=True):
    """Both in Z85, as CURVE has them. Whoever has the secret can speak for the daemon."""

    public: PublicKey
    secret: PublicKey

    def __repr__(self) -> str:
        return f"KeyPair(public={self.public!r})"  # the other one must not reach a log


def make_keys() -> KeyPair:
    """A new pair."""
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode(), secret.decode())


def write_keys(path: str, keys: KeyPair) -> None:
    """Makes the file, readable by its owner alone. Raises ConfigError when it is there already or cannot be made."""
    text = (
        f'# Key pair of ckptd daemons, for the setting key_file\npublic = "{keys.public}"\nsecret = "{keys.secret}"\n'
    )
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError as error:
        raise ConfigError(f"{path} is there already", hint="choose another name, or remove it first") from error
    except OSError as error:
        raise ConfigError(f"cannot make {path}: {error.strerror}") from error
    with os.fdopen(fd, "w", encoding="ascii") as file:
        file.write(text)


def read_keys(path: str) -> KeyPair:
    """The pair in a file of `ckptd keygen`. Raises ConfigError when it is none, or others may read it."""
    hint = f"chmod 600 {path}, or make another with ckptd keygen"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(fd, "rb") as file:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
                raise ConfigError(f"key_file {path} must be a file that only uid {os.geteuid()} can read", hint=hint)
            keys = msgspec.convert(tomllib.loads(file.read(4096).decode("ascii")), KeyPair)
    except OSError as error:
        raise ConfigError(f"cannot read key_file {path}: {error.strerror}", hint="ckptd keygen makes one") from error
    except (ValueError, msgspec.ValidationError) as error:
        raise ConfigError(f"key_file {path} holds no key pair", hint="ckptd keygen makes one") from error
    if not fits(keys):
        raise ConfigError(f"key_file {path}: public and secret key do not belong together", hint="ckptd keygen")
    return keys


def fits(keys: KeyPair) -> bool:
    """Whether the public key is that of the secret one."""
    try:
        return zmq.curve_public(keys.secret.encode()).decode() == keys.public
    except (zmq.ZMQError, ValueError):
        return False
