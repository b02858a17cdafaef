"""``ckptd config``: what each setting is, and where it came from. Takes the flags of ``ckptd run``, to try them."""

from typing import Any

import click
import msgspec
from rich.table import Table

from ckptd.cli import common
from ckptd.cli.run import CONFIG_OPTIONS
from ckptd.system import human
from ckptd.system.config import SETTINGS, Config, Raw, Setting, load_config

SCHEMA = 1


class Chosen(msgspec.Struct, frozen=True, kw_only=True):
    """A setting's value, and where it came from."""

    value: Any
    origin: str = msgspec.field(name="from")


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """What --json prints."""

    schema: int = SCHEMA
    settings: dict[str, Chosen]


def shown(setting: Setting, value: Any) -> str:
    """A value as people write it, and ckptd reads it back."""
    match setting.kind:
        case "size":
            text = human.size(value) if value else "0"
            return text if setting.parse(text) == value else str(value)
        case "duration":
            return f"{value:g} s"
        case "switch":
            return "true" if value else "false"
        case _:
            return "" if value is None else str(value)


def _config(config: str | None, *, as_json: bool, **flags: Raw) -> int:
    """Show each setting that a daemon started here would have, and where its value came from.

    Settings come from the TOML file, then CKPTD_* variables, then flags; the last one wins. An unknown one, or a value
    that is not allowed, is exit code 2.
    """
    settings, sources = load_config(flags, toml_path=config)
    if as_json:
        common.print_json(Output(settings=_as_json(settings, sources)))
        return 0
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("setting", "value", "from"):
        table.add_column(column, overflow="fold")
    for name, setting in SETTINGS.items():
        value = human.printable(shown(setting, getattr(settings, name)))
        changed = sources[name] != "default"
        table.add_row(name, value, sources[name], style="bold" if changed else "")
    common.show(table)
    return 0


def _as_json(settings: Config, sources: dict[str, str]) -> dict[str, Chosen]:
    return {name: Chosen(value=getattr(settings, name), origin=sources[name]) for name in SETTINGS}


command = click.Command(
    "config",
    callback=_config,
    params=[
        *CONFIG_OPTIONS,
        click.Option(["--json", "as_json"], is_flag=True, help="JSON with a schema number, for scripts."),
    ],
    help=_config.__doc__,
    epilog=common.example("ckptd config", "CKPTD_KEEP_LAST=5 ckptd config --json"),
)
