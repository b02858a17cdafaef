"""A checkpoint as files that other programs open: whole tensors, put together from the boxes of all ranks.

Reads the store alone: no daemon, no torch, no pickle. Every byte is checked against its digest before it is written;
those of DeepSpeed's files, which have none, against the CRCs that torch took, before what was written gets its name.
"""
