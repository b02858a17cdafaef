"""Storage readers for trainers' own loaders, which ask for the metadata twice, or load in several steps."""

import os
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from ckptd.shared.base.errors import RestoreError
from ckptd.shared.base.ids import SaveId
from ckptd.shared.format.manifest import COMMITTED
from ckptd.shared.format.origin import MARKER, Origin
from ckptd_client.client import Client
from ckptd_client.dcp import CkptdReader
from ckptd_client.integrations._kit.drafts import origin_of
from ckptd_client.integrations._kit.unproved import check_unproved


class CachedReader(CkptdReader):
    """Of one checkpoint, found once: its metadata may be asked for, and its data read, until close.

    A client's, which says how all that is read is proved: of a step of its job, or of a directory.
    """

    _found: Metadata | None = None

    def __init__(self, client: Client, *, step: int | None = None, directory: str | None = None) -> None:
        super().__init__(client, step=step)
        self._directory = directory

    def finds(self, save: SaveId) -> bool:
        """Whether what it reads from is this save. Raises RestoreError when there is nothing; of a step a round.

        Of a directory it raises UsageError, DamagedError, OSError too.
        """
        self.read_metadata()
        if self._checkpoint is not None and self._checkpoint.save == save:
            return True
        self.close()
        return False

    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        """As CkptdReader the first time."""
        if self._found is None:
            self._found = super().read_metadata(*args, **options)
        return self._found

    def _read_to_the_end(self) -> None:
        """More may be asked for."""


def reader_of(client: Client, origin: Origin) -> CachedReader | None:
    """Of the checkpoint, by the nearest route, memory first; None when ckptd has it no more. Collective.

    Begins a new incarnation. Raises IntegrityError instead of None for a client with a key: the trainer's directory
    may have the same bytes, and nothing proves them.
    """
    refusal = "ckptd has it no more"
    try:
        reader = CachedReader(client, step=origin.save.step)
        if reader.finds(origin.save):
            return reader
    except RestoreError as error:  # it is no more; or memory could not be read, and the directory says what is wrong
        refusal = error.message
    if os.path.exists(os.path.join(origin.path, COMMITTED)):
        reader = CachedReader(client, directory=origin.path)
        if reader.finds(origin.save):
            return reader
    check_unproved(client, f"what was saved as {origin.path}", refusal)
    return None


def reader_for(client: Client, directory: str) -> CachedReader | None:
    """As reader_of, of what was promised of a trainer's directory; None too where nothing was. Collective."""
    origin = origin_of(directory)
    if origin is not None:
        return reader_of(client, origin)
    if os.path.lexists(os.path.join(directory, MARKER)):
        check_unproved(client, directory, f"{MARKER} names no checkpoint, or something was saved over it")
    return None
