"""Checks of connect's arguments, and their defaults from the environment."""

import contextlib
import math
import operator
import os
import re
import reprlib
from collections.abc import Callable, Collection
from typing import NamedTuple

import msgspec

from ckptd.shared.base.errors import ConfigError, UsageError
from ckptd.shared.base.ids import ANY_STORE, MAX_STEP, MAX_STORE_CHARS, JobKey, RunId, StoreChoice, is_job_name
from ckptd.shared.base.refusals import CONNECT, call_of, not_allowed, variable
from ckptd.shared.files.integrity_key import chosen
from ckptd.shared.files.paths import resolved
from ckptd.shared.format.arena_paths import SOCKET
from ckptd.shared.format.integrity import XXH3, Integrity
from ckptd.shared.format.schemes import DEFAULT, Scheme
from ckptd.shared.format.schemes.layout import MAX_SET_SIZE
from ckptd.shared.protocol.messages import Cadence
from ckptd.shared.protocol.topology import MIN_SET_SIZE
from ckptd.shared.stores.kinds import is_store_url, normal
from ckptd_client._local.argument_checks import as_flag, as_seconds, looks_like_path
from ckptd_client._state.naming import Named
from ckptd_client._state.sampling import DRAINED, Verify

AUTO = "auto"
_ADDRESS_RE = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*)://(.*)")
_HEX_RE = re.compile(r"^[0-9a-f]{32}\Z")
_MAX_SOCKET_PATH = 107  # sun_path, less its final NUL


def job_key(job: object, store: object, configured: Callable[[], str]) -> JobKey:
    """The job from connect's arguments and the environment. Raises ConfigError.

    configured: gives the default store of this node's daemon; called only if needed.
    """
    name = os.environ.get("CKPTD_JOB", "") if job is None or job == "" else job
    if not isinstance(name, str) or not is_job_name(name):
        text = f"{reprlib.repr(name)} is no name for a job" if name != "" else "the job has no name"
        raise ConfigError(text, hint=_job_hint(name))
    where = as_path("store", store) if store is not None else os.environ.get("CKPTD_STORE", "") or configured()
    if is_store_url(where) and len(where) < MAX_STORE_CHARS:
        return JobKey(normal(where), name)
    _check_local("store", where, "connect(store=...)")
    found = resolved(where) if where else ""
    if not 0 < len(found) < MAX_STORE_CHARS:
        hint = "connect(store=...), CKPTD_STORE, or the daemon's own setting: a directory on the parallel file system"
        text = f"store {where!r} has more than {MAX_STORE_CHARS - 1} characters" if where else "no store is set"
        raise ConfigError(text, hint=hint)
    return JobKey(found, name)


def _job_hint(name: object) -> str:
    """The hint for a bad name."""
    if isinstance(name, str | os.PathLike) and str(name).startswith(("/", "./", "../", "~")):
        path = os.path.abspath(os.path.expanduser(os.fspath(name)))
        return f"a name without a slash; a path is the store: connect('llama-7b', store={str(path)!r})"
    such = f"run-{name}" if isinstance(name, int) else "llama-7b"
    return (
        "connect(job=...) or CKPTD_JOB: text of letters, digits and . _ -, at most 64, the same at each restart, such "
        f"as {such!r}"
    )


def arena_path(arena: str | os.PathLike[str] | None) -> str:
    """The arena from connect's argument or the environment, else this user's own. Raises ConfigError."""
    chosen = as_path("arena", arena) if arena is not None else os.environ.get("CKPTD_ARENA", "")
    _check_local("arena", chosen, "connect(arena=...)")
    path = resolved(chosen) if chosen else f"/dev/shm/ckptd-{os.getuid()}"  # noqa: S108 - its owner is checked
    nbytes = len(os.fsencode(os.path.join(path, SOCKET)))
    if nbytes > _MAX_SOCKET_PATH:
        raise ConfigError(
            f"arena {path!r}: its socket's path has {nbytes} bytes, a unix socket's may have {_MAX_SOCKET_PATH}",
            hint="choose a shorter arena: --arena, CKPTD_ARENA or connect(arena=...)",
        )
    return path


def as_path(argument: str, given: object) -> str:
    """The path of a str or a Path. Raises ConfigError."""
    found = os.fspath(given) if isinstance(given, str | os.PathLike) else None
    if not isinstance(found, str) or "\0" in found:
        raise not_allowed(ConfigError, argument, given, "a path: a str or a pathlib.Path", f"/path/of/{argument}")
    return found


def _check_local(argument: str, where: str, call: str) -> None:
    """Raises ConfigError for an address, such as a URL, in place of a directory."""
    address = _ADDRESS_RE.match(where)
    if address is None:
        return
    if address[1] == "file":
        raise ConfigError(f"{argument} {where!r} is an address, not a path", hint=f"{call}: {address[2]!r}")
    hint = f"mount it, and give the directory where it is mounted: {call}"
    raise ConfigError(f"{argument} {where!r} is an address, and only directories of a file system can be it", hint=hint)


def why_unstarted(start: bool | None) -> str:
    """Why connect starts no daemon if none runs; empty: it does. Raises ConfigError."""
    if start is None:
        return "CKPTD_NO_AUTOSTART is set: connect starts none" if os.environ.get("CKPTD_NO_AUTOSTART") else ""
    return "" if as_flag("start", start) else "start=False (from connect)"


def parse_cadence(drain_every: int | str) -> Cadence:
    """The cadence of drain_every: a number of steps, seconds as text such as "300s", or "auto". Raises ConfigError."""
    if drain_every == AUTO:
        return Cadence(0, 0.0)
    if 1 <= as_int(drain_every) <= MAX_STEP:
        return Cadence(as_int(drain_every), 0.0)
    try:
        given = isinstance(drain_every, str) and drain_every.endswith("s")  # a bare "300" may mean either
        seconds = float(str(drain_every).removesuffix("s")) if given else 0.0
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        must = f'a number of steps from 1 to {MAX_STEP}, seconds such as "300s", or "auto"'
        raise not_allowed(ConfigError, "drain_every", drain_every, must, 10, "300s")
    return Cadence(0, seconds)


def as_scheme(redundancy: str | None) -> Scheme | None:
    """The checked argument; None: the daemon's setting applies. Raises ConfigError."""
    if redundancy is None:
        return None
    try:
        return msgspec.convert(redundancy, Scheme)
    except msgspec.ValidationError:
        bears = (f'"{s}", which survives the loss of {s.losses} of the nodes of a set' for s in Scheme if s.losses)
        must = f'{", ".join(bears)}, or "none"'
        meant = (Scheme.NONE if _means_off(redundancy) else DEFAULT).value
        raise not_allowed(ConfigError, "redundancy", redundancy, must, meant) from None


def as_set_size(set_size: int | None) -> int | None:
    """The checked argument; None: the daemon's setting applies. Raises ConfigError."""
    if set_size is not None and not MIN_SET_SIZE <= as_int(set_size) <= MAX_SET_SIZE:
        must = f"a number of nodes from {MIN_SET_SIZE} to {MAX_SET_SIZE}"
        raise not_allowed(ConfigError, "set_size", set_size, must, 8)
    return None if set_size is None else as_int(set_size)


def is_balanced(balance: str | None) -> bool | None:
    """The balance of connect's argument or the environment; None: the daemon's setting. Raises ConfigError."""
    chosen = os.environ.get("CKPTD_BALANCE") if balance is None else balance
    if chosen not in (None, "rows", "off"):
        must = '"rows", replicas each save a slice of what they all hold, or "off", each all of its own'
        origin = variable("CKPTD_BALANCE") if balance is None else CONNECT
        meant = "off" if _means_off(chosen) else "rows"
        raise not_allowed(ConfigError, "balance", chosen, must, meant, origin=origin)
    return None if chosen is None else chosen == "rows"


def verification(verify_replicas: object) -> Verify:
    """The saves that compare all bytes of replicas. Raises ConfigError."""
    if verify_replicas == "drained":
        return DRAINED
    if verify_replicas == "off":
        return Verify(drained=False)
    if as_int(verify_replicas) < 1:
        must = '"drained", in each save that may be drained, a number n, in one of n saves, or "off"'
        every: object = 1 if _lowered(verify_replicas) in {"always", "all", "every", "true"} else "drained"
        meant = "off" if _means_off(verify_replicas) else every
        raise not_allowed(ConfigError, "verify_replicas", verify_replicas, must, meant)
    return Verify(drained=False, every=as_int(verify_replicas))


def _means_off(value: object) -> bool:
    """Whether a refused value means "off", so that the hint must not propose "on"."""
    return _lowered(value) in {"false", "none", "no", "off", "never", "0", ""}


def _lowered(value: object) -> str:
    return str(value).lower() if value is None or isinstance(value, bool | int | str) else "?"


def as_named(per_rank: object, replicated: object) -> Named:
    """The patterns of names from connect's arguments. Raises ConfigError."""
    return Named(
        _patterns("per_rank", per_rank, "rng"),
        _patterns("replicated", replicated, "model.*"),
    )


def _patterns(argument: str, given: object, example: str) -> tuple[str, ...]:
    """Each pattern once, sorted, as plain text: ranks compare their arguments, and a set has no order."""
    listed = isinstance(given, Collection) and not isinstance(given, str | bytes)
    if not listed or not all(isinstance(p, str) and p for p in given):  # type: ignore[attr-defined]
        raise not_allowed(ConfigError, argument, given, "a list of keys, or of patterns", [example])
    return tuple(sorted({str.__str__(p) for p in given}))  # type: ignore[attr-defined]


def is_dual(layout: str) -> bool:
    """Whether images contain torch.save archives for stock readers. Raises ConfigError."""
    if layout not in ("dual", "plain"):
        must = '"dual", or "plain" for safetensors files without .metadata'
        raise not_allowed(ConfigError, "layout", layout, must, "dual")
    return layout == "dual"


def save_timeout(seconds: float | None) -> float:
    """The save timeout: connect's argument, the environment, or 10 seconds. Raises ConfigError."""
    if seconds is not None:
        return as_seconds("save_timeout_s", seconds, such_as=10)
    given: float | str = os.environ.get("CKPTD_SAVE_TIMEOUT_S", "10")
    with contextlib.suppress(ValueError):
        given = float(given)
    return as_seconds("save_timeout_s", given, such_as=10, origin=variable("CKPTD_SAVE_TIMEOUT_S"))


class Proof(NamedTuple):
    """The proof of all saved and loaded data, and its flags for a daemon that connect starts."""

    integrity: Integrity = XXH3
    flags: tuple[str, ...] = ()


UNPROVED = Proof()


def proof_of(integrity: str | None, key_file: str | os.PathLike[str] | None) -> Proof:
    """The proof from connect's arguments, else the environment, which a daemon reads too. Raises ConfigError."""
    key_file = key_file if key_file is None else as_path("integrity_key_file", key_file)
    found = chosen(integrity, key_file)
    if integrity is None and key_file is None:
        return Proof(found)
    if not found.keyed:
        return Proof(found, ("--integrity", "xxh3"))
    flags = ("--integrity", "keyed")
    path = () if key_file is None else ("--integrity-key-file", resolved(key_file))
    return Proof(found, (*flags, *map(str, path)))


def check_order(state: object, step: object) -> None:
    """Raises UsageError if the arguments of save are exchanged."""
    if isinstance(step, dict) and not isinstance(state, dict):
        text = f"save was given {reprlib.repr(state)} as the state, and a dict as the step"
        raise UsageError(text, hint="save(state, step)")


def as_step(step: object) -> int:
    """A step from any kind of integer, such as numpy's or a tensor's only element. Raises UsageError."""
    value = as_int(step)
    if not 0 <= value <= MAX_STEP:
        hint = "save(state, step)" if isinstance(step, dict) else "an int such as 100, or no step at all"
        if looks_like_path(step):
            hint = "save(state, 100): ckptd names the files itself; their directory is connect(store=...)"
        raise UsageError(f"step must be an int from 0 to {MAX_STEP}, not {reprlib.repr(step)}", hint=hint)
    return value


def as_store_id(store_id: str | None, store: str) -> StoreChoice:
    """The store id from connect's argument or the environment; empty: any store. Raises ConfigError."""
    chosen = os.environ.get("CKPTD_STORE_ID", "") if store_id is None else store_id
    if chosen not in {"", ANY_STORE} and not _HEX_RE.match(str(chosen)):
        must = f"32 hex digits, or {ANY_STORE!r} for whatever store lies there"
        origin = variable("CKPTD_STORE_ID") if store_id is None else CONNECT
        raise not_allowed(ConfigError, "store_id", chosen, must, ANY_STORE, origin=origin, see=f"ckptd list {store}")
    return chosen


def as_run(run: object) -> RunId | None:
    """A run id as `load` and its errors write it; None: any run. Raises UsageError."""
    if run is None:
        return None
    if not isinstance(run, str) or not _HEX_RE.match(run):
        raise not_allowed(
            UsageError, "run", run, "a run id: 32 hex digits", origin=call_of("load"), see="ckptd list --json STORE"
        )
    return bytes.fromhex(run)


def as_int(value: object) -> int:
    """An int from any kind of integer; -1 for other values."""
    try:
        return -1 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except (TypeError, RuntimeError, ValueError):
        return -1
