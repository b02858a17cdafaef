"""What is wrong with the outcome of a mistake: nothing, or a list of plain findings."""

import re

from tests.mistakes.mistake import Mistake
from tests.mistakes.play import Outcome

_OURS = ("ckptd.", "ckptd_client.")
_NOISE = (
    "Exception in thread",
    "Exception ignored in",
    "Fatal Python error",
    "Bus error",
    "Segmentation fault",
    "resource_tracker",
    "The above exception was the direct cause",  # one cause has one traceback
)
_MAX_LINES = 8
_MAX_CHARS = 900


def findings(mistake: Mistake, outcome: Outcome) -> list[str]:
    """An empty list for an outcome as it should be."""
    text = outcome.text
    found = []
    if None in outcome.exits:
        found.append(f"it did not end in {mistake.within_s:g} s")
    elif outcome.exits != mistake.exits:
        found.append(f"exit status {outcome.exits}, not {mistake.exits}")
    for what in ("cause", "place", "hint"):
        pattern = getattr(mistake, what)
        if not re.search(pattern, text, re.MULTILINE):
            found.append(f"the {what} is not said: no match of {pattern!r}")
    if mistake.never and (match := re.search(mistake.never, text, re.MULTILINE)):
        found.append(f"says {match.group()!r}")
    found += [f"noise: {noise}" for noise in _NOISE if noise in text]
    for rank, one in enumerate(outcome.texts):
        found += _of_the_end(mistake, f"rank {rank}: " if len(outcome.texts) > 1 else "", one)
    return found


def _of_the_end(mistake: Mistake, who: str, text: str) -> list[str]:
    if mistake.is_shell and re.match(r"\$ ckptd", mistake.typed) and "Traceback" in text:
        return [f"{who}a traceback on the command line"]
    message = _last_exception(text)
    if message is None:
        return []
    kind = message.partition(":")[0].strip()
    if not kind.startswith(_OURS) and kind not in mistake.raises:
        return [f"{who}ends with {kind}, which is not an error of ckptd's"]
    if kind.startswith(_OURS) and (message.count("\n") >= _MAX_LINES or len(message) > _MAX_CHARS):
        return [f"{who}the message has {len(message.splitlines())} lines, {len(message)} characters"]
    return []


def _last_exception(text: str) -> str | None:
    """From the line that names it to the end, of the last traceback; None without one."""
    _, mark, last = text.rpartition("Traceback (most recent call last):\n")
    if not mark:
        return None
    lines = last.splitlines()
    starts = [i for i, line in enumerate(lines) if line and not line[0].isspace()]
    return "\n".join(lines[starts[0] :]) if starts else None
