"""Plug-ins for torch.distributed.checkpoint (DCP): writer, reader, save planner, stager for saves in one copy.

What CkptdWriter writes is an ordinary ckptd checkpoint: ``Client.load``, safetensors, and ``dcp.load`` with and without
CkptdReader read it. docs/dcp.md has a complete example.
"""

from ckptd_client.dcp._boxes import CkptdSavePlanner
from ckptd_client.dcp._reader import CkptdReader
from ckptd_client.dcp._stager import CkptdStager
from ckptd_client.dcp._writer import CkptdWriter, refuse_process_saves

refuse_process_saves()

__all__ = ["CkptdReader", "CkptdSavePlanner", "CkptdStager", "CkptdWriter"]
