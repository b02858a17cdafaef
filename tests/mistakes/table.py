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

# Other ways to the message of one that stays, and what Python says by itself, where interpreters import all of torch:
# `make test` leaves them to `make mistakes` and `make faults`.
_VARIANTS = """
    step-float step-negative step-text load-model-instead-of-dict open-file-in-state generator-in-state meta-tensor
    nested-tensor quantized-tensor store-per-rank redundancy-per-rank gather-otherwise job-with-space job-is-a-number
    job-is-a-path store-is-a-number drain-every-minutes drain-every-float drain-every-none drain-every-nan
    drain-every-true drain-every-huge redundancy-false set-size-1 save-timeout-text save-timeout-nan
    connect-timeout-negative connect-timeout-text store-id-short config-wrong-type image-removed image-cut-off
    loop-cell-run-twice no-guard-around-spawn spawned-ranks-without-a-group optimised-away
    run-flag-of-text run-config-missing run-config-not-toml export-nowhere publish-nothing
    load-after-with wait-after-close other-dtype new-layer step-nan own-class-in-state prepare-too-large-a-state
    rank-0-saves-once-and-trains-on rank-0-prepares world-size-is-empty empty-job store-tilde balance-misspelt
    another-store-of-another-job-at-the-path committed-removed run-config-key-misspelt variable-misspelt-on-command
"""
VARIANTS = frozenset(_VARIANTS.split())
assert {mistake.name for mistake in MISTAKES} >= VARIANTS
