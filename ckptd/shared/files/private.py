"""Small files of secrets: made for their owner alone, and read only if they still are."""

import os
import stat
from typing import Final

from ckptd.shared.base.errors import ConfigError

_MAX_NBYTES: Final = 4096


def write_private(path: str, text: str) -> None:
    """Makes the file, 0600 whatever the umask. Raises ConfigError when it is there already or cannot be made."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise ConfigError(
            f"{path} is there already",
            hint="choose another name: what was made with this one needs it",
        ) from None
    except OSError as error:
        raise ConfigError(f"cannot make {path}: {error.strerror}") from None
    with os.fdopen(fd, "w", encoding="ascii") as file:
        os.fchmod(fd, 0o600)
        file.write(text)


def read_private(path: str, *, named: str, make: str) -> str:
    """The text, with a sign of replacement for what is no ASCII.

    named: what the user calls the file; make: the command that makes one, and when it is of use, for hints. Raises
    ConfigError when it cannot be read, is not this user's, or others may read it.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(fd, "rb") as file:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
                text = f"{named} must be a file of uid {os.geteuid()} that nobody else can read"
                raise ConfigError(text, hint=f"chmod 600 {path}; {make}")
            return file.read(_MAX_NBYTES).decode("ascii", "replace")
    except OSError as error:
        hint = f"is the path right, and is its file system mounted? {make}"
        raise ConfigError(f"cannot read {named}: {error.strerror}", hint=hint) from None
