"""What a trainer's own loader would read in ckptd's place: ckptd does not check it, so with a key it is refused."""

import os
from collections.abc import Callable, Iterable

from ckptd.shared.base.errors import IntegrityError, RestoreError
from ckptd.shared.format.origin import MARKER
from ckptd_client._load.files import RestoredFiles
from ckptd_client.client import Client, staging_of

_HINT = (
    "if you trust who could write it: integrity='xxh3' among ckptd's settings (CKPTD_INTEGRITY=xxh3), and a daemon "
    "without a key; or load it without ckptd"
)


def is_keyed(client: Client) -> bool:
    """Whether only what is proved with a key may be loaded."""
    return staging_of(client).integrity.keyed


def check_unproved(client: Client, where: str, why: str) -> None:
    """To be called before a trainer's own loader gets, from where, what ckptd would not read. why: it would not.

    Raises IntegrityError for a client with a key: the bytes are the same, and a person who could have ckptd refuse them
    could have written them. All ranks call it alike.
    """
    if is_keyed(client):
        text = f"{where} is not loaded as it lies there, since nothing proves it, and this client has a key: {why}"
        raise IntegrityError(text, hint=_HINT)


def find_saved(
    client: Client, steps: Iterable[int], is_it: Callable[[RestoredFiles], bool]
) -> tuple[RestoredFiles | None, str]:
    """The first of the steps' files that are the ones; and why something was refused on the way, empty if nothing was.

    No steps: then the newest is asked for, which says why there is none. Collective; steps are the same on all ranks.
    """
    refused = ""
    listed: list[int | None] = [*steps]
    for step in listed or [None]:
        try:
            files = client.load_files(step)
        except RestoreError as error:  # it went meanwhile, or cannot be read
            refused = refused or error.message
            continue
        if files is not None and is_it(files):
            return files, refused
        if files is not None:
            refused = refused or "; ".join(files.notes)
            files.close()
    return None, refused


def was_ours(directory: str) -> str:
    """Why a directory that ckptd published is no other's, though nothing is found of it; empty for another's."""
    return "ckptd published it, and has it no more" if os.path.lexists(os.path.join(directory, MARKER)) else ""
