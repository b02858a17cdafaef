"""What each rank of test_kinds.py runs: DDP with a communication hook under which parameters differ by design."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as local_sgd
from torch.nn.parallel import DistributedDataParallel

import ckptd_client

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(64, 64))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
alone, _ = dist.new_subgroups(1)
state = local_sgd.PostLocalSGDState(
    process_group=None, subgroup=alone, start_localSGD_iter=2, post_local_gradient_allreduce=False
)
model.register_comm_hook(state, local_sgd.post_localSGD_hook)
with ckptd_client.connect("local", start=False, drain_every=1) as client:
    for step in range(5):
        torch.manual_seed(10 * step + rank)
        optimizer.zero_grad()
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
        client.save({"model": model, "optimizer": optimizer}, step).wait("durable", 60)
        dist.barrier()
    print("all durable", flush=True)
dist.destroy_process_group()
