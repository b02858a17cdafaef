"""A committed checkpoint as files that other programs open: whole tensors, put together from the boxes of all ranks.

Reads the store alone: no daemon, no torch, no pickle. Every byte is checked against its digest before it is written.
"""
