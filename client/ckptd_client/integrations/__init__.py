"""ckptd under other programs' trainers: a module for each, to be imported by its name. Nothing is imported here.

``megatron``: save and load strategies for Megatron core.
``hf``, ``accelerate``: a mixin for Hugging Face's Trainer, an Accelerator whose save_state stages.

Each module can be imported without its framework; what it offers then raises UsageError, with what to install.
"""
