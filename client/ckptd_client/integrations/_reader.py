"""A storage reader whose metadata may be asked for twice, as Megatron core does."""

from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from ckptd_client.dcp import CkptdReader


class CachedReader(CkptdReader):
    """For one load."""

    _found: Metadata | None = None

    def finds(self, save_id: str) -> bool:
        """Whether what it reads from is this save. Raises RestoreError when there is nothing. With a client a round."""
        self.read_metadata()
        if self._checkpoint is not None and self._checkpoint.save.text == save_id:
            return True
        self.close()
        return False

    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        """As CkptdReader the first time."""
        if self._found is None:
            self._found = super().read_metadata(*args, **options)
        return self._found
