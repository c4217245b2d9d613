"""The three primitives of ChunkedEP: ``forward``, ``backward``, and the fused ``forward_backward``.

Each cuts the local tokens into chunks and runs them through one pipeline. They work on plain tensors, and know nothing
of autograd, recompute policies or optimizers; :mod:`lightning_moe.overlap.function` composes them.

    forward           dispatch -> gather -> grouped GEMM -> SwiGLU x routing weight -> grouped GEMM -> reduce -> combine
    backward          the adjoint of each step, in reverse: combine's adjoint is dispatch, reduce's is gather
    forward_backward  backward that first rebuilds what forward did not keep: it needs neither the second grouped GEMM
                      nor a combine, since nothing in backward reads the layer's output

Legend: T local tokens, H hidden, F the experts' intermediate width, K experts per token, e local experts, N received
rows, R rows sorted by expert. A chunk has its own T, N and R.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_moe.dispatch.base import Dispatcher, Plan
from lightning_moe.ops.grouped_mm import Groups, grouped_mm, weight_gradient
from lightning_moe.ops.rows import accumulation_dtype, gather, reduce
from lightning_moe.ops.swiglu import swiglu, swiglu_backward
from lightning_moe.overlap.lanes import Communication, Lanes, pipeline
from lightning_moe.recompute.policy import RoutedMode


class Weights(NamedTuple):
    """The local experts' matrices, in Hugging Face's layout.

    Args:
        gate_up_e2FH: ``[e, 2F, H]``, the gate's F rows, then the up projection's.
        down_eHF: ``[e, H, F]``.

    """

    gate_up_e2FH: Tensor
    down_eHF: Tensor


@dataclass(frozen=True)
class Kept:
    """What one chunk's forward leaves for its backward; ``None`` is rebuilt there.

    Args:
        rows_RH: The first grouped GEMM's input.
        gate_up_R2F: Its output, the activation's input.
        act_RF: The second grouped GEMM's input.
        weights_R: The rows' routing weights.

    """

    rows_RH: Tensor | None = None
    gate_up_R2F: Tensor | None = None
    act_RF: Tensor | None = None
    weights_R: Tensor | None = None

    @staticmethod
    def under(mode: RoutedMode, rows_RH: Tensor, gate_up_R2F: Tensor, act_RF: Tensor, weights_R: Tensor) -> Kept:
        """Keep what the mode keeps."""
        return {
            "none": Kept(rows_RH, gate_up_R2F, act_RF, weights_R),
            "act": Kept(rows_RH, gate_up_R2F, None, weights_R),
            "dispatch": Kept(None, gate_up_R2F, None, weights_R),
            "full": Kept(),
        }[mode]


class Gradients(NamedTuple):
    """Gradients of one layer call; a weight's is ``None`` where it was not asked for.

    Args:
        tokens_TH: Of the layer's input, in its dtype.
        weights_TK: Of the routing weights, float32 (float64).
        gate_up_e2FH: Of the first matrix, summed over chunks in float32 (float64), converted to its dtype once.
        down_eHF: Of the second, likewise.

    """

    tokens_TH: Tensor
    weights_TK: Tensor
    gate_up_e2FH: Tensor | None
    down_eHF: Tensor | None


def forward(
    dispatcher: Dispatcher,
    plans: Sequence[Plan],
    tokens_TH: Tensor,
    weights_TK: Tensor,
    experts: Weights,
    mode: RoutedMode = "none",
    out_TH: Tensor | None = None,
) -> tuple[Tensor, list[Kept]]:
    """The routed experts' output for the local tokens.

    Args:
        dispatcher: Moves rows between ranks.
        plans: One for each chunk, from ``dispatcher.plan``.
        tokens_TH: ``[T, H]``, the layer's input, in the experts' dtype.
        weights_TK: ``[T, K]``, routing weights, float32 (float64 for float64 tokens).
        experts: The local experts' matrices.
        mode: What to keep for backward.
        out_TH: A buffer for the result; allocated where it is not given.

    Returns:
        ``[T, H]``, and what each chunk keeps.

    """
    if out_TH is None:
        out_TH = torch.empty_like(tokens_TH)
    kept: list[Kept] = []

    def arrive(plan: Plan) -> tuple[Communication, list[Tensor]]:
        return _dispatch(dispatcher, plan, [tokens_TH[plan.tokens], weights_TK[plan.tokens]])

    def work(plan: Plan, arrived: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        rows_NH, weights_NK = arrived
        arrived.clear()  # the received rows go as soon as they are sorted
        rows_RH, weights_R = gather(rows_NH, plan.by_expert), _weights_by_expert(weights_NK, plan)
        del rows_NH
        gate_up_R2F = grouped_mm(rows_RH, experts.gate_up_e2FH.mT, plan.groups)
        act_RF = swiglu(gate_up_R2F, weights_R)
        kept.append(Kept.under(mode, rows_RH, gate_up_R2F, act_RF, weights_R))
        out_RH = grouped_mm(act_RF, experts.down_eHF.mT, plan.groups)
        home_TH = out_TH[plan.tokens]
        out_NH = dispatcher.rows_like(plan, home_TH)
        reduce(out_RH, plan.by_expert, out_NH)
        return [out_NH], [home_TH]

    def leave(plan: Plan, product: tuple[list[Tensor], list[Tensor]]) -> Communication:
        return Communication(dispatcher.combine, (plan, *product))

    pipeline(Lanes(tokens_TH.device), plans, arrive, work, leave)
    return out_TH, kept


def backward(
    dispatcher: Dispatcher,
    plans: Sequence[Plan],
    kept: Sequence[Kept],
    grad_TH: Tensor,
    tokens_TH: Tensor | None,
    weights_TK: Tensor | None,
    experts: Weights,
    needs_weight_grad: tuple[bool, bool] = (True, True),
    weight_grad_scale: float = 1.0,
    grad_tokens_TH: Tensor | None = None,
) -> Gradients:
    """The gradients of :func:`forward`.

    Args:
        dispatcher: As in forward.
        plans: As in forward: the adjoint maps run over the same plans.
        kept: What each chunk kept.
        grad_TH: ``[T, H]``, the gradient of the output.
        tokens_TH: The layer's input; needed where the rows were not kept.
        weights_TK: The routing weights; needed where they were not kept.
        experts: The local experts' matrices.
        needs_weight_grad: Whether the gradients of the two matrices are wanted.
        weight_grad_scale: Factor on these two, applied before they are converted.
        grad_tokens_TH: A buffer for the input's gradient; allocated where it is not given.

    """
    num_slots = plans[0].by_expert.copies_MJ.shape[1]
    dtype = accumulation_dtype(grad_TH.dtype)
    if grad_tokens_TH is None:
        grad_tokens_TH = torch.empty_like(grad_TH)
    grad_weights_TK = torch.empty(grad_TH.shape[0], num_slots, dtype=dtype, device=grad_TH.device)
    grad_gate_up, grad_down = (
        _WeightGradient(weight, len(plans), weight_grad_scale) if needed else None
        for weight, needed in zip(experts, needs_weight_grad, strict=True)
    )

    def arrive(chunk: tuple[Plan, Kept]) -> tuple[Communication, list[Tensor]]:
        plan, held = chunk
        again = [tokens_TH if held.rows_RH is None else None, weights_TK if held.weights_R is None else None]
        outgoing = [tensor[plan.tokens] for tensor in (grad_TH, *again) if tensor is not None]
        return _dispatch(dispatcher, plan, outgoing)

    def work(chunk: tuple[Plan, Kept], arrived: list[Tensor]) -> _BackwardChunk:
        plan, held = chunk
        grad_NH, *again = arrived
        arrived.clear()  # the received rows go as soon as they are sorted
        rows_RH, gate_up_R2F, weights_R = _rebuild(plan, held, again, experts)
        grad_out_RH = gather(grad_NH, plan.by_expert)
        del grad_NH
        grad_act_RF = grouped_mm(grad_out_RH, experts.down_eHF, plan.groups)
        # what is rebuilt here is read once more at most, so it shares its memory with the gradient that takes its place
        act_RF = grad_act_RF if held.act_RF is None else held.act_RF
        grad_gate_up_R2F, grad_weights_R = swiglu_backward(
            grad_act_RF,
            gate_up_R2F,
            weights_R,
            act_RF=act_RF if held.act_RF is None else None,
            grad_gate_up_R2F=gate_up_R2F if held.gate_up_R2F is None else None,
        )
        grad_rows_RH = grouped_mm(grad_gate_up_R2F, experts.gate_up_e2FH, plan.groups)

        home_TH, home_TK = grad_tokens_TH[plan.tokens], grad_weights_TK[plan.tokens]
        grad_rows_NH = dispatcher.rows_like(plan, home_TH)
        reduce(grad_rows_RH, plan.by_expert, grad_rows_NH)
        grad_weights_NK = dispatcher.rows_like(plan, home_TK)
        grad_weights_NK.zero_().view(-1).index_copy_(0, plan.slots_R.long(), grad_weights_R)
        return _BackwardChunk(
            [grad_rows_NH, grad_weights_NK], [home_TH, home_TK], (grad_gate_up_R2F, rows_RH), (grad_out_RH, act_RF)
        )

    def leave(chunk: tuple[Plan, Kept], product: _BackwardChunk) -> Communication:
        return Communication(dispatcher.combine, (chunk[0], product.rows, product.homes))

    def finish(chunk: tuple[Plan, Kept], product: _BackwardChunk) -> None:
        if grad_gate_up is not None:
            grad_gate_up.add(*product.gate_up_operands, chunk[0].groups)
        if grad_down is not None:
            grad_down.add(*product.down_operands, chunk[0].groups)

    pipeline(Lanes(grad_TH.device), list(zip(plans, kept, strict=True)), arrive, work, leave, finish)
    return Gradients(
        grad_tokens_TH,
        grad_weights_TK,
        None if grad_gate_up is None else grad_gate_up.sum_eMN,
        None if grad_down is None else grad_down.sum_eMN,
    )


def forward_backward(
    dispatcher: Dispatcher,
    plans: Sequence[Plan],
    grad_TH: Tensor,
    tokens_TH: Tensor,
    weights_TK: Tensor,
    experts: Weights,
    needs_weight_grad: tuple[bool, bool] = (True, True),
    weight_grad_scale: float = 1.0,
    grad_tokens_TH: Tensor | None = None,
) -> Gradients:
    """The recompute of a graph-free :func:`forward`, fused with its :func:`backward`: nothing was kept.

    The arguments are those of :func:`backward`. Input and output gradient of a chunk are dispatched together.
    """
    nothing = [Kept()] * len(plans)
    return backward(
        dispatcher,
        plans,
        nothing,
        grad_TH,
        tokens_TH,
        weights_TK,
        experts,
        needs_weight_grad,
        weight_grad_scale,
        grad_tokens_TH,
    )


class _BackwardChunk(NamedTuple):
    """What one chunk's backward hands on: to combine, and to the weight gradients, which nobody waits for."""

    rows: list[Tensor]
    homes: list[Tensor]
    gate_up_operands: tuple[Tensor, Tensor]
    down_operands: tuple[Tensor, Tensor]


class _WeightGradient:
    """One matrix's gradient, summed over chunks in float32 (float64) and rounded once, with the last chunk."""

    def __init__(self, weight_eMN: Tensor, num_chunks: int, scale: float) -> None:
        self.sum_eMN: Tensor | None = None
        self._weight, self._left, self._scale = weight_eMN, num_chunks, scale

    def add(self, grad_RM: Tensor, rows_RN: Tensor, groups: Groups) -> None:
        self._left -= 1
        last = self._left == 0
        dtype = self._weight.dtype if last else accumulation_dtype(self._weight.dtype)
        out_eMN = self.sum_eMN
        if out_eMN is None or out_eMN.dtype != dtype:
            out_eMN = torch.empty(self._weight.shape, dtype=dtype, device=self._weight.device)
        weight_gradient(out_eMN, grad_RM, rows_RN, groups, self.sum_eMN, self._scale if last else 1.0)
        self.sum_eMN = out_eMN


def _rebuild(plan: Plan, kept: Kept, again: list[Tensor], experts: Weights) -> tuple[Tensor, Tensor, Tensor]:
    """What backward reads: kept, or computed again, as forward did, from what was dispatched again.

    The activation is not among it: it falls out of its own backward.
    """
    rows_RH, gate_up_R2F, weights_R = kept.rows_RH, kept.gate_up_R2F, kept.weights_R
    if rows_RH is None:
        rows_RH = gather(again.pop(0), plan.by_expert)
    if weights_R is None:
        weights_R = _weights_by_expert(again.pop(0), plan)
    if gate_up_R2F is None:
        gate_up_R2F = grouped_mm(rows_RH, experts.gate_up_e2FH.mT, plan.groups)
    return rows_RH, gate_up_R2F, weights_R


def _weights_by_expert(weights_NK: Tensor, plan: Plan) -> Tensor:
    """The routing weight of each row sorted by expert, ``[R]``."""
    return weights_NK.reshape(-1).index_select(0, plan.slots_R)


def _dispatch(dispatcher: Dispatcher, plan: Plan, tokens: list[Tensor]) -> tuple[Communication, list[Tensor]]:
    """The dispatch of several tensors of one chunk, and the rows that it will fill."""
    rows = [dispatcher.rows_like(plan, tokens_TX) for tokens_TX in tokens]
    return Communication(dispatcher.dispatch, (plan, tokens, rows)), rows
