"""Man pages and shell completions of ckptd, from its commands: ``python -m scripts.manual DIRECTORY``.

The directory is a ``share``: man/man1, bash-completion/completions, zsh/site-functions, fish/vendor_completions.d.
"""

import inspect
import re
import sys
from pathlib import Path

import click
from click.shell_completion import BashComplete, FishComplete, ShellComplete, ZshComplete

from ckptd import __version__
from ckptd.cli import cli

_COMPLETIONS = {
    "bash-completion/completions/ckptd": BashComplete,
    "zsh/site-functions/_ckptd": ZshComplete,
    "fish/vendor_completions.d/ckptd.fish": FishComplete,
}


def pages() -> dict[str, str]:
    """Each page by the name of its file: of ckptd, and one of each verb."""
    top = click.Context(cli, info_name="ckptd", **cli.context_settings)
    verbs = _verbs(cli, top)
    made = {"ckptd.1": _page(top, [f"ckptd\\-{_text(name)}(1)" for name in verbs])}
    for name, verb in verbs.items():
        context = click.Context(verb, info_name=name, parent=top)
        made[f"ckptd-{name}.1"] = _page(context, ["ckptd(1)"])
    return made


def completions() -> dict[str, str]:
    """Each completion by its place below share. They ask ckptd itself, which has the words."""
    return {place: _completion(kind) for place, kind in _COMPLETIONS.items()}


def _verbs(group: click.Group, context: click.Context) -> dict[str, click.Command]:
    found = {name: group.get_command(context, name) for name in group.list_commands(context)}
    return {name: verb for name, verb in found.items() if verb is not None}


def _completion(kind: type[ShellComplete]) -> str:
    made = kind(cli, {}, "ckptd", "_CKPTD_COMPLETE")
    return ShellComplete.source(made)  # bash asks the bash of this machine for its version first


def _page(context: click.Context, others: list[str]) -> str:
    command, name = context.command, context.command_path.replace(" ", "-")
    help_text = inspect.cleandoc(command.help or "")
    first = re.split(r"\.\s", help_text.replace("\n", " "), maxsplit=1)[0].rstrip(".")
    parts = [
        f'.TH "{name.upper()}" "1" "" "ckptd {__version__}" "ckptd"',
        *(".SH NAME", f"{_text(name)} \\- {_text(first)}"),
        *(".SH SYNOPSIS", f".B {_text(context.command_path)}", _text(" ".join(command.collect_usage_pieces(context)))),
        *(".SH DESCRIPTION", *_paragraphs(help_text)),
    ]
    shown = [one.get_help_record(context) for one in command.get_params(context) if isinstance(one, click.Option)]
    options = [record for record in shown if record is not None]
    parts += [".SH OPTIONS"] * bool(options)
    for flags, words in options:
        parts += [".TP", f"\\fB{_text(flags)}\\fR", _text(" ".join(words.split()))]
    if isinstance(command, click.Group):
        parts.append(".SH COMMANDS")
        for verb, found in _verbs(command, context).items():
            parts += [".TP", f"\\fB{_text(verb)}\\fR", _text(found.get_short_help_str(limit=200))]
    parts += _epilog(command.epilog or "")
    return "\n".join([*parts, ".SH SEE ALSO", ", ".join(others)]) + "\n"


def _epilog(text: str) -> list[str]:
    """Sections of an epilog: each begins with a heading such as Example: and has lines of its own."""
    made: list[str] = []
    for block in filter(None, (part.strip("\n") for part in text.split("\b\n"))):
        heading, *lines = block.splitlines()
        made += [f".SH {_text(heading.strip().rstrip(':').upper())}", ".nf"]
        made += [_text(line) for line in inspect.cleandoc("\n".join(["", *lines])).splitlines() if line.strip()]
        made.append(".fi")
    return made


def _paragraphs(text: str) -> list[str]:
    made: list[str] = []
    for block in text.split("\n\n"):
        kept = block.startswith("\b\n")
        lines = block.removeprefix("\b\n").splitlines() if kept else [" ".join(block.split())]
        made += [".PP", *([".nf"] if kept else []), *map(_text, lines), *([".fi"] if kept else [])]
    return made[1:]  # the section begins the first paragraph


def _text(text: str) -> str:
    """Plain text for roff: no character of it is a command."""
    plain = (
        text.replace("\\", "\\e").replace("-", "\\-").replace("`", "\\(ga").replace("^", "\\(ha").replace("~", "\\(ti")
    )
    return "\\&" + plain if plain.startswith((".", "'")) else plain


def main(share: str) -> None:
    """Writes all, over what is there."""
    files = {f"man/man1/{name}": text for name, text in pages().items()} | completions()
    for place, text in files.items():
        path = Path(share, place)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    print(f"{share}: {len(files)} files")


if __name__ == "__main__":
    main(*sys.argv[1:])
