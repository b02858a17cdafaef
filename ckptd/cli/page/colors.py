"""Colours of the page by what they mean, light and dark. Charts are drawn with marks that the page's style replaces."""

import re
from typing import Final, NamedTuple


class Color(NamedTuple):
    """mark: a colour that stands in a chart for this one, until it is ``var(--name)``."""

    light: str
    dark: str
    mark: str


COLORS: Final = {
    "ink": Color("#1c2329", "#e4e8ec", "#010101"),
    "soft": Color("#5d6b78", "#98a5b1", "#010102"),
    "line": Color("#d5dbe1", "#39434c", "#010103"),
    "training": Color("#2e8b57", "#4cb782", "#010104"),
    "repeated": Color("#d98e04", "#f0b03c", "#010105"),
    "stall": Color("#8a4fbf", "#b58ae0", "#010106"),
    "restore": Color("#1f77b4", "#5aa9e6", "#010107"),
    "start": Color("#9aa5b1", "#77838f", "#010108"),
    "unexplained": Color("#c9b8a3", "#6f6254", "#010109"),
    "idle": Color("#e6eaee", "#2a323a", "#01010e"),
    "loss": Color("#c0392b", "#ff6b5e", "#01010a"),
    "save": Color("#51606e", "#aab6c2", "#01010b"),
    "drain": Color("#0f9aa8", "#35c4d2", "#01010c"),
    "damage": Color("#d81b78", "#ff7ac0", "#01010d"),
}
_MARKS: Final = {color.mark: name for name, color in COLORS.items()}
_MARK_RE: Final = re.compile("|".join(_MARKS))


def mark(name: str) -> str:
    """What a chart is drawn with."""
    return COLORS[name].mark


def themed(svg: str) -> str:
    """The chart in the colours of the page."""
    return _MARK_RE.sub(lambda found: f"var(--{_MARKS[found[0]]})", svg)


def style() -> str:
    """Of the page: both themes as variables; on paper the light one."""
    light = "".join(f"--{name}:{color.light};" for name, color in COLORS.items())
    dark = "".join(f"--{name}:{color.dark};" for name, color in COLORS.items())
    return (
        f":root{{color-scheme:light dark;--paper:#ffffff;{light}}}"
        f"@media screen and (prefers-color-scheme:dark){{:root{{--paper:#14191e;{dark}}}}}"
    )
