"""A module for each trainer that bench.frameworks measures: what it saves by itself, and what it saves through ckptd.

Each has NEEDS, what pip calls its framework ("" for torch alone), and functions (nbytes, folder, measure), which run on
all ranks, beside a daemon: they make a training of that trainer, and call measure with each pair of ways to save its
state, where the trainer would save. TRAININGS names them all.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

TRAININGS = (
    "deepspeed.zero2",
    "lightning.ddp",
    "lightning.fsdp2",
    "huggingface.trainer",
    "huggingface.accelerate",
    "megatron.core",
    "fsdp2.loop",
)


@dataclass(frozen=True, slots=True)
class Way:
    """One way to save. save: (step) -> seconds of delay of training. settle: waits for the disk, not counted.

    settle may delay training too, as the end of an asynchronous save does: it returns those seconds.
    """

    name: str
    save: Callable[[int], float]
    settle: Callable[[], float]


@dataclass(frozen=True, slots=True)
class Pair:
    """A row: the framework's own way, and ours."""

    framework: str
    own: Way
    ours: Way


Measure = Callable[[Pair], None]


def timed(call: Callable[[], object]) -> float:
    """Seconds of the call."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def at_once() -> float:
    """For a way whose save ends with its call."""
    return 0.0
