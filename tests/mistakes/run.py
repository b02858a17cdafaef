"""`make mistakes`: each mistake, what came of it, and the verdict, to be read by people.

python -m tests.mistakes.run [TEXT ...]: those whose themes or names contain one of these; else all. "waits for": those
that nothing answers yet.
"""

import os
import sys
from concurrent.futures import ThreadPoolExecutor

from tests.mistakes.judge import findings
from tests.mistakes.mistake import Mistake
from tests.mistakes.play import Outcome, play
from tests.mistakes.table import THEMES

AT_ONCE = 4 * (os.cpu_count() or 1)  # most of them only wait


def main(words: list[str]) -> int:
    """How many were not as they should be, and are not waited for."""
    chosen = [
        (theme, mistake)
        for theme, mistakes in THEMES.items()
        for mistake in mistakes
        if not words or any(word in _label(theme, mistake) for word in words)
    ]
    wrong = waiting = 0
    with ThreadPoolExecutor(AT_ONCE) as pool:
        outcomes = pool.map(lambda pair: play(pair[1]), chosen)
        for (theme, mistake), outcome in zip(chosen, outcomes, strict=True):
            found = findings(mistake, outcome)
            print(transcript(theme, mistake, outcome, found), flush=True)
            wrong += bool(found) and not mistake.waits_for
            waiting += bool(mistake.waits_for)
    print(f"{len(chosen)} mistakes, {waiting} of them waiting for work, {wrong} not answered as they should be")
    return int(bool(wrong))


def _label(theme: str, mistake: Mistake) -> str:
    return f"{theme}/{mistake.name}" + (f", waits for {mistake.waits_for}" if mistake.waits_for else "")


def transcript(theme: str, mistake: Mistake, outcome: Outcome, found: list[str]) -> str:
    """One mistake on paper."""
    parts = [f"=== {_label(theme, mistake)}" + (f" ({mistake.ranks} ranks)" if mistake.ranks > 1 else "")]
    if mistake.before:
        parts.append(_indented("# before: ", mistake.before))
    parts.append(_indented("" if mistake.is_shell else ">>> ", mistake.typed))
    parts.append(_indented("    ", outcome.text))
    verdict = "; ".join(found) if found else "as it should be"
    parts.append(f"--- exit {outcome.exits} after {outcome.seconds:.1f} s: {verdict}\n")
    return "\n".join(parts)


def _indented(mark: str, text: str) -> str:
    return "\n".join(mark + line for line in text.strip().splitlines())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
