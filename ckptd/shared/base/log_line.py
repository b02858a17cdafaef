"""One line of a log: an event and its facts. Pure."""

import json
import re

_PLAIN_RE = re.compile(r"[^\s\"'=\\]+")


def line(event: str, **facts: object) -> str:
    """What happened, and its facts in order; None and the empty text are left out."""
    told = (f"{key}={_value(value)}" for key, value in facts.items() if value is not None and value != "")
    return " ".join((event, *told))


def _value(value: object) -> str:
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    plain = _PLAIN_RE.fullmatch(text) and text.isprintable()
    return text if plain else quoted(text)


def quoted(text: str) -> str:
    """In JSON's quotes; what is letters elsewhere stays so, what steers a terminal does not."""
    quoted = json.dumps(text, ensure_ascii=False)
    return "".join(char if char.isprintable() else json.dumps(char)[1:-1] for char in quoted)
