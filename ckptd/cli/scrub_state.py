"""How far scrubs of stores have come, in a file of this user: the next one continues there."""

import os
import time
from collections.abc import Iterable

import msgspec

from ckptd.core.coordinator.scrub_order import Read
from ckptd.shared.base.decoding import MALFORMED
from ckptd.shared.base.errors import CkptdError
from ckptd.shared.base.wording import cut
from ckptd.shared.files.paths import resolved

_SCHEMA = 1
_EVERY_S = 5.0  # a killed scrub reads so much again


class _Content(msgspec.Struct, frozen=True):
    schema: int
    read: dict[str, Read]


_decoder = msgspec.json.Decoder(_Content)


def default_path() -> str:
    """In the directory that systemd gives a unit, else in the user's own for such things."""
    directory = os.environ.get("STATE_DIRECTORY", "").partition(":")[0]
    home = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return os.path.join(directory or os.path.join(home, "ckptd"), "scrub.json")


class ScrubState:
    """``read``: by checkpoint. Times are seconds since 1970."""

    def __init__(self, path: str) -> None:
        self.path = resolved(path)
        self.read: dict[str, Read] = {}
        self.problem = ""  # of a file that is there and cannot be used
        self._next_s = 0.0
        try:
            with open(self.path, "rb") as file:
                self.read = dict(_decoder.decode(file.read()).read)
        except FileNotFoundError:
            pass
        except (OSError, *MALFORMED) as error:
            self.problem = f"{self.path}: {cut(error)}: the scrub begins again"

    def keep_only(self, names: Iterable[str], below: str) -> None:
        """Of what lies below that location, these alone are still there."""
        there = set(names)
        self.read = {name: one for name, one in self.read.items() if name in there or not name.startswith(below)}

    def save(self, *, now: bool = False) -> None:
        """Every few seconds, or now. Raises CkptdError."""
        if not now and time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + _EVERY_S
        new = f"{self.path}.new"
        try:
            os.makedirs(os.path.dirname(self.path), mode=0o700, exist_ok=True)
            with open(new, "wb") as file:
                file.write(msgspec.json.encode(_Content(_SCHEMA, self.read)))
            os.replace(new, self.path)
        except OSError as error:
            text = f"how far the scrub is cannot be kept in {self.path}: {error.strerror}"
            raise CkptdError(text, hint="another place: --state FILE") from error
