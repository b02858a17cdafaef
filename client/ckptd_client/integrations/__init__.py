"""ckptd under other programs' trainers: a module for each, to be imported by its name. Nothing is imported here.

``megatron``: save and load strategies for Megatron core.

Each module can be imported without its framework; what it offers then raises UsageError, with what to install.
"""
