"""A rank is replaced while the others keep what they have: data parallel, python examples/replace_rank.py.

A supervisor starts a rank anew when it dies, and counts generations; ranks learn that a neighbour is gone from a
collective that fails, and ask for the next generation. In it those that hold the newest step stage it, as a job of
their own; then all ranks load it, the newcomer too. Nobody goes back to an older step: a survivor gets its own bits.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import ckptd_client

RANKS, STEPS = 3, int(os.environ.get("STEPS", "100"))
PAUSE_S = float(os.environ.get("PAUSE_S", "0"))  # a step's work


def connect() -> ckptd_client.Client:
    """A client of the ranks of the present group, each of which saves its share of what all of them hold.

    It takes over from that of an earlier group, which need not be closed: so what it staged stays in memory.
    """
    replicated = ["model.*", "optimizer.*"]
    return ckptd_client.connect(job="replace-example", store="/tmp/ckpt", replicated=replicated, takeover=True)


@contextlib.contextmanager
def group(store: dist.Store, name: str, members: list[int], me: int) -> Iterator[None]:
    """A process group of these members, which ends with the block."""
    own, rank = dist.PrefixStore(name, store), members.index(me)
    dist.init_process_group("gloo", store=own, rank=rank, world_size=len(members), timeout=timedelta(seconds=30))
    try:
        yield
    finally:
        dist.destroy_process_group()


class Rank:
    """One that trains."""

    def __init__(self, me: int) -> None:
        torch.manual_seed(0)
        self.me, self.step, self.whole = me, -1, False  # step: the last one that the state holds; -1 for none
        model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.model, self.optimizer = model, optimizer
        self.state: dict[str, Any] = {"model": model, "optimizer": optimizer}

    def train(self, client: ckptd_client.Client) -> None:
        """To the end. Raises RuntimeError when a neighbour is gone; the state is that after a whole step."""
        for step in range(self.step + 1, STEPS):
            batch = torch.randn(8, 64, generator=torch.Generator().manual_seed(step * RANKS + self.me))
            self.optimizer.zero_grad()
            (self.model(batch) - batch).square().mean().backward()
            for parameter in self.model.parameters():
                dist.all_reduce(parameter.grad)
            self.optimizer.step()
            self.step = step
            print(f"rank {self.me} step {step}", flush=True)
            if step % 10 == 9:
                client.save(self.state, step)
            time.sleep(PAUSE_S)
        client.wait("durable")

    def hand_over(self, store: dist.Store, generation: int, survivors: list[int]) -> None:
        """Those of the survivors that hold the newest step stage it; a neighbour may have died between two of them."""
        store.set(f"{generation} step {self.me}", str(self.step))
        steps = {one: int(store.get(f"{generation} step {one}")) for one in survivors}
        holders = [one for one in survivors if steps[one] == max(steps.values())]
        if self.me in holders and self.step >= 0:
            with group(store, f"{generation} holders", holders, self.me):
                connect().save(self.state, self.step).wait("staged")

    def live(self, store: dist.Store, generation: int) -> None:
        """Takes part in this generation, and in those after it, until the training is done."""
        while True:
            survivors = json.loads(store.get(f"generation {generation}"))
            try:
                if self.whole:
                    self.hand_over(store, generation, survivors)
                store.wait([f"{generation} step {one}" for one in survivors])
                with group(store, f"{generation} all", [*range(RANKS)], self.me), connect() as client:
                    restored = client.load(self.state)
                    print(f"rank {self.me} had step {self.step}, has {restored}", flush=True)
                    self.step, self.whole = restored.step if restored else -1, True
                    store.set(f"whole {os.getpid()}", "")
                    return self.train(client)
            except RuntimeError as error:
                print(f"rank {self.me} after step {self.step}: {str(error).splitlines()[0]}", flush=True)
                generation += 1


def supervise() -> None:
    """Starts the ranks, and each that dies once more."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("generation 0", "[]")
    generation = 0

    def start(me: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, __file__, str(me), str(store.port), str(generation)])

    ranks = {me: start(me) for me in range(RANKS)}
    while any(process.poll() is None for process in ranks.values()):
        lost = [me for me, process in ranks.items() if process.poll()]
        if lost:
            generation += 1
            whole = [me for me in ranks if me not in lost and store.check([f"whole {ranks[me].pid}"])]
            store.set(f"generation {generation}", json.dumps(whole))
            ranks |= {me: start(me) for me in lost}
        time.sleep(0.05)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        me, port, generation = map(int, sys.argv[1:])
        Rank(me).live(dist.TCPStore("127.0.0.1", port, is_master=False), generation)
    else:
        supervise()
