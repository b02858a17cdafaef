"""What connect was told, or the environment instead of it."""

import os

from ckptd.protocol.errors import ConfigError
from ckptd.protocol.ids import MAX_STORE_CHARS, JobKey, is_job_name
from ckptd.protocol.messages import Cadence


def job_key(job: str | None, store: str | os.PathLike[str] | None) -> JobKey:
    """The job of connect's arguments and the environment. Raises ConfigError."""
    name = job or os.environ.get("CKPTD_JOB", "")
    if not is_job_name(name):
        raise ConfigError(
            f"{name!r} is no name for a job" if name else "the job has no name",
            hint="connect(job=...) or CKPTD_JOB: letters, digits and . _ -, at most 64, the same at each restart",
        )
    where = os.fspath(store) if store is not None else os.environ.get("CKPTD_STORE", "")
    if not os.path.isabs(where) or len(where) >= MAX_STORE_CHARS:
        raise ConfigError(
            f"store {where!r} is not an absolute path" if where else "no store is set",
            hint="connect(store=...) or CKPTD_STORE: a directory on the parallel file system",
        )
    return JobKey(os.path.normpath(where), name)


def arena_path(arena: str | os.PathLike[str] | None) -> str:
    """The arena of connect's argument, the environment, or this user's own."""
    chosen = os.fspath(arena) if arena is not None else os.environ.get("CKPTD_ARENA", "")
    return os.path.abspath(chosen) if chosen else f"/dev/shm/ckptd-{os.getuid()}"  # noqa: S108 - the daemon checks it


def parse_cadence(drain_every: int | str) -> Cadence:
    """Steps as a number, seconds as text such as "300s". Raises ConfigError."""
    if isinstance(drain_every, int) and drain_every >= 1:
        return Cadence(drain_every, 0.0)
    try:
        seconds = float(str(drain_every).removesuffix("s")) if isinstance(drain_every, str) else 0.0
    except ValueError:
        seconds = 0.0
    if seconds <= 0:
        raise ConfigError(
            f"drain_every={drain_every!r}", hint='a number of steps such as 10, or seconds such as "300s"'
        )
    return Cadence(0, seconds)


def is_dual(layout: str) -> bool:
    """Whether images hold torch.save archives for stock readers. Raises ConfigError."""
    if layout not in {"dual", "plain"}:
        raise ConfigError(f"layout={layout!r}", hint='"dual", or "plain" for safetensors images without .metadata')
    return layout == "dual"


def save_timeout(seconds: float | None) -> float:
    """The longest a save may take: connect's argument, the environment, or 10 seconds. Raises ConfigError."""
    raw = os.environ.get("CKPTD_SAVE_TIMEOUT_S", "10") if seconds is None else seconds
    try:
        value = float(raw)
    except ValueError:
        value = 0.0
    if value <= 0:
        raise ConfigError(f"save_timeout_s={raw!r}", hint="a number of seconds above 0, such as 10")
    return value
