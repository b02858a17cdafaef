"""What each rank of test_per_rank.py runs: loads what there is, tells what it got, and saves it again.

per_rank_ranks.py <job> <step> <folder> <patterns, joined by commas> <tier>

tier arena: it ends without a close, as in a crash, so that memory keeps what was saved.

Run by tests/interop/launch.py on CPUs.
"""

import json
import os
import sys

import torch

import ckptd_client


def main():
    job, step, folder, patterns, tier = sys.argv[1:]
    rank = int(os.environ["RANK"])
    state = {"w": torch.zeros(1000), "rng": torch.full((4,), 20 * int(step) + rank, dtype=torch.uint8), "epoch": 0}
    with ckptd_client.connect(job, start=False, per_rank=patterns.split(",") if patterns else ()) as client:
        restored = client.load(state)
        found = {
            "rng": state["rng"].tolist(),
            "notes": restored.notes if restored else None,
            "tier": restored.tier if restored else "",
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
