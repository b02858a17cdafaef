"""What verbs share: options, the console, JSON."""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import click
import msgspec
from rich.console import Console, RenderableType

from ckptd.shared.base.errors import CkptdError, UsageError
from ckptd.shared.files.integrity_key import chosen
from ckptd.shared.format.integrity import Integrity
from ckptd.system.config import SETTINGS, default_toml_path, load_config, parsed, read_toml
from ckptd.system.units import parse_duration_s

arena_option = click.option(
    "--arena", type=click.Path(), metavar="DIR", help="The daemon's arena.  [CKPTD_ARENA; /dev/shm/ckptd-UID]"
)
json_option = click.option("--json", "as_json", is_flag=True, help="JSON with a schema number, for scripts.")
timeout_option = click.option(
    "--timeout", "timeout_s", type=click.FloatRange(0.1), default=5.0, show_default=True, metavar="SECONDS",
    help="How long to wait for the daemon's answer.",
)  # fmt: skip

_PIPED_COLUMNS = 80


def integrity_options(verb: Callable[..., Any]) -> Callable[..., Any]:
    """--key and --integrity, which a verb gets as its argument integrity. What they say counts before all settings."""

    @click.option(
        "--key",
        type=click.Path(),
        metavar="FILE",
        help="Take only what this key proves.  [CKPTD_INTEGRITY_KEY_FILE; none]",
    )
    @click.option(
        "--integrity", "kind", type=click.Choice(["xxh3", "keyed"]),
        help="xxh3: take what is not keyed, though there is a key.  [CKPTD_INTEGRITY; keyed if there is a key]",
    )  # fmt: skip
    @functools.wraps(verb)
    def command(*args: Any, key: str | None, kind: str | None, **flags: Any) -> Any:
        return verb(*args, integrity=chosen(kind, key, _said_of_integrity()), **flags)

    return command


def integrity_of_settings() -> Integrity:
    """As a verb has it that gives neither --key nor --integrity. Raises ConfigError."""
    return chosen(None, None, _said_of_integrity())


def _said_of_integrity() -> dict[str, str]:
    """Settings that a verb shares with the daemon, by variable. It takes no notice of others, right or wrong."""
    path = default_toml_path(os.environ)
    toml = read_toml(path) if path is not None else {}
    settings = [SETTINGS[name] for name in ("integrity", "integrity_key_file")]
    told = {one.variable: str(parsed(one, toml[one.key], str(path))) for one in settings if one.key in toml}
    return told | {one.variable: found for one in settings if (found := os.environ.get(one.variable))}


def example(*lines: str) -> str:
    """The end of a verb's help, line breaks kept."""
    return "\n".join(["\b", "Example:", *(f"  {line}" for line in lines)])


def arena_of(flag: str | None) -> str:
    """The arena that a daemon with these settings would use. Raises ConfigError."""
    return load_config({"arena": flag})[0].arena


def seconds_of(timeout: str) -> float:
    """What --timeout says. Raises UsageError."""
    try:
        return parse_duration_s(timeout)
    except ValueError as error:
        raise UsageError(f"--timeout: {error}", hint='such as "90s" or "10m"') from None


@contextlib.contextmanager
def store_errors() -> Iterator[None]:
    """Reports an error of the file system like any other, with exit code 1."""
    try:
        yield
    except OSError as error:
        text = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        raise CkptdError(text, hint="look at the store, and at who may write there") from error


def print_json(value: msgspec.Struct, *, indent: int = 2) -> None:
    """One JSON document: docs/json.md has its fields. indent 0 keeps it on one line, for a stream of them."""
    raw = msgspec.json.encode(value)
    click.echo(msgspec.json.format(raw, indent=indent) if indent else raw)


def console(*, stderr: bool = False) -> Console:
    """Where a verb prints. Numbers in a text are not coloured. A file or a pipe is 80 columns wide, unless $COLUMNS."""
    made = Console(stderr=stderr, highlight=False)
    if not made.is_terminal and not os.environ.get("COLUMNS"):
        made.width = _PIPED_COLUMNS  # not that of the terminal which happens to be at stdin
    return made


def show(what: RenderableType) -> None:
    """Prints to people; to a file or a pipe without the blanks that only fill lines up."""
    to = console()
    if to.is_terminal:
        to.print(what)
        return
    with to.capture() as captured:
        to.print(what)
    click.echo("\n".join(line.rstrip() for line in captured.get().rstrip("\n").split("\n")))
