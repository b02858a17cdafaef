"""Which settings and variables there are."""
