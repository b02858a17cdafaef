"""What each rank of test_kinds.py runs: a value that was a tensor on some ranks and none on others, saved and loaded.

Beside it lies a tensor that all ranks hold alike, so that each rank reads the images of all.
"""

import torch
import torch.distributed as dist

import ckptd_client


class EarlyStop:
    """Its best value is None until there is one."""

    def __init__(self, best):
        self.best = best

    def state_dict(self):
        return {"best": self.best}

    def load_state_dict(self, state):
        self.best = state["best"]


dist.init_process_group("gloo")
rank = dist.get_rank()
with ckptd_client.connect("kinds", start=False, replicated=["w"]) as client:
    stop = EarlyStop(torch.full((1,), float(rank)) if rank else None)
    client.save({"w": torch.arange(1000.0), "stop": stop}, 1).wait("durable", 60)
    dist.barrier()
    fresh = EarlyStop(None)
    client.load({"w": torch.zeros(1000), "stop": fresh})
    assert (fresh.best.item() if fresh.best is not None else None) == (rank or None), fresh.best
    dist.barrier()
    print("kept its own", flush=True)
dist.destroy_process_group()
