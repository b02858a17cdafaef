"""Plug-ins for torch.distributed.checkpoint (DCP): a writer, a reader, and a stager for one-copy asynchronous saves.

What CkptdWriter writes is an ordinary ckptd checkpoint: ``Client.load``, safetensors, and ``dcp.load`` with and without
CkptdReader read it. docs/dcp.md has a complete example.
"""

from ckptd_client.dcp._reader import CkptdReader
from ckptd_client.dcp._stager import CkptdStager
from ckptd_client.dcp._writer import CkptdWriter

__all__ = ["CkptdReader", "CkptdStager", "CkptdWriter"]
