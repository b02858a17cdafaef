"""Storage readers for trainers' own loaders, which ask for the metadata twice, or load in several steps."""

import contextlib
import os
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from ckptd.protocol.errors import RestoreError
from ckptd.protocol.ids import SaveId
from ckptd.protocol.manifest import COMMITTED
from ckptd.protocol.origin import Origin
from ckptd_client.client import Client
from ckptd_client.dcp import CkptdReader


class CachedReader(CkptdReader):
    """Of one checkpoint, found once: its metadata may be asked for, and its data read, until close."""

    _found: Metadata | None = None

    def finds(self, save: SaveId) -> bool:
        """Whether what it reads from is this save. Raises RestoreError when there is nothing. With a client a round."""
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

    Begins a new incarnation.
    """
    with contextlib.suppress(RestoreError):
        reader = CachedReader(client, step=origin.save.step)
        if reader.finds(origin.save):
            return reader
    if os.path.exists(os.path.join(origin.path, COMMITTED)):
        reader = CachedReader(origin.path)
        if reader.finds(origin.save):
            return reader
    return None
