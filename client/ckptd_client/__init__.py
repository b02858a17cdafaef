"""The training side of ckptd: ``connect`` to this node's daemon, then ``save`` and ``load``."""

import ckptd_client._local.torch_needed  # noqa: F401 - before all that needs it
from ckptd import __version__
from ckptd.shared.base.errors import (
    BudgetError,
    CkptdError,
    ConfigError,
    ConnectError,
    DamagedError,
    GatherError,
    IntegrityError,
    MismatchError,
    PeerError,
    ProtocolError,
    RestoreError,
    SaveFailedError,
    StaleIncarnationError,
    UsageError,
    WaitTimeoutError,
    WrongStoreError,
)
from ckptd.shared.base.ids import SaveId
from ckptd.shared.protocol.messages import End, Milestone
from ckptd_client._connect import connect
from ckptd_client._gather import FlatPart, Gathering
from ckptd_client._load.files import RestoredFiles
from ckptd_client._load.foreign.load_from import Loaded
from ckptd_client._load.restored import Restored
from ckptd_client._local.rank import Group
from ckptd_client._save.stats import Stats
from ckptd_client._state.leaves import register
from ckptd_client.client import Client
from ckptd_client.files import SafetensorsFile, TorchFile
from ckptd_client.handle import SaveHandle

__all__ = [
    "BudgetError",
    "CkptdError",
    "Client",
    "ConfigError",
    "ConnectError",
    "DamagedError",
    "End",
    "FlatPart",
    "GatherError",
    "Gathering",
    "Group",
    "IntegrityError",
    "Loaded",
    "Milestone",
    "MismatchError",
    "PeerError",
    "ProtocolError",
    "RestoreError",
    "Restored",
    "RestoredFiles",
    "SafetensorsFile",
    "SaveFailedError",
    "SaveHandle",
    "SaveId",
    "StaleIncarnationError",
    "Stats",
    "TorchFile",
    "UsageError",
    "WaitTimeoutError",
    "WrongStoreError",
    "__version__",
    "connect",
    "register",
]

for _name in __all__:  # a traceback names an error as a user imports it
    _public = globals()[_name]
    if isinstance(_public, type) and issubclass(_public, CkptdError):
        _public.__module__ = __name__


def __dir__() -> list[str]:
    """What is public, and nothing else."""
    return sorted(__all__)
