"""What a user gives to an integration, for connect."""

import difflib
import inspect
from collections.abc import Mapping
from typing import Any

from ckptd.shared.base.errors import UsageError
from ckptd_client._connect import connect
from ckptd_client.client import Client


def connect_with(options: Mapping[str, Any], **more: Any) -> Client:
    """connect(**options, **more). Raises UsageError for a name that connect does not take, and what connect raises."""
    known = list(inspect.signature(connect).parameters)
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            raise UsageError(f"{name!r} is no option of ckptd", hint=f"{near[0]}?" if near else ", ".join(known))
    return connect(**options, **more)
