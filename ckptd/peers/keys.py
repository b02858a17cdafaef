"""CURVE key pairs: made, written to a file of their owner alone, read."""

import tomllib
from typing import Final

import msgspec
import zmq

from ckptd.shared.base.errors import ConfigError
from ckptd.shared.files.regular import read_private, write_private
from ckptd.shared.protocol.topology import PublicKey

_MAKE: Final = "ckptd keygen"


class KeyPair(msgspec.Struct, frozen=True):
    """Both in Z85, as CURVE has them. A process with the secret can speak for the daemon."""

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
    write_private(path, text)


def read_keys(path: str) -> KeyPair:
    """The pair in a file of `ckptd keygen`. Raises ConfigError when it is none, or others may read it."""
    named = f"key_file {path}"
    text = read_private(path, named=named, make=f"a new pair, the same on all nodes: {_MAKE} FILE")
    try:
        keys = msgspec.convert(tomllib.loads(text), KeyPair)
    except (ValueError, msgspec.ValidationError):
        raise ConfigError(f"{named} holds no key pair", hint=f"{_MAKE} makes one") from None
    if not fits(keys):
        raise ConfigError(f"{named}: public and secret key do not belong together", hint=_MAKE)
    return keys


def fits(keys: KeyPair) -> bool:
    """Whether the public key is that of the secret one."""
    try:
        return zmq.curve_public(keys.secret.encode()).decode() == keys.public
    except (zmq.ZMQError, ValueError):
        return False
