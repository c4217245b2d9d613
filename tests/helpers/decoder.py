"""A small decoder of this package's own layers, with shared experts and dropout, under names of its own."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_moe import GroupedExperts, MoELayer, SharedExperts, TopKRouter

VOCABULARY = 32


class Attention(nn.Module):
    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)

    def forward(self, hidden_BSH: Tensor) -> Tensor:
        parts = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(hidden_BSH).chunk(3, -1))
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(*parts, is_causal=True, dropout_p=dropout)
        return self.out(mixed.transpose(1, 2).flatten(2))


class DroppingSharedExperts(SharedExperts):
    """Gated, and random."""

    def forward(self, tokens_TH: Tensor) -> Tensor:
        return F.dropout(super().forward(tokens_TH), 0.1, self.training)


class Block(nn.Module):
    decoder_parts: ClassVar = {
        "input_layernorm": "first_norm",
        "self_attn": "attention",
        "post_attention_layernorm": "second_norm",
        "mlp": "moe",
    }

    def __init__(self, hidden: int, heads: int, experts: int, top_k: int, width: int, dropout: float) -> None:
        super().__init__()
        self.first_norm, self.second_norm = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.attention = Attention(hidden, heads, dropout)
        shared = DroppingSharedExperts if dropout else SharedExperts
        self.moe = MoELayer(
            TopKRouter(hidden, experts, top_k, init_std=0.3),
            GroupedExperts(experts, hidden, width, init_std=0.3),
            shared(hidden, width, gated=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = x + self.attention(self.first_norm(x))
        return h + self.moe(self.second_norm(h))


class Decoder(nn.Module):
    """``[B, S]`` token ids to logits ``[B, S, V]``; 8 experts, 3 a token, unless told otherwise."""

    def __init__(
        self,
        layers: int = 2,
        hidden: int = 16,
        heads: int = 2,
        experts: int = 8,
        top_k: int = 3,
        width: int = 24,
        dropout: float = 0.2,
        seed: int = 11,
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCABULARY, hidden)
        self.layers = nn.ModuleList(Block(hidden, heads, experts, top_k, width, dropout) for _ in range(layers))
        self.head = nn.Linear(hidden, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
