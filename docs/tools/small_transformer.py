"""The model of the screenshots."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """Attention of one head, and two layers behind it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.query_key_value = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """One layer; [batch, words, width] in and out."""
        query, key, value = self.query_key_value(self.norm(x)).chunk(3, -1)
        weights = torch.softmax(query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5, -1)
        x = x + self.output(weights @ value)
        return x + self.mlp(x)


class SmallTransformer(nn.Module):
    """Two blocks over 100 words."""

    def __init__(self, width: int = 64, depth: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 100)

    def forward(self, words: Tensor) -> Tensor:
        """Scores [batch, words, 100] of the next word."""
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x)
