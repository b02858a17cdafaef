"""Benchmarks: ckptd, its yardsticks and its peers, measured in one run. ``python -m bench`` runs them all."""
