"""A small byte-level GPT in plain torch."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 256


@dataclass(frozen=True)
class Shape:
    """Sizes of the model; the defaults give 3.3 million parameters."""

    layers: int = 4
    heads: int = 4
    width: int = 256
    context: int = 128
    dropout: float = 0.1


class Attention(nn.Module):
    """Causal self-attention over (batch, time, width)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.dropout = shape.dropout
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        """Mixes each position with the earlier ones."""
        batch, time, width = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        mixed = mixed.transpose(1, 2).reshape(batch, time, width)
        return functional.dropout(self.out(mixed), self.dropout, self.training)


class Block(nn.Module):
    """Attention, then a perceptron, each on the normalised residual stream."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(shape.width)
        self.attention = Attention(shape)
        self.norm2 = nn.LayerNorm(shape.width)
        self.mlp = nn.Sequential(
            nn.Linear(shape.width, 4 * shape.width),
            nn.GELU(),
            nn.Linear(4 * shape.width, shape.width),
            nn.Dropout(shape.dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        """The stream plus the outputs of both parts."""
        x = x + self.attention(self.norm1(x))
        return torch.add(x, self.mlp(self.norm2(x)))


class GPT(nn.Module):
    """Predicts the next byte. The output head and the byte embedding are one tensor."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, shape.width)
        self.position = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats of targets, given tokens; both are (batch, time) of byte values."""
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
