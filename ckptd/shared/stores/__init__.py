"""Committed checkpoints opened for reading, on whatever store they are."""
