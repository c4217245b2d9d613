"""Pre-norm decoder layers with shared experts, of any width: what the memory benchmark trains."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from lightning_moe.layers import GroupedExperts, MoELayer, SharedExperts, TopKRouter

HEAD = 128  # width of an attention head, at most


@dataclass(frozen=True)
class Widths:
    """H hidden, F of an expert, S of the shared experts, E experts, K a token."""

    hidden: int
    ffn: int
    shared_ffn: int
    experts: int
    top_k: int

    @property
    def heads(self) -> int:
        """Attention heads; a quarter of them share keys and values."""
        return max(self.hidden // HEAD, 4)


class Attention(nn.Module):
    """Causal, with grouped queries."""

    def __init__(self, widths: Widths) -> None:
        super().__init__()
        self.heads, self.head = widths.heads, widths.hidden // widths.heads
        self.kv_heads = self.heads // 4
        self.q_proj = nn.Linear(widths.hidden, self.heads * self.head, bias=False)
        self.k_proj = nn.Linear(widths.hidden, self.kv_heads * self.head, bias=False)
        self.v_proj = nn.Linear(widths.hidden, self.kv_heads * self.head, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head, widths.hidden, bias=False)

    def forward(self, hidden_BSH: Tensor) -> Tensor:
        """``[B, S, H]`` to ``[B, S, H]``."""
        q, k, v = (
            projection(hidden_BSH).unflatten(-1, (-1, self.head)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out


class DecoderLayer(nn.Module):
    """Its children have Hugging Face's names, by which recompute policies find them."""

    def __init__(self, widths: Widths) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(widths.hidden)
        self.self_attn = Attention(widths)
        self.post_attention_layernorm = nn.RMSNorm(widths.hidden)
        self.mlp = MoELayer(
            TopKRouter(widths.hidden, widths.experts, widths.top_k),
            GroupedExperts(widths.experts, widths.hidden, widths.ffn),
            SharedExperts(widths.hidden, widths.shared_ffn),
        )

    def forward(self, x: Tensor) -> Tensor:
        """``[B, S, H]`` to ``[B, S, H]``."""
        h: Tensor = x + self.self_attn(self.input_layernorm(x))
        out: Tensor = h + self.mlp(self.post_attention_layernorm(h))
        return out


class Decoder(nn.Module):
    """A stack of them."""

    def __init__(self, num_layers: int, widths: Widths) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DecoderLayer(widths) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        """``[B, S, H]`` to ``[B, S, H]``."""
        for layer in self.layers:
            x = layer(x)
        return x
