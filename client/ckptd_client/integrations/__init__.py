"""ckptd under other programs' trainers: a module for each, to be imported by its name. Nothing is imported here.

``deepspeed``: what puts ckptd under an engine.
``lightning``, ``lightning_sharded``: a CheckpointIO, strategies whose ranks save shards.
``hf``, ``accelerate``: a mixin for Hugging Face's Trainer, an Accelerator whose save_state stages.
``megatron``: save and load strategies for Megatron core.

Each module can be imported without its framework; what it offers then raises UsageError, with what to install.
"""
