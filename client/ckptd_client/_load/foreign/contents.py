"""The contents of another program's checkpoint, in the form in which ckptd fits a checkpoint to a state."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ckptd.shared.format.layout import Path
from ckptd_client._load.reader import Target
from ckptd_client._state.reshard import Saved


@dataclass(slots=True)
class Foreign:
    """Tensors by name, in boxes of numbered sources; functions that read the sources; plain values."""

    kind: str
    boxes: dict[str, list[Saved]] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)
    sources: list[Callable[[list[Target]], None]] = field(default_factory=list)  # fills targets from source i
    values: dict[str, Callable[[], Any]] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)  # name to reason: an error only if the state wants it
