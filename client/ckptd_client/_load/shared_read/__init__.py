"""Ranks and nodes that read one checkpoint together, each block once."""
