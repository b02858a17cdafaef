"""Offline work on committed checkpoints: verify, repair, export, finish."""
