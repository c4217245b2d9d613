"""One autograd Function over the three primitives, in four modes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_moe.dispatch.base import Dispatcher, Plan
from lightning_moe.overlap import primitives
from lightning_moe.overlap.primitives import Kept, Weights
from lightning_moe.recompute.policy import RoutedMode


def chunked_experts(
    tokens_TH: Tensor,
    weights_TK: Tensor,
    gate_up_e2FH: Tensor,
    down_eHF: Tensor,
    dispatcher: Dispatcher,
    plans: Sequence[Plan],
    mode: RoutedMode,
    weight_grad_scale: float = 1.0,
) -> Tensor:
    """The routed experts' output, differentiable in tokens, routing weights and both matrices.

    Args:
        tokens_TH: ``[T, H]``, local tokens, in the experts' dtype.
        weights_TK: ``[T, K]``, routing weights, float32 (float64 for float64 tokens).
        gate_up_e2FH: ``[e, 2F, H]``, local.
        down_eHF: ``[e, H, F]``, local.
        dispatcher: Moves rows between ranks.
        plans: One for each chunk.
        mode: What is kept for backward; see :class:`~lightning_moe.recompute.RecomputePolicy`.
        weight_grad_scale: Factor on the gradients of the two matrices.

    Returns:
        ``[T, H]``. The gradient of each matrix is handed to autograd once, whatever the number of chunks.

    """
    tensors = (tokens_TH, weights_TK, gate_up_e2FH, down_eHF)
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in tensors):
        mode = "full"  # no backward will come: keep nothing
    result: Tensor = _ChunkedExperts.apply(*tensors, dispatcher, plans, mode, weight_grad_scale)  # type: ignore[no-untyped-call]
    return result


class _ChunkedExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tokens_TH: Tensor,
        weights_TK: Tensor,
        gate_up_e2FH: Tensor,
        down_eHF: Tensor,
        dispatcher: Dispatcher,
        plans: Sequence[Plan],
        mode: RoutedMode,
        weight_grad_scale: float,
    ) -> Tensor:
        experts = Weights(gate_up_e2FH, down_eHF)
        with torch.autocast(tokens_TH.device.type, enabled=False):
            out_TH, kept = primitives.forward(dispatcher, plans, tokens_TH, weights_TK, experts, mode)
        ctx.dispatcher, ctx.plans, ctx.mode, ctx.weight_grad_scale = dispatcher, plans, mode, weight_grad_scale
        ctx.save_for_backward(
            gate_up_e2FH,
            down_eHF,
            tokens_TH if mode in ("dispatch", "full") else None,
            weights_TK if mode == "full" else None,
            *(tensor for chunk in kept for tensor in (chunk.rows_RH, chunk.gate_up_R2F, chunk.act_RF, chunk.weights_R)),
        )
        return out_TH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TH: Tensor) -> tuple[Tensor | None, ...]:
        gate_up_e2FH, down_eHF, tokens_TH, weights_TK, *saved = ctx.saved_tensors
        experts = Weights(gate_up_e2FH, down_eHF)
        options = (experts, ctx.needs_input_grad[2:4], ctx.weight_grad_scale)
        grad_TH = grad_TH.contiguous()  # `sum().backward()` sends an expanded scalar
        with torch.autocast(grad_TH.device.type, enabled=False):
            if ctx.mode == "full":
                grads = primitives.forward_backward(ctx.dispatcher, ctx.plans, grad_TH, tokens_TH, weights_TK, *options)
            else:
                kept = [Kept(*saved[i : i + 4]) for i in range(0, len(saved), 4)]
                grads = primitives.backward(ctx.dispatcher, ctx.plans, kept, grad_TH, tokens_TH, weights_TK, *options)
        return (*grads, None, None, None, None)
