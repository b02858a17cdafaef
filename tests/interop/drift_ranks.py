"""What each rank of test_drift.py runs: replicas that differ for some saves, are alike again, and differ again.

drift_ranks.py <verify_replicas> <folder> [drain_every]    writes what was true of each save, and said of it, as JSON
"""

import contextlib
import glob
import json
import os
import sys

import torch
import torch.distributed as dist
import xxhash

import ckptd_client
from ckptd.arena.ask import ask_status
from ckptd_client import SaveFailedError

SAVES = 8
DRIFTS = {4, 5, 7}  # saves of a session in which the last rank differs; save 6 is alike again
SESSIONS = 2
WHERE = ("c", 12_345)


def state_at(step, *, drifts):
    """The same on all ranks, but for one element on one that drifts."""
    generator = torch.Generator().manual_seed(step)
    shared = {name: torch.randn(20_000, generator=generator) for name in "abcdef"}
    if drifts:
        name, element = WHERE
        shared[name][element] += 1
    return {"shared": shared, "own": torch.full((7,), float(dist.get_rank()))}


def said_of(state):
    return xxhash.xxh3_64_hexdigest(b"".join(tensor.numpy().tobytes() for tensor in state["shared"].values()))


def save(client, step, *, drifts):
    state = state_at(step, drifts=drifts)
    said = [None] * dist.get_world_size()
    dist.all_gather_object(said, said_of(state))
    balanced = client._link.balance
    handle = client.save(state, step)
    with contextlib.suppress(SaveFailedError):
        handle.wait("durable", 60)
    dist.barrier()  # so that all have heard the end before the next save
    return {
        "step": step,
        "alike": len(set(said)) == 1,
        "balanced": balanced,
        "end": str(handle.end),
        "why": handle.reason,
    }


def main(verify, folder, drain_every="1"):
    options = {} if verify == "today" else {"verify_replicas": int(verify) if verify.isdigit() else verify}
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    found = []
    for session in range(SESSIONS):
        with ckptd_client.connect(
            "drift", start=False, replicated=["shared.*"], drain_every=int(drain_every), **options
        ) as client:
            for number in range(1, SAVES + 1):
                step = session * SAVES + number
                found.append(save(client, step, drifts=rank == last and number in DRIFTS))
            restored = client.load(state_at(0, drifts=False))
            client.wait("durable", 60)  # of the last, whether it was due or not
            dist.barrier()
            (job,) = ask_status(os.environ["CKPTD_ARENA"], 20.0).jobs
            found[-1]["doubted"] = [
                one.step for one in job.checkpoints if one.milestone == "durable" and one.replicas not in {"", "all"}
            ]
            found[-1]["notes"] = list(restored.notes)
            paths = glob.glob(os.path.join(os.environ["CKPTD_STORE"], "drift", "step-*"))
            read = [client.load_from(path, state_at(0, drifts=False)) for path in paths]
            doubts = ("were compared", "its replicas differed")
            found[-1]["read"] = [one.step for one in read if any(d in note for d in doubts for note in one.notes)]
    with open(os.path.join(folder, f"rank-{rank}.json"), "w", encoding="utf-8") as file:
        json.dump(found, file)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(*sys.argv[1:])
    print(f"rank {dist.get_rank()} did it")
    dist.barrier()
    dist.destroy_process_group()
