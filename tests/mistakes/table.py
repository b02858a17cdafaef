"""All mistakes, by theme."""

from tests.mistakes import calls, commands, daemons, environments, ranks, settings, stores
from tests.mistakes.mistake import Mistake

THEMES: dict[str, tuple[Mistake, ...]] = {
    "calls": calls.MISTAKES,
    "ranks": ranks.MISTAKES,
    "settings": settings.MISTAKES,
    "stores": stores.MISTAKES,
    "daemons": daemons.MISTAKES,
    "commands": commands.MISTAKES,
    "environments": environments.MISTAKES,
}
MISTAKES = tuple(mistake for theme in THEMES.values() for mistake in theme)
assert len({mistake.name for mistake in MISTAKES}) == len(MISTAKES)
