"""What a directory or file of another program holds, in the terms in which ckptd fits a checkpoint onto a state."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ckptd.shared.format.layout import Path
from ckptd_client._load.reader import Target
from ckptd_client._state.reshard import Saved


@dataclass(slots=True)
class Foreign:
    """Tensors by name, each in boxes of numbered sources; how to read those; values that are no tensors."""

    kind: str
    boxes: dict[str, list[Saved]] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)
    sources: list[Callable[[list[Target]], None]] = field(default_factory=list)  # fills targets from source i
    values: dict[str, Callable[[], Any]] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)  # name to what it is: matters only if the state wants it
