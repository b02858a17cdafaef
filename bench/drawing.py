"""Writes figures to files: equal bytes for equal numbers."""

from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure


def save(figure: Figure, path: Path) -> None:
    """Writes an SVG."""
    with mpl.rc_context({"svg.hashsalt": "ckptd"}):
        figure.savefig(path, format="svg", metadata={"Date": None})
