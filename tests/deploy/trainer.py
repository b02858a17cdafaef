"""A training for the ways to start one. Prints where it begins, and each save.

Usage: trainer.py UNTIL; a file, at whose appearance all ranks die without a word, or how many steps before that;
"close:COUNT" closes after so many steps, as a training that is done. TRAINER_NUMBERS: how many float32 it saves.
"""

import os
import sys
import time

import torch
import torch.distributed as dist

import ckptd_client


def main() -> None:
    until = sys.argv[1]
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        dist.init_process_group("gloo")
    state = {"weight": torch.zeros(int(os.environ.get("TRAINER_NUMBERS", "100000")))}
    client = ckptd_client.connect(os.environ.get("CKPTD_JOB", "job"), drain_every=1000)
    restored = client.load(state)
    first = restored.step + 1 if restored else 0
    assert state["weight"].eq(first).all(), "not what was saved at this step"
    print(f"from step {first}, {restored.tier if restored else 'anew'}", flush=True)
    many = int(until.removeprefix("close:")) if until.removeprefix("close:").isdigit() else sys.maxsize
    for step in range(first, first + many):
        state["weight"] += 1
        client.save(state, step).wait("protected" if world_size > 1 else "staged", timeout_s=30)
        print(f"saved {step}", flush=True)
        if seen_by_rank_0(os.path.exists(until), world_size):
            break
        time.sleep(0.1)
    if not until.startswith("close:"):
        if "mpi4py.MPI" in sys.modules:
            sys.modules["mpi4py.MPI"].Finalize()  # else it leaves files in /dev/shm
        os._exit(1)
    client.wait("durable", timeout_s=60)
    client.close()
    print("closed", flush=True)


def seen_by_rank_0(there: bool, world_size: int) -> bool:
    """The same on all ranks: all end after the same step."""
    seen = torch.tensor([int(there)])
    if world_size > 1:
        dist.broadcast(seen, src=0)
    return bool(seen)


if __name__ == "__main__":
    main()
