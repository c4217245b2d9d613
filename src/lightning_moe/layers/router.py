"""Routers: which experts each token goes to, and with what weight."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Routing(NamedTuple):
    """A router's decision for T tokens. Same order as Hugging Face's routers return it.

    Args:
        logits_TE: ``[T, E]``, before the softmax; what auxiliary losses are computed from.
        weights_TK: ``[T, K]``, differentiable routing weights.
        ids_TK: ``[T, K]`` int64, the chosen experts, without repetition; ``-1`` for a slot that goes nowhere.

    """

    logits_TE: Tensor
    weights_TK: Tensor
    ids_TK: Tensor


class TopKRouter(nn.Module):
    """Softmax top-k router: probabilities in float32, the K largest, optionally scaled to sum to one.

    Args:
        hidden_size: H.
        num_experts: E.
        top_k: K.
        normalize: Divide the K weights by their sum.
        init_std: Standard deviation of the weight's normal initialization.

    """

    def __init__(
        self, hidden_size: int, num_experts: int, top_k: int, normalize: bool = True, init_std: float = 0.02
    ) -> None:
        super().__init__()
        if not 1 <= top_k <= num_experts:
            raise ValueError(f"Expected argument `top_k` to lie in 1..num_experts={num_experts} but got {top_k}.")
        self.num_experts = num_experts
        self.top_k = top_k
        self.normalize = normalize
        self.init_std = init_std
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.init_std)

    def forward(self, tokens_TH: Tensor) -> Routing:
        """Route ``[T, H]`` tokens."""
        logits_TE = F.linear(tokens_TH, self.weight)
        dtype = torch.float64 if logits_TE.dtype == torch.float64 else torch.float32
        weights_TK, ids_TK = logits_TE.softmax(-1, dtype=dtype).topk(self.top_k, dim=-1)
        if self.normalize:
            weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
        return Routing(logits_TE, weights_TK, ids_TK)

    def extra_repr(self) -> str:
        hidden_size = self.weight.shape[1]
        return (
            f"hidden_size={hidden_size}, num_experts={self.num_experts}, top_k={self.top_k}, normalize={self.normalize}"
        )
