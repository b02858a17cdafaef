"""What the cases of DeepSpeed's own tests share: engines, steps, and whether two engines hold the same to the bit."""

import contextlib
import gc
import os
import sys
import traceback
from itertools import product

# Nothing is compiled: Muon's step would be, which takes minutes.
os.environ |= {"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu", "TORCHDYNAMO_DISABLE": "1"}

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

import ckptd_client
from ckptd_client.integrations.deepspeed import attach

WIDTH = 10
ADAM = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}
WARMUP = {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_max_lr": 0.01}}


def begin():
    """On each rank, once."""
    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__.clear()  # compiles nothing: a process that is killed at it leaves a lock for ever
    deepspeed.init_distributed("gloo", verbose=False)
    gc.freeze()  # ZeRO-3 collects garbage for each engine: not in all of torch each time


class Small(nn.Module):
    """Of sizes that two ranks divide evenly: ZeRO-3 pads with what lay in memory. Each step changes the buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.seen += 1
        return self.second(self.first(x).relu())


class Frozen(Small):
    """The first layer is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)


def random_batch(step):
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return torch.randn(4, WIDTH, generator=generator)


def take_steps(engine, count=2):
    """Steps of plain training; what they see depends on the rank and on engine.global_steps."""
    for _ in range(count):
        x = random_batch(engine.global_steps).to(next(engine.module.parameters()).dtype)
        engine.backward((engine(x) - x.flip(0)).float().square().mean())
        engine.step()


def state_of(engine):
    """All that training goes on from, on this rank, as nested dicts and lists."""
    optimizer = getattr(engine.optimizer, "state_dict", dict)()
    return plain(
        {
            "module": module_of(engine),
            "optimizer": optimizer,
            "scheduler": engine.lr_scheduler.state_dict() if engine.lr_scheduler else None,
            "counts": [engine.global_steps, engine.global_samples, engine.skipped_steps],
        }
    )


def module_of(engine):
    """Parameters, under ZeRO-3 this rank's parts of them, and buffers."""
    found = {name: part_of(parameter) for name, parameter in engine.module.named_parameters()}
    return found | dict(engine.module.named_buffers())


def part_of(parameter):
    """Of a parameter that ZeRO-3 has cut, this rank's part without what pads it, which nobody sets; else all of it."""
    if not hasattr(parameter, "ds_tensor"):
        return parameter
    length = parameter.ds_tensor.numel()
    return parameter.ds_tensor[: max(0, parameter.ds_numel - dist.get_rank() * length)]


def plain(value):
    """A copy that nothing changes later, for `difference`."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    return plain(vars(value)) if hasattr(value, "cur_scale") else value  # a loss scaler


def difference(one, other, at=""):
    """Where two plain values differ, by path."""
    if type(one) is not type(other):
        return [at]
    if isinstance(one, dict):
        if one.keys() != other.keys():
            return [f"{at}: {sorted(map(str, one.keys() ^ other.keys()))}"]
        return [found for key in one for found in difference(one[key], other[key], f"{at}.{key}")]
    if isinstance(one, list):
        if len(one) != len(other):
            return [at]
        return [
            found for i, pair in enumerate(zip(one, other, strict=True)) for found in difference(*pair, f"{at}.{i}")
        ]
    if isinstance(one, torch.Tensor):
        return [] if one.dtype == other.dtype and torch.equal(one, other) else [at]
    return [] if one == other else [at]


def same(one, other):
    """Asserts that two states are equal to the bit."""
    found = difference(one, other)
    assert not found, found


class Cases:
    """A decorator, which keeps what it decorates."""

    def __init__(self) -> None:
        self.functions = []

    def __call__(self, function):
        self.functions.append(function)
        return function


class Bench:
    """Engines of one kind of ZeRO and of numbers, directories below a folder, and the one client of all cases."""

    def __init__(self, folder, client, kind="1-bf16"):
        self.client = client
        self.stage, self.dtype = int(kind[0]), kind[2:]
        self.folder = folder

    def out(self, name="ckptd"):
        """A directory for checkpoints, absolute."""
        return os.path.join(self.folder, name)

    def config(self, settings=ADAM, **more):
        """DeepSpeed's, of this kind; settings: the optimizer's. zero_optimization's keys are added to its own."""
        made = {
            "optimizer": settings,
            "train_micro_batch_size_per_gpu": 4,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {"stage": self.stage, "stage3_param_persistence_threshold": 0}
            | more.pop("zero_optimization", {}),
        }
        if self.dtype == "bf16":
            made["bf16"] = {"enabled": True}
        return made | more

    def engine(self, seed=0, model=Small, optimizer=None, **more):
        """A new engine, whose weights follow from the seed."""
        config = self.config(**more)
        torch.manual_seed(seed)
        net = model()
        chosen = {}
        if optimizer is not None:
            config.pop("optimizer")
            chosen["optimizer"] = optimizer(net)
        else:
            chosen["model_parameters"] = [p for p in net.parameters() if p.requires_grad]
        return deepspeed.initialize(model=net, config=config, **chosen)[0]

    @contextlib.contextmanager
    def under(self, engine):
        """ckptd under an engine."""
        attached = attach(engine, self.client)
        try:
            yield attached
        finally:
            attached.close()

    def save(self, engine, out=None, tag="1", **options):
        """By ckptd; returns when the directory is there."""
        with self.under(engine) as attached:
            engine.save_checkpoint(out or self.out(), tag, **options)
            attached.handle.wait("durable", 60)
        dist.barrier()

    def load_from_memory(self, engine, out=None, tag=None, **options):
        """What load_checkpoint returns, while there is nothing on the disk."""
        out = out or self.out()
        with self.aside(out), self.under(engine):
            return engine.load_checkpoint(out, tag, **options)

    @contextlib.contextmanager
    def aside(self, out):
        """While this lasts, the directory is not where it was."""
        dist.barrier()
        if dist.get_rank() == 0:
            os.rename(out, f"{out}.aside")
        dist.barrier()
        try:
            yield
        finally:
            dist.barrier()
            if dist.get_rank() == 0:
                os.rename(f"{out}.aside", out)
            dist.barrier()

    def round_trip(self, make, steps=take_steps, saving=None, tag="1", **loading):
        """An engine that was trained and one that was loaded, both as plain states.

        make(seed) gives an engine. It is saved with and without ckptd, and loaded from memory, and without ckptd from
        what either has written: all three come out equal, and so does what load_checkpoint returns besides.
        """
        engine = make(0)
        steps(engine)
        self.save(engine, tag=tag, **(saving or {}))
        engine.save_checkpoint(self.out("stock"), tag, **(saving or {}))
        trained = state_of(engine)
        loaded = []
        for where in ("stock", "ckptd", "memory"):
            engine = make(1)
            if where == "memory":
                path, said = self.load_from_memory(engine, **loading)
                assert path.startswith(self.out()), path
            else:
                path, said = engine.load_checkpoint(self.out(where), **loading)
            loaded.append({"said": plain(said), "state": state_of(engine)})
        same(loaded[0], loaded[1])
        same(loaded[0], loaded[2])
        return trained, loaded[2]["state"]


def connect(job="cases"):
    """A client of the node's daemon."""
    return ckptd_client.connect(job, start=False, redundancy="none", allow_pickle=["*.pt"])


def run_cases(kinds):
    """Runs a script's cases, each Cases for its kinds: <folder> [case...]. Ends the process."""
    folder, only = sys.argv[1], sys.argv[2:]
    begin()
    client = connect()
    for cases, each in kinds.items():
        for kind, function in product(each, cases.functions):
            if not only or function.__name__ in only:
                run_case(function, folder, client, kind)
    os._exit(0)  # gloo's threads may abort an interpreter that ends


def run_case(function, folder, client, kind):
    name = f"{kind}-{function.__name__}"
    try:
        function(Bench(os.path.join(folder, name), client, kind))
        print(f"rank {dist.get_rank()}: {name} passed", flush=True)
    except BaseException:
        print(f"rank {dist.get_rank()}: {name} FAILED", flush=True)
        traceback.print_exc(file=sys.stdout)
        sys.stdout.flush()
        os._exit(1)  # the other rank may be elsewhere: it hears of it
    dist.barrier()
    gc.collect()
    gc.freeze()
