"""``python -m bench.rank KIND``: one rank of one row; bench.launch starts it. Its result is JSON."""

import argparse
import contextlib
import dataclasses
import json
import time
from pathlib import Path

import torch
import torch.distributed as dist

from bench import states
from bench.loop import Loop
from bench.peers import KINDS, Place
from bench.training import Touching, Training

_CALM_S = 0.5  # for the measurement of the machine's memory


def main() -> None:
    """Builds its part of the state, saves it in a training loop, writes what that cost to the result file."""
    options = _options()
    torch.set_num_threads(options.threads)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    state = {f"rank{rank}": states.realistic(options.nbytes // world_size)}  # in DCP one key is one tensor of the job
    optimizer = Touching(states.tensors(state))
    loop = Loop(state, Training(), optimizer)
    kind = next(kind for kind in KINDS if kind.name == options.kind)
    dist.barrier()
    time.sleep(_CALM_S)
    began = time.monotonic()
    with contextlib.closing(kind.make(Place(rank, world_size, options.shm, options.disk, optimizer))) as peer:
        peer.prepare(state)
        saves = loop.run(peer, 1 + options.repeat)
        ended = time.monotonic()
        time.sleep(_CALM_S)
        dist.barrier()
    found = {"began": began, "ended": ended, "saves": [dataclasses.asdict(save) for save in saves]}
    options.result.with_suffix(f".{rank}").write_text(json.dumps(found))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.rank", description=__doc__)
    parser.add_argument("kind")
    parser.add_argument("--nbytes", type=int, required=True, help="of the states of all ranks")
    parser.add_argument("--repeat", type=int, required=True, help="saves after the first")
    parser.add_argument("--threads", type=int, required=True)
    for place in ("shm", "disk", "result"):
        parser.add_argument(f"--{place}", type=Path, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
