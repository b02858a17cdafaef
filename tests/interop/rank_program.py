"""How a script that runs on several ranks carries out the command of its arguments."""

import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist


def carry_out(commands: Mapping[str, Callable[..., Any]], backend: str = "gloo") -> None:
    """The command of the first argument with the others, in a process group. Does not return: the process ends."""
    dist.init_process_group(backend)
    command, *args = sys.argv[1:]
    commands[command](*args)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # FSDP2 with gloo now and then aborts at the end of the interpreter, when all is done
