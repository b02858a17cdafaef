"""."""

MISTAKES = ()
