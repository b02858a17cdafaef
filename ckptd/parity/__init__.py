"""Redundancy of the nodes of a set: the code, what to pull for it, encode and rebuild."""
