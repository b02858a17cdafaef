"""A checkpoint on the store mended from the parity beside it: ``ckptd rebuild``."""
