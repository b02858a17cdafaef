"""``ckptd doctor``: is this machine fit for ckptd, and what to type where it is not."""

import click
import msgspec
from rich.table import Table
from rich.text import Text

from ckptd.cli import common
from ckptd.doctor.probe_peers import examine_peers
from ckptd.doctor.run import Finding, Verdict, examine
from ckptd.system import human
from ckptd.system.config import load_config

SCHEMA = 1
_STYLES = {Verdict.OK: "green", Verdict.WARN: "yellow", Verdict.BAD: "bold red"}


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """What --json prints."""

    schema: int = SCHEMA
    findings: list[Finding]


@click.command(epilog=common.example("ckptd doctor --store /scratch/$USER/ckpt"))
@common.arena_option
@click.option(
    "--store", type=click.Path(), metavar="DIR", help="Directory on the parallel file system to try.  [CKPTD_STORE]"
)
@common.json_option
def command(arena: str | None, store: str | None, as_json: bool) -> int:
    """Examine shared memory, limits, logind, the store, and ports and keys between nodes.

    Exit code 1 if something will not work.
    """
    config, _ = load_config({"arena": arena, "store": store})
    findings = [*examine(config.arena, config.store), *examine_peers(config)]
    if as_json:
        common.print_json(Output(findings=findings))
    else:
        common.show(_table(findings))
    return int(any(finding.verdict == Verdict.BAD for finding in findings))


def _table(findings: list[Finding]) -> Table:
    """A verdict is a word, not a colour; below each problem, the command to type."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        detail = Text(human.printable(finding.detail))
        if finding.fix:
            detail.append(f"\nfix: {human.printable(finding.fix)}", "cyan")
        table.add_row(Text(finding.verdict, _STYLES[finding.verdict]), finding.name, detail)
    return table
