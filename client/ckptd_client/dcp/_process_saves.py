"""dcp.async_save in DCP's own background process: refused at the call, not by a thread that cannot pickle it."""

import functools
from typing import Any

from ckptd.shared.base.errors import UsageError
from ckptd_client.dcp._writer import CkptdWriter


def refuse_process_saves() -> None:
    """From now on such a call with a CkptdWriter raises UsageError. Releases of torch without that process: nothing."""
    try:
        from torch.distributed.checkpoint import _async_process_executor as executors  # noqa: PLC0415
    except ImportError:
        return
    kind = getattr(executors, "_ProcessBasedAsyncCheckpointExecutor", None)
    plain = getattr(kind, "execute_save", None)
    if kind is None or plain is None or getattr(plain, "refuses_ckptd", False):
        return

    @functools.wraps(plain)
    def execute_save(self: Any, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(given, CkptdWriter) for given in (*args, *kwargs.values())):
            text = "async_save with AsyncCheckpointerType.PROCESS gives the CkptdWriter to another process, "
            text += "and a client is of the process that connected"
            hint = "leave async_checkpointer_type out: ckptd's daemon is the process that drains while training goes on"
            raise UsageError(text, hint=hint)
        return plain(self, *args, **kwargs)

    execute_save.refuses_ckptd = True  # type: ignore[attr-defined]
    kind.execute_save = execute_save
