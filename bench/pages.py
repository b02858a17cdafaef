"""Puts tables of a run into a page, between marks such as <!-- mesh --> and <!-- /mesh -->."""

import re
from pathlib import Path

from bench import mesh_report, peer_report
from bench.report import Report


def write(report: Report, page: Path) -> None:
    """Replaces the tables that the run has. Raises ValueError if the page lacks their marks."""
    parts = {f"peers-{ranks}": peer_report.markdown(report.peers, ranks) for ranks in {p.ranks for p in report.peers}}
    if report.mesh:
        parts["mesh"] = mesh_report.markdown(report.mesh)
    parts["machine"] = (
        "{cores} cores, {memory_gib} GiB, Linux {kernel}, Python {python}, torch {torch}; "
        "load when the run began: {load}.\n"
    ).format(**report.machine)
    for name, part in parts.items():
        put(page, name, part)


def put(page: Path, name: str, part: str) -> None:
    """Replaces the text between two marks. Raises ValueError if the page lacks them."""
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    text = page.read_text()
    if not pattern.search(text):
        raise ValueError(f"the page has no <!-- {name} -->")
    page.write_text(pattern.sub(lambda found: found[1] + part + found[2], text))
