"""docs/status-captures.md: what ``ckptd status`` prints in ten situations, in 80 columns."""

import io
import pathlib
import re

from rich.console import Console

from ckptd.cli.view.status import StatusView
from ckptd.shared.protocol.status import Status
from tests.cluster import ROOT

PAGE = pathlib.Path(ROOT) / "docs" / "status-captures.md"
COLUMNS = 80
_FENCE = "```"


def rendered(status: Status, *, nodes: bool = False, columns: int = COLUMNS) -> str:
    """As the command prints it into a pipe."""
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="utf-8")
    Console(file=file, width=columns, highlight=False).print(StatusView(status, nodes=nodes))
    file.flush()
    return "\n".join(line.rstrip() for line in raw.getvalue().decode().rstrip("\n").split("\n"))


def _block_re(name: str) -> re.Pattern[str]:
    return re.compile(rf"(?<=<!-- {re.escape(name)} -->\n).*?(?=<!-- /{re.escape(name)} -->)", re.DOTALL)


def captured(name: str) -> str:
    """The block of a situation, without its fence."""
    found = _block_re(name).search(PAGE.read_text(encoding="utf-8"))
    assert found, f"the page has no capture {name!r}"
    return found[0].strip("\n").removeprefix(f"{_FENCE}text\n").removesuffix(f"\n{_FENCE}")


def names() -> list[str]:
    """Of all captures, in the order of the page."""
    return re.findall(r"^<!-- (?!/)(.*) -->$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


def put(name: str, text: str) -> None:
    """Writes a capture into the page."""
    block = f"{_FENCE}text\n{text}\n{_FENCE}"
    page = PAGE.read_text(encoding="utf-8")
    assert _block_re(name).search(page), f"the page has no place for {name!r}"
    PAGE.write_text(_block_re(name).sub(lambda _: f"\n{block}\n\n", page), encoding="utf-8")
