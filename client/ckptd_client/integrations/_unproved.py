"""What a trainer's own loader would read in ckptd's place: nobody checks it, so with a key it is refused."""

from ckptd.protocol.errors import IntegrityError
from ckptd_client import _segments as segments
from ckptd_client.client import Client

_HINT = (
    "if you trust who could write it: integrity='xxh3' among ckptd's settings (CKPTD_INTEGRITY=xxh3), and a daemon "
    "without a key; or load it without ckptd"
)


def is_keyed(client: Client) -> bool:
    """Whether only what is proved with a key may be loaded."""
    return segments.integrity_of(client).keyed


def check_unproved(client: Client, where: str, why: str) -> None:
    """To be called before a trainer's own loader gets, from where, what ckptd would not read. why: it would not.

    Raises IntegrityError for a client with a key: the bytes are the same, and whoever could have ckptd refuse them
    could have written them. All ranks call it alike.
    """
    if is_keyed(client):
        text = f"{where} is not loaded as it lies there, since nothing proves it, and this client has a key: {why}"
        raise IntegrityError(text, hint=_HINT)
