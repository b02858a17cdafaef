"""``ckptd run``: the daemon, in the foreground. Its flags are the fields of Config: there is no second list."""

import click

from ckptd.cli.common import example
from ckptd.system import human
from ckptd.system.config import SETTINGS, Config, Raw, Setting, load_config

_METAVARS = {"size": "SIZE", "duration": "DURATION", "integer": "N", "path": "PATH", "text": "NAME"}


def _option(setting: Setting) -> click.Option:
    flag = f"{setting.flag}/--no-{setting.flag.removeprefix('--')}" if setting.kind == "switch" else setting.flag
    return click.Option(
        [flag, setting.name],
        default=None,
        type=click.Choice(setting.choices) if setting.choices else None,
        metavar=_METAVARS.get(setting.kind),
        help=f"{setting.help}  [{setting.variable}; default {_default(setting)}]",
    )


def _default(setting: Setting) -> str:
    value = getattr(Config(), setting.name)
    match setting.kind:
        case "size":
            return human.size(value) if value else "0"
        case "duration":
            return human.duration(value)
        case "switch":
            return "on" if value else "off"
        case _:
            return "none" if value in (None, "") else str(value)


def _run(config: str | None, **flags: Raw) -> int:
    """Run the daemon in the foreground, until SIGTERM or Ctrl-C.

    Settings come from the TOML file, then CKPTD_* variables, then flags; the last one wins.
    """
    settings, _ = load_config(flags, toml_path=config)
    from ckptd.daemon import serving  # noqa: PLC0415  # wrong settings are reported before anything heavy is loaded

    return serving.run(settings)


CONFIG_OPTIONS: list[click.Parameter] = [
    click.Option(
        ["--config"], type=click.Path(), metavar="FILE", help="TOML file.  [CKPTD_CONFIG; ~/.config/ckptd/config.toml]"
    ),
    *map(_option, SETTINGS.values()),
]

command = click.Command(
    "run",
    callback=_run,
    params=CONFIG_OPTIONS,
    help=_run.__doc__,
    epilog=example("ckptd run --store /scratch/$USER/ckpt --budget-nbytes 64G"),
)
