"""FSDP2 with ckptd: torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/fsdp2.py.

When a rank dies torchrun starts all of them again; they go on, from memory, after the last step that was saved.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ckptd_client

STEPS, LENGTH, WIDTH = int(os.environ.get("STEPS", "100")), 64, 128


def main() -> None:
    """Trains a small model of the bytes of a text."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    rank, mesh = dist.get_rank(), init_device_mesh(device, (dist.get_world_size(),))

    torch.manual_seed(0)  # the same weights on all ranks, of which each keeps its shards
    blocks = [nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True) for _ in range(2)]
    model = nn.Sequential(nn.Embedding(256, WIDTH), *blocks, nn.Linear(WIDTH, 256)).to(device)
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    with open(os.__file__, "rb") as file:  # a text that every machine has
        text = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8).long().to(device)

    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    with ckptd_client.connect(job="fsdp2-example", store="/tmp/ckpt") as client:
        client.attach(optimizer)  # only its step() writes to parameters and moments: they are copied late
        restored = client.load(state)
        first = restored.step + 1 if restored else 0
        print(f"rank {rank} starting at step {first}, from {restored.tier if restored else 'nothing'}", flush=True)
        for step in range(first, STEPS):
            at = (step * 97 + rank * 31) % (len(text) - LENGTH - 1)  # each step's batch, whenever it is trained
            logits = model(text[at : at + LENGTH][None])
            loss = nn.functional.cross_entropy(logits[0], text[at + 1 : at + LENGTH + 1])
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if step % 10 == 9:
                client.save(state, step)
                print(f"rank {rank} step {step} loss {loss.item():.4f}", flush=True)
        client.wait("durable")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
