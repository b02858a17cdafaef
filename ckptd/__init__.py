"""ckptd: the per-node checkpoint daemon. Holds the version and imports nothing."""

__version__ = "0.1.0"
_OF_THE_CLIENT = frozenset({"Client", "SaveHandle", "UsageError", "connect", "load", "register", "save"})


def __getattr__(name: str) -> object:
    """Raises AttributeError; for what a training looks for here, with where it is."""
    text = f"module 'ckptd' has no attribute {name!r}"
    if name in _OF_THE_CLIENT:
        text += ": this is the daemon's package; a training imports the other one: import ckptd_client"
    raise AttributeError(text)
