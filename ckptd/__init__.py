"""ckptd: the per-node checkpoint daemon. Holds the version and imports nothing."""

__version__ = "0.1.0"
