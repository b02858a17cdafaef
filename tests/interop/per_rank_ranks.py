"""What each rank of test_per_rank.py runs: loads what there is, tells what it got, and saves it again.

per_rank_ranks.py <job> <step> <folder> <patterns, joined by commas> <tier> [more]

tier arena: it ends without a close, as in a crash, so that memory keeps what was saved. tier load_from: by that call.
more: the state has tensors of other kinds, too.

Run by tests/interop/launch.py on CPUs.
"""

import json
import os
import sys

import torch

import ckptd_client


def main():
    job, step, folder, patterns, tier, *more = sys.argv[1:]
    rank = int(os.environ["RANK"])
    state = {"w": torch.zeros(1000), "rng": torch.full((4,), 20 * int(step) + rank, dtype=torch.uint8), "epoch": 0}
    if more:
        number = 20 * int(step) + rank
        state |= {"count": torch.tensor(number), "noise": torch.full((70,), number / 3), "alike": torch.arange(9)}
        state |= {"longer": torch.zeros(5)} if rank == 1 else {}  # so that the next ones lie elsewhere
        state |= {"mask": torch.tensor([True, rank > 0]), "half": torch.ones(3, dtype=torch.bfloat16)}
    with ckptd_client.connect(job, start=False, per_rank=patterns.split(",") if patterns else ()) as client:
        latest = os.path.join(folder, job, "latest")
        if tier != "load_from":
            restored = client.load(state)
        else:
            restored = client.load_from(latest, state) if os.path.lexists(latest) else None
        found = {
            "rng": state["rng"].tolist(),
            "count": int(state["count"]) if more else None,
            "noise": state["noise"].tolist() if more else None,
            "notes": restored.notes if restored else None,
            "tier": getattr(restored, "tier", ""),
        }
        with open(os.path.join(folder, f"{step}-{rank}.json"), "w", encoding="utf-8") as file:
            json.dump(found, file)
        handle = client.save(state, int(step))
        handle.wait("staged", 60)
        if tier == "arena":
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
        handle.wait("durable", 60)


main()
