"""Routers: which experts each token goes to, and with what weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Self, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ScoreFunction = Literal["softmax", "sigmoid"]


class Routing(NamedTuple):
    """A router's decision for T tokens. Same order as Hugging Face's routers return it.

    Args:
        logits_TE: ``[T, E]``, before the scores; what auxiliary losses are computed from.
        weights_TK: ``[T, K]``, differentiable routing weights.
        ids_TK: ``[T, K]`` int64, the chosen experts, without repetition; ``-1`` for a slot that goes nowhere.

    """

    logits_TE: Tensor
    weights_TK: Tensor
    ids_TK: Tensor


def router_scores(logits_TE: Tensor, score_function: ScoreFunction) -> Tensor:
    """How well each expert fits each token, between 0 and 1.

    Args:
        logits_TE: ``[..., E]``, any floating dtype.
        score_function: ``"softmax"`` over the experts, or ``"sigmoid"`` of each.

    Returns:
        ``[..., E]``, float32 (float64 for float64 logits).

    """
    dtype = torch.float64 if logits_TE.dtype == torch.float64 else torch.float32
    return logits_TE.softmax(-1, dtype=dtype) if score_function == "softmax" else logits_TE.to(dtype).sigmoid()


class TopKRouter(nn.Module):
    """Top-k router: scores in float32, the K largest, optionally scaled to sum to one.

    With every option it is the router of DeepSeek-V3 (technical report, equations 12 to 16): sigmoid scores, a bias that takes
    part in the selection alone, groups of experts of which a token may use a few, weights that are normalized and scaled.

    Args:
        hidden_size: H.
        num_experts: E.
        top_k: K.
        normalize: Divide the K weights by their sum.
        init_std: Standard deviation of the weight's normal initialization.
        score_function: What makes scores of the logits.
        selection_bias: Keep a buffer ``selection_bias`` ``[E]``, float32 in every precision, that is added to the scores to
            select experts, and not to the weights. :class:`~lightning_moe.callbacks.RouterBiasBalancer` balances loads by it.
        num_groups: Cut the experts into groups of neighbours, such as those of one host.
        top_k_groups: The number of groups that a token's experts may come from: those whose two best experts have the largest
            sum. By default all.
        scaling: Factor on the weights, after they are normalized.

    """

    selection_bias: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        normalize: bool = True,
        init_std: float = 0.02,
        *,
        score_function: ScoreFunction = "softmax",
        selection_bias: bool = False,
        num_groups: int = 1,
        top_k_groups: int | None = None,
        scaling: float = 1.0,
    ) -> None:
        super().__init__()
        top_k_groups = num_groups if top_k_groups is None else top_k_groups
        if not 1 <= top_k <= num_experts:
            raise ValueError(f"Expected argument `top_k` to lie in 1..num_experts={num_experts} but got {top_k}.")
        if score_function not in get_args(ScoreFunction):
            names = " or ".join(map(repr, get_args(ScoreFunction)))
            raise ValueError(f"Expected argument `score_function` to be {names} but got {score_function!r}.")
        if num_groups < 1 or num_experts % num_groups:
            raise ValueError(
                f"Expected argument `num_groups` to divide num_experts={num_experts} evenly but got {num_groups}."
            )
        if not 1 <= top_k_groups <= num_groups or top_k > top_k_groups * (num_experts // num_groups):
            raise ValueError(
                f"Expected argument `top_k_groups` to lie in 1..num_groups={num_groups} and to leave at least top_k={top_k}"
                f" of {num_experts} experts but got {top_k_groups}."
            )
        self.num_experts = num_experts
        self.top_k = top_k
        self.normalize = normalize
        self.init_std = init_std
        self.score_function: ScoreFunction = score_function
        self.num_groups = num_groups
        self.top_k_groups = top_k_groups
        self.scaling = scaling
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))
        self.register_buffer(
            "selection_bias", torch.empty(num_experts, dtype=torch.float32) if selection_bias else None
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.init_std)
        if self.selection_bias is not None:
            nn.init.zeros_(self.selection_bias)

    def forward(self, tokens_TH: Tensor) -> Routing:
        """Route ``[T, H]`` tokens."""
        logits_TE = F.linear(tokens_TH, self.weight)
        scores_TE = router_scores(logits_TE, self.score_function)
        ids_TK = self.select(scores_TE.detach())
        weights_TK = scores_TE.gather(1, ids_TK)
        if self.normalize:
            weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)  # every sigmoid may be zero
        if self.scaling != 1.0:
            weights_TK = weights_TK * self.scaling
        return Routing(logits_TE, weights_TK, ids_TK)

    def select(self, scores_TE: Tensor) -> Tensor:
        """The experts ``[T, K]`` of tokens with scores ``[T, E]``, the most wanted first."""
        if self.selection_bias is not None:
            scores_TE = scores_TE + self.selection_bias
        if self.top_k_groups < self.num_groups:
            scores_TGe = scores_TE.view(len(scores_TE), self.num_groups, self.num_experts // self.num_groups)
            best_TG = scores_TGe.topk(min(2, scores_TGe.shape[2]), dim=-1)[0].sum(-1)
            kept_Tg = best_TG.topk(self.top_k_groups, dim=-1)[1]
            out_TG = torch.ones_like(best_TG, dtype=torch.bool).scatter(1, kept_Tg, False)
            scores_TE = scores_TGe.masked_fill(out_TG[:, :, None], -torch.inf).flatten(1)
        return scores_TE.topk(self.top_k, dim=-1)[1]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        bias = self.selection_bias
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if bias is not None and self.selection_bias is not None and self.selection_bias.dtype != bias.dtype:
            # a conversion of the whole model; the steps that balance the load would be lost in bfloat16's rounding
            self.selection_bias = bias.to(self.selection_bias.device)
        return self

    def extra_repr(self) -> str:
        shown: dict[str, Any] = {
            "hidden_size": self.weight.shape[1],
            "num_experts": self.num_experts,
            "top_k": self.top_k,
            "normalize": self.normalize,
            "score_function": self.score_function,
        }
        if self.selection_bias is not None:
            shown["selection_bias"] = True
        if self.top_k_groups < self.num_groups:
            shown |= {"num_groups": self.num_groups, "top_k_groups": self.top_k_groups}
        if self.scaling != 1.0:
            shown["scaling"] = self.scaling
        return ", ".join(f"{name}={value}" for name, value in shown.items())
