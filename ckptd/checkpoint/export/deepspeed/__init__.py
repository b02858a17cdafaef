"""A ZeRO checkpoint of DeepSpeed's as a source of the export: its ranks' flat partitions as boxes of named tensors.

Reads the files that the stock engine writes, and ckptd under it, without torch, DeepSpeed or an unpickler.
"""
