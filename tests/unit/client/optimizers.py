"""Optimizers of many kinds and small models of five families, each after real steps, for tests of exact loads."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

VOCABULARY, WIDTH = 11, 8


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.embedding(tokens)))


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.body = nn.Sequential(nn.Conv1d(WIDTH, 6, 3, padding=1), nn.BatchNorm1d(6), nn.ReLU(), nn.Conv1d(6, 3, 1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.body(self.embedding(tokens).transpose(1, 2))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.lstm = nn.LSTM(WIDTH, 5, batch_first=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.lstm(self.embedding(tokens))[0]


class Recommender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList([nn.EmbeddingBag(VOCABULARY, WIDTH, mode="sum") for _ in range(2)])
        self.mlp = nn.Sequential(nn.Linear(2 * WIDTH, 7), nn.ReLU(), nn.Linear(7, 1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.mlp(torch.cat([bag(tokens) for bag in self.bags], 1))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(functional.gelu(self.mix(self.embedding(tokens))))


FAMILIES: dict[str, type[nn.Module]] = {
    "transformer": Transformer,
    "conv": Convolutions,
    "lstm": Recurrent,
    "recommender": Recommender,
    "tied": Tied,
}


class Simple(torch.optim.Optimizer):
    """An optimizer of a user's own: `begin` makes what it keeps of a parameter, `change` moves it."""

    def __init__(self, parameters: Any, lr: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    kept = self.state[parameter]
                    if not kept:
                        kept.update(self.begin(parameter))
                    self.change(parameter, parameter.grad, kept, group["lr"])


class Lion(Simple):
    def begin(self, parameter):
        return {"exp_avg": torch.zeros_like(parameter)}

    def change(self, parameter, grad, kept, lr):
        parameter.sub_(lr * (kept["exp_avg"] * 0.9 + grad * 0.1).sign())
        kept["exp_avg"].mul_(0.99).add_(grad, alpha=0.01)


class WideMoments(Simple):
    """What mixed precision does: moments and a master copy in fp32, whatever the weights are."""

    def begin(self, parameter):
        zeros = torch.zeros_like(parameter, dtype=torch.float32)
        return {"step": 0, "exp_avg": zeros, "exp_avg_sq": zeros.clone(), "master": parameter.float().clone()}

    def change(self, parameter, grad, kept, lr):
        kept["step"] += 1
        kept["exp_avg"].lerp_(grad.float(), 0.1)
        kept["exp_avg_sq"].lerp_(grad.float().square(), 0.01)
        kept["master"].sub_(lr * kept["exp_avg"] / (kept["exp_avg_sq"].sqrt() + 1e-8))
        parameter.copy_(kept["master"])


class EightBit(Simple):
    """Codes of a byte with a scale for every 16 of them, as 8-bit optimizers keep."""

    def begin(self, parameter):
        blocks = -(-parameter.numel() // 16)
        return {
            "codes": torch.zeros(blocks, 16, dtype=torch.uint8),
            "absmax": torch.zeros(blocks, dtype=torch.float32),
            "signs": torch.zeros(blocks, 16, dtype=torch.bool),
            "qmap": torch.linspace(0, 1, 256, dtype=torch.float64),
        }

    def change(self, parameter, grad, kept, lr):
        flat = torch.zeros(kept["codes"].numel())
        flat[: grad.numel()] = grad.float().flatten()
        blocks = flat.view_as(kept["codes"])
        kept["absmax"].copy_(blocks.abs().amax(1))
        kept["signs"].copy_(blocks < 0)
        kept["codes"].copy_((blocks.abs() / kept["absmax"].clamp(min=1e-12)[:, None] * 255).to(torch.uint8))
        parameter.sub_(lr * grad)


class Nested(Simple):
    """State in dicts, lists and tuples of dicts, with values that are no tensors among them."""

    def begin(self, parameter):
        narrow = torch.ones(3, dtype=torch.float16)
        return {
            "factors": {
                "left": {0: torch.eye(3, dtype=torch.float64)},
                "right": [narrow, {"rank": 2, "name": "right"}],
            },
            "history": (torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.float32)),
            "kind": "kronecker",
            "dims": (3, 3),
            "best": None,
            "momentum": torch.zeros_like(parameter),
        }

    def change(self, parameter, grad, kept, lr):
        kept["factors"]["left"][0].add_(grad.double().sum() / 3)
        kept["factors"]["right"][0].mul_(0.7)
        kept["history"][0].add_(1)
        kept["history"][1].add_(1 / 3)
        kept["best"] = 0.1
        kept["momentum"].add_(grad)
        parameter.sub_(lr * kept["momentum"])


Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
_optim = torch.optim


def _capturable(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Its steps are float tensors on the device, and it refuses to step on CPUs: see `step`."""
    return _optim.AdamW(parameters, lr=torch.tensor(0.01))


def _muon(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return _optim.Muon([p for p in parameters if p.dim() == 2], lr=0.01)


OPTIMIZERS: dict[str, Make] = {
    "sgd-momentum": lambda p: _optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
    "adam-foreach": lambda p: _optim.Adam(p, foreach=True),
    "adam-amsgrad": lambda p: _optim.Adam(p, amsgrad=True, foreach=False),
    "adamw-fused": lambda p: _optim.AdamW(p, fused=True),
    "adamw-capturable": _capturable,
    "nadam": lambda p: _optim.NAdam(p, decoupled_weight_decay=True),
    "radam": _optim.RAdam,
    "adagrad": _optim.Adagrad,
    "adadelta": _optim.Adadelta,
    "rmsprop": lambda p: _optim.RMSprop(p, momentum=0.9, centered=True),
    "rprop": _optim.Rprop,
    "asgd": _optim.ASGD,
    "adamax": _optim.Adamax,
    "lbfgs": lambda p: _optim.LBFGS(p, lr=0.01, max_iter=3, history_size=2),
    "sparse-adam": _optim.SparseAdam,
    "lion": Lion,
    "wide-moments": WideMoments,
    "eight-bit": EightBit,
    "nested": Nested,
}
if hasattr(_optim, "Adafactor"):
    OPTIMIZERS["adafactor"] = _optim.Adafactor
if hasattr(_optim, "Muon"):
    OPTIMIZERS["muon"] = _muon


def trained(family: str, kind: str, dtype: torch.dtype, *, seed: int, steps: int) -> dict[str, Any]:
    """A model and its optimizer after so many steps on random tokens."""
    torch.manual_seed(seed)
    model = FAMILIES[family]().to(dtype)
    optimizer = OPTIMIZERS[kind](list(model.parameters()))
    tokens = torch.randint(0, VOCABULARY, (4, 6))

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = model(tokens).float().square().mean()
        value.backward()
        if kind == "sparse-adam":
            for parameter in model.parameters():
                parameter.grad = None if parameter.grad is None else parameter.grad.to_sparse()
        return value

    for _ in range(steps):
        if kind == "lbfgs":
            optimizer.step(loss)
        else:
            loss()
            optimizer.step()
    if kind == "adamw-capturable":
        optimizer.param_groups[0]["capturable"] = True
    return {"model": model, "optimizer": optimizer}
