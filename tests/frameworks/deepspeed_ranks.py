"""One rank of a small training under DeepSpeed: undisturbed, killed after a save, resumed, or loading by stock means.

Arguments: what to do, ZeRO's stage or "pipe", a directory for checkpoints. Prints what the test looks for.
"""

import os
import signal
import sys

os.environ |= {"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"}

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn

from ckptd.shared.format.digest import digest
from ckptd_client.integrations import deepspeed as integration

STEPS, EARLY, LATE = 6, 2, 4  # saved are EARLY and LATE; killed after LATE
WIDTH = 24


class Model(nn.Module):
    """Two layers and a buffer that each step changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.second(self.first(x).relu())


def data(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(4, WIDTH, generator=generator)


def start(kind: str):
    """The engine, at step 0."""
    deepspeed.ops.__compatible_ops__.clear()  # compiles nothing: a process that is killed at it leaves a lock for ever
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
        "zero_allow_untested_optimizer": True,
    }
    if kind == "pipe":
        config["checkpoint"] = {"parallel_write": {"pipeline_stage": True}}
        layers = [LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(5)]
        model = PipelineModule(layers, num_stages=int(os.environ.get("STAGES", "1")), loss_fn=nn.MSELoss())
    else:
        config |= {"bf16": {"enabled": True}, "zero_optimization": {"stage": int(kind)}}
        model = Model()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine


def step_of(engine, kind: str, step: int) -> None:
    rank = dist.get_rank()
    if kind == "pipe":
        x = data(step, rank)
        engine.train_batch(iter([(x, x.flip(0))]))
        return
    x = data(step, rank).bfloat16()
    loss = (engine(x) - x.flip(0)).float().square().mean()
    engine.backward(loss)
    engine.step()


def state_digest(engine) -> str:
    """Of all that training goes on from, on this rank."""
    found = []

    def walk(value) -> None:
        if isinstance(value, torch.Tensor):
            found.append(bytes(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()))
        elif isinstance(value, dict):
            for key in value:
                found.append(str(key).encode())
                walk(value[key])
        elif isinstance(value, (list, tuple)):
            for item in value:
                walk(item)
        elif isinstance(value, (int, float, str, bool)):
            found.append(repr(value).encode())

    walk(engine.optimizer.state_dict())
    walk(engine.lr_scheduler.state_dict())
    for name, buffer in engine.module.named_buffers():
        walk({name: buffer})
    for parameter in engine.module.parameters():
        walk(getattr(parameter, "ds_tensor", parameter).detach())
    return digest(b"".join(found)).hex()


def go_back(engine, kind: str, out: str) -> None:
    """Which saves load_checkpoint finds: latest set back by hand, a save that it never named, one without ckptd."""
    attached = integration.attach(engine, job="ds", start=False, allow_pickle=["*.pt"])

    def save(step: int, **options) -> None:
        engine.save_checkpoint(out, client_state={"step": step}, **options)

    def told(words: str) -> None:
        dist.barrier()
        print(words, engine.load_checkpoint(out)[1]["step"])

    for step in range(2):
        step_of(engine, kind, step)
        save(step)
        attached.handle.wait("durable")
    told("newest")
    if dist.get_rank() == 0:
        with open(os.path.join(out, "latest"), "w") as file:
            file.write("global_step1")
    told("set back")
    save(99, tag="beside", save_latest=False)
    told("beside")
    save(2, tag="again")
    attached.handle.wait("durable")
    attached.close()
    save(3, tag="again")
    attached = integration.attach(engine, job="ds", start=False, allow_pickle=["*.pt"])
    told("again")
    attached.close()
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    what, kind, out = sys.argv[1:4]
    engine = start(kind)
    if what == "back":
        return go_back(engine, kind, out)
    attached = None
    if what not in {"reference", "stock"}:
        attached = integration.attach(engine, job="ds", start=False, allow_pickle=["*.pt"])
    first = 0
    if what in {"resume", "stock"}:
        path, state = engine.load_checkpoint(out)
        first = state["step"] + 1
        print(f"loaded step {state['step']} of {os.path.relpath(path, out)}, {state_digest(engine)}")
        assert os.path.dirname(path).startswith(out), path
    for step in range(first, STEPS):
        step_of(engine, kind, step)
        if what == "train" and step in {EARLY, LATE}:
            engine.save_checkpoint(out, client_state={"step": step})
            print(f"saved step {step}, {state_digest(engine)}")
            assert attached is not None
            attached.handle.wait("staged" if step == LATE else "durable")
            dist.barrier()
            if step == LATE:
                sys.stdout.flush()
                os.kill(os.getpid(), signal.SIGKILL)
    print(f"ended, {state_digest(engine)}")
    if attached is not None:
        attached.client.wait("durable")
        attached.close()
    dist.barrier()
    dist.destroy_process_group()
    return None


main()
