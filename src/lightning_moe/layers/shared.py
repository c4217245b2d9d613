"""Shared experts: the dense branch that every token takes beside its routed experts."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class SharedExperts(nn.Module):
    """A SwiGLU MLP, optionally scaled by a sigmoid gate: ``y = sigmoid(g x) * down(silu(gate x) * up x)``.

    Args:
        hidden_size: H.
        intermediate_size: Width of the MLP; for S shared experts of width F it is S * F.
        gated: Whether the output is scaled by ``sigmoid(g x)``, one scalar a token.

    """

    def __init__(self, hidden_size: int, intermediate_size: int, gated: bool = False) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)
        self.output_gate = nn.Linear(hidden_size, 1, bias=False) if gated else None

    def forward(self, tokens_TH: Tensor) -> Tensor:
        """``[T, H]`` to ``[T, H]``."""
        out_TH: Tensor = self.down_proj(F.silu(self.gate_proj(tokens_TH)) * self.up_proj(tokens_TH))
        if self.output_gate is not None:
            out_TH = self.output_gate(tokens_TH).sigmoid() * out_TH
        return out_TH
