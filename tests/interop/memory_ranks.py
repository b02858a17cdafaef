"""What each rank of test_from_memory.py runs: checkpoints of every way to shard, of which the store gets none.

memory_ranks.py save <folder> <milestone> <tags> <kinds>          each kind, as a job of each tag
memory_ranks.py load <folder> <tag> <layout> <tiers> <kinds>     those, compared to the bit

Tags, tiers of ranks and kinds are joined by commas, tiers of which each may be by bars. Run by
tests/interop/launch.py on CPUs with gloo.
"""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from ckptd_client.dcp import CkptdReader, CkptdSavePlanner, CkptdWriter
from tests.interop import balance_ranks, box_ranks, mesh_ranks
from tests.interop import ranks as stock_ranks
from tests.interop.off_store import STEP, connect, keep_off_the_store
from tests.interop.rank_program import carry_out
from tests.unit.client.same import difference

# --- of each kind: a state and what it is as a whole, and the same in another layout to be filled


def own_of(ranks):
    """Whose own values this rank gets of that many."""
    return dist.get_rank() if dist.get_rank() < ranks else 0


class Mesh:
    """FSDP2 over tensor parallelism, HSDP or DDP: uneven, empty, strided, replicated."""

    def __init__(self, kind, layout, seed):
        self.trainer = mesh_ranks.Trainer(layout if seed > 1 else kind, seed)
        self.state = self.trainer.state()

    def reference(self):
        return self.trainer.reference()

    def check(self, reader, whole):
        assert mesh_ranks.check(reader, self.state, whole) == set(whole)
        assert self.state["own"]["param_groups"][0]["lr"] == 0.01


class Boxes(Mesh):
    """Shards of several boxes, in a state for DCP."""

    def __init__(self, kind, layout, seed):
        self.state, self.whole = box_ranks.state_of(seed)

    def reference(self):
        return self.whole


class Stock:
    """FSDP2 that was trained, with what every rank has of its own."""

    def __init__(self, kind, layout, seed):
        trainer = stock_ranks.Trainer("fsdp" if seed == 1 else layout, seed)
        for _ in range(2 if seed == 1 else 0):
            trainer.step()
        self.state = trainer.state(seed)

    def reference(self):
        per_rank = [None] * dist.get_world_size()
        dist.all_gather_object(per_rank, stock_ranks.whole(self.state))
        return per_rank

    def check(self, reader, per_rank):
        mine = stock_ranks.own(per_rank) if reader.endswith("CkptdReader") else [per_rank[own_of(len(per_rank))]]
        assert stock_ranks.check(reader, self.state, mine) == set(per_rank[0])


class Shares:
    """DDP and AdamW as objects: each replica saves its share."""

    def __init__(self, kind, layout, seed):
        self.training = balance_ranks.Training(seed)
        self.training.step()
        self.state = self.training.state()

    def reference(self):
        return {name: value for name, value in self.training.plain().items() if name != "own"}

    def check(self, reader, whole):
        found = self.training.plain()
        assert not difference(whole["optimizer"], found["optimizer"]), reader
        for name, value in whole["model"].items():
            if "running" not in name:  # every rank's own
                assert not difference(value, found["model"][name]), (reader, name)
        assert found["own"].tolist() == [own_of(4)] * 5, reader


MAKE = {"boxes": Boxes, "stock": Stock, "shares": Shares}


def made(kind, layout, seed):
    return MAKE.get(kind, Mesh)(kind, layout, seed)


# --- the two commands


def save(folder, milestone, tags, kinds):
    for kind in kinds.split(","):
        one = made(kind, "", 1)
        reference = one.reference()
        if dist.get_rank() == 0:
            torch.save(reference, f"{folder}/{kind}.pt")
        for tag in tags.split(","):
            client = connect(f"{kind}-{tag}")
            client.save({"first": torch.zeros(3)}, 1).wait("durable", 60)  # the cadence counts from here
            if dist.get_rank() == 0:
                keep_off_the_store(client, f"{kind}-{tag}")
            if kind == "boxes":
                writer = CkptdWriter(client, wait=milestone)
                dcp.save(one.state, storage_writer=writer, planner=CkptdSavePlanner(), checkpoint_id=f"step-{STEP}")
            else:
                client.save(one.state, STEP).wait(milestone, 60)


def load(folder, tag, layout, tiers, kinds):
    tier = tiers.split(",")[dist.get_rank()]
    for kind in kinds.split(","):
        if kind == "boxes" and 8 % dist.get_world_size():
            continue  # its columns are eight
        whole = torch.load(f"{folder}/{kind}.pt", weights_only=False)
        client = connect(f"{kind}-{tag}")
        one = made(kind, layout, 2)
        restored = client.load(one.state)
        assert restored.step == STEP, (kind, restored)
        assert restored.tier in tier.split("|"), (kind, restored)
        one.check(f"{kind}: client.load", whole)
        print(f"rank {dist.get_rank()} has {kind}", flush=True)  # for a test that fails in what follows
        if kind == "shares":  # Statefuls, which DCP's readers do not take
            continue
        one, reader = made(kind, layout, 2), CkptdReader(client)
        dcp.load(one.state, storage_reader=reader)
        assert (reader.step, reader.tier == "pfs") == (STEP, False), (kind, reader.tier)
        one.check(f"{kind}: CkptdReader", whole)


if __name__ == "__main__":
    carry_out({"save": save, "load": load})
