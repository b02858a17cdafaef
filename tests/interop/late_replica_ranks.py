"""Ranks that hold the same parameters, and read and copy them while training goes on. See test_late_replicas."""

import sys
import time

import torch
import torch.distributed as dist

import ckptd_client
from ckptd_client import SaveFailedError
from ckptd_client._local.late_memory import late_memory
from ckptd_client._state.replica_digests import WholeDigest

COUNT = 6 << 20  # elements
WRITTEN = 4  # the step whose parameters somebody writes to
take_late = WholeDigest.take_late


class Reading:
    """What digests read late, by step; slowly, so that somebody can write meanwhile."""

    def __init__(self):
        self.step, self.nbytes = 0, {}

    def __get__(self, digest, _owner):
        """In the place of WholeDigest.take_late."""
        return lambda: self.take_late(digest)

    def take_late(self, digest):
        nbytes = sum(found.stop - found.start for _, found in digest.late)
        if nbytes:
            self.nbytes[self.step] = nbytes
            time.sleep(0.5)
        take_late(digest)


def main(what):
    rank, reading = dist.get_rank(), Reading()
    WholeDigest.take_late = reading
    weight = torch.nn.Parameter(torch.zeros(COUNT))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    weight.grad = torch.ones_like(weight)
    with ckptd_client.connect("late", start=False, replicated=["*"]) as client:
        client.attach(optimizer)
        for step in range(1, 7):
            reading.step = step
            handle = client.save({"w": weight}, step)
            if what == "written" and step == WRITTEN and rank == 1:
                others = weight.data.numpy()[: COUNT // 2]  # what rank 0 copies, and this one only reads
                others += 1
                others -= 1
            optimizer.step()
            try:
                handle.wait("durable", 60)
                end = "durable"
            except SaveFailedError:
                end = handle.reason
            # In one piece: print writes the end of the line by itself, and another rank's line may come between.
            print(f"rank {rank} step {step} late {reading.nbytes.get(step, 0)}: {end}\n", end="", flush=True)
            while late_memory().busy:
                time.sleep(0.05)
            dist.barrier()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(*sys.argv[1:])
    dist.barrier()
    dist.destroy_process_group()
