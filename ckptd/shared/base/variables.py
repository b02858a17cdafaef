"""The environment variables of ckptd: of the daemon's settings, of the client, of tests. Others are misspelt."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Final

from ckptd.shared.base.errors import ConfigError

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
SETTINGS: Final = frozenset(
    f"{PREFIX}{name}"
    for name in (
        "ARENA",
        "STORE",
        "BUDGET_NBYTES",
        "SLOTS_PER_RANK",
        "STAGE_TIMEOUT_S",
        "READ_TIMEOUT_S",
        "STORE_TIMEOUT_S",
        "STORE_HANG_S",
        "STOP_DRAIN_S",
        "ORPHAN_TTL_S",
        "DRAIN_BANDWIDTH",
        "WORKER_NICE",
        "WORKER_IONICE",
        "HASH_THREADS",
        "KEEP_LAST",
        "KEEP_EVERY",
        "CONNECT_TIMEOUT_S",
        "REDUNDANCY",
        "SET_SIZE",
        "BALANCE",
        "DRAIN_PARITY",
        "NODE",
        "DOMAIN",
        "PEER_ADDRESS",
        "PEER_PORT",
        "BULK_PORT",
        "PEER_TIMEOUT_S",
        "KEY_FILE",
        "INTEGRITY",
        "INTEGRITY_KEY_FILE",
        "EXIT_WHEN_EMPTY",
        "LOG_LEVEL",
    )
)


def check_variables(environ: Mapping[str, str]) -> None:
    """Raises ConfigError for the first variable that begins as ours do and is none, with the nearest that is."""
    known = {name.removeprefix(PREFIX) for name in SETTINGS | FOREIGN_VARIABLES}
    for name in sorted(environ):
        if name.startswith(PREFIX) and name.removeprefix(PREFIX) not in known:
            hint = nearest(name.removeprefix(PREFIX), known, PREFIX)
            raise ConfigError(f"unknown setting {name} in the environment", hint=hint)


def nearest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """The hint for a name that is not known."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {prefix}{near[0]}?" if near else "known: " + ", ".join(prefix + one for one in names)
