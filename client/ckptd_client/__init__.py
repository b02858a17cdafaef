"""The training side of ckptd: ``connect`` to this node's daemon, then ``save`` and ``load``."""

import ckptd_client._torch_needed  # noqa: F401 - before all that needs it
from ckptd.protocol.errors import (
    BudgetError,
    CkptdError,
    ConfigError,
    ConnectError,
    DamagedError,
    GatherError,
    MismatchError,
    RestoreError,
    SaveFailedError,
    UsageError,
    WaitTimeoutError,
)
from ckptd_client._connecting import connect
from ckptd_client._leaves import register
from ckptd_client._restored import Restored
from ckptd_client._stats import Stats
from ckptd_client.client import Client
from ckptd_client.gathering import FlatPart, Gathering
from ckptd_client.handle import SaveHandle

__all__ = [
    "BudgetError",
    "CkptdError",
    "Client",
    "ConfigError",
    "ConnectError",
    "DamagedError",
    "FlatPart",
    "GatherError",
    "Gathering",
    "MismatchError",
    "RestoreError",
    "Restored",
    "SaveFailedError",
    "SaveHandle",
    "Stats",
    "UsageError",
    "WaitTimeoutError",
    "connect",
    "register",
]
