"""The environment variables of ckptd: of the daemon's settings, of the client, of tests. Others are misspelt."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Final

from ckptd.shared.base.errors import ConfigError
from ckptd.shared.settings.config import Config

PREFIX: Final = "CKPTD_"
FOREIGN_VARIABLES: Final = frozenset(
    {
        "CKPTD_CONFIG",  # where the TOML file is
        "CKPTD_FAILPOINT",  # crash points, for tests
        "CKPTD_JOB",  # the client's
        "CKPTD_LOG",
        "CKPTD_NO_AUTOSTART",
        "CKPTD_SAVE_TIMEOUT_S",
        "CKPTD_STORE_ID",
    }
)
SETTING_VARIABLES: Final = frozenset(PREFIX + name.upper() for name in Config.__struct_fields__)


def check_variables(environ: Mapping[str, str]) -> None:
    """Raises ConfigError for the first variable that begins as ours do and is none, with the nearest that is."""
    known = {name.removeprefix(PREFIX) for name in SETTING_VARIABLES | FOREIGN_VARIABLES}
    for name in sorted(environ):
        if name.startswith(PREFIX) and name.removeprefix(PREFIX) not in known:
            hint = nearest(name.removeprefix(PREFIX), known, PREFIX)
            raise ConfigError(f"unknown setting {name} in the environment", hint=hint)


def nearest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """The hint for a name that is not known."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {prefix}{near[0]}?" if near else "known: " + ", ".join(prefix + one for one in names)
