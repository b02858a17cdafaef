"""Makes figures and writes them to files: equal bytes for equal numbers."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def figure(width: float, height: float) -> "Figure":
    """An empty one, in inches; matplotlib is imported by the first one that is drawn."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - most runs of what imports this draw nothing

    return Figure(figsize=(width, height), layout="constrained")


def save(figure: "Figure", path: Path, *, identifier: str = "") -> None:
    """Writes an SVG. identifier: of the figures that it shows, for its metadata."""
    import matplotlib as mpl  # noqa: PLC0415

    with mpl.rc_context({"svg.hashsalt": "ckptd"}):
        figure.savefig(path, format="svg", metadata={"Date": None} | ({"Identifier": identifier} if identifier else {}))
