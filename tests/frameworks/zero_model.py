"""A small model with what is hard in a ZeRO checkpoint: uneven sizes, a tied and a frozen parameter, buffers."""

import torch
from torch import nn


class Model(nn.Module):
    """13 words in, 13 out: the last layer's weight is the first one's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.first = nn.Linear(6, 7)
        self.norm = nn.LayerNorm(7)
        self.frozen = nn.Linear(7, 5)
        self.second = nn.Linear(5, 6, bias=False)
        self.scale = nn.Parameter(torch.tensor([1.5]))
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.embed.weight
        self.frozen.requires_grad_(False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(7))
        self.register_buffer("unsaved", torch.zeros(3), persistent=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Scores of the words, averaged over a sentence."""
        mixed = self.norm(self.first(self.embed(words).mean(1)))
        self.seen += 1
        self.mean.lerp_(mixed.detach().to(self.mean.dtype).mean(0), 0.1)
        return self.head(self.second(self.frozen(mixed).relu()) * self.scale)


def groups(model: nn.Module) -> list[dict]:
    """Weights, and what is not decayed."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0, "lr": 0.004},
    ]
