"""The primitives of ChunkedEP: ``forward``, and ``backward``, into which recompute is fused.

Each runs the chunks that the plans name through one pipeline. They work on plain tensors, and know nothing
of autograd, recompute policies or optimizers; :mod:`lightning_moe.overlap.function` composes them.

    forward    dispatch -> sort -> gather -> grouped GEMM -> SwiGLU x routing weight -> grouped GEMM -> reduce -> combine
    backward   the adjoint of each step, in reverse: combine's adjoint is dispatch, reduce's is gather; what forward did
               not keep is rebuilt on the way, chunk by chunk

Legend: T local tokens, H hidden, F the experts' intermediate width, K experts per token, e local experts, N received
rows, R rows sorted by expert. A chunk has its own T, N and R.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_moe.dispatch.base import Arriving, Dispatcher, Leaving, Plan
from lightning_moe.ops.grouped_mm import grouped_mm, grouped_mm_swiglu
from lightning_moe.ops.routing import Order, sort_by_expert
from lightning_moe.ops.rows import RowMap, collect, gather, reduce
from lightning_moe.ops.swiglu import swiglu_backward
from lightning_moe.overlap.gradient_sums import GradientTarget
from lightning_moe.overlap.lanes import Communication, Lanes, pipeline
from lightning_moe.overlap.weight_gradients import ChunkGroups, WeightGradient, chunk_rows
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
    """What forward leaves for backward; what is ``None`` is rebuilt there.

    Args:
        orders: How each chunk's received rows are sorted by expert.
        rows_RH: The first grouped GEMM's input, all chunks in turn.
        gate_up_R2F: Its output, the activation's input, likewise.
        act_RF: The second grouped GEMM's input, likewise.

    """

    orders: tuple[Order, ...]
    rows_RH: Tensor | None = None
    gate_up_R2F: Tensor | None = None
    act_RF: Tensor | None = None


class Gradients(NamedTuple):
    """Gradients of one layer call; a weight's is ``None`` where it was not asked for, or is held by its target.

    Args:
        tokens_TH: Of the layer's input, in its dtype.
        weights_TK: Of the routing weights, float32 (float64).
        gate_up_e2FH: Of the first matrix, summed over chunks in float32 (float64), converted to its target's dtype once.
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
) -> tuple[Tensor, Kept]:
    """The routed experts' output for the local tokens.

    Args:
        dispatcher: Moves rows between ranks.
        plans: From ``dispatcher.plan``, for these very routing weights.
        tokens_TH: ``[T, H]``, the layer's input, in the experts' dtype.
        weights_TK: ``[T, K]``, routing weights, float32 (float64 for float64 tokens).
        experts: The local experts' matrices.
        mode: What to keep for backward.
        out_TH: A buffer for the result; allocated where it is not given.

    Returns:
        ``[T, H]``, and what is kept.

    """
    if out_TH is None:
        out_TH = tokens_TH.new_empty(tokens_TH.shape)
    orders: list[Order] = []
    places = chunk_rows(plan.num_sorted for plan in plans)
    num_sorted, (width, hidden) = places[-1].stop, (experts.down_eHF.shape[2], tokens_TH.shape[1])
    all_rows_RH = tokens_TH.new_empty(num_sorted, hidden) if mode in ("none", "act") else None
    all_gate_up_R2F = tokens_TH.new_empty(num_sorted, 2 * width) if mode != "full" else None
    all_act_RF = tokens_TH.new_empty(num_sorted, width) if mode == "none" else None

    def arrive(i: int) -> tuple[Communication | None, list[Arriving]]:
        plan = plans[i]
        outgoing = [tokens_TH[plan.tokens]]
        if plan.order is not None:
            orders.append(plan.order)
            arriving = dispatcher.arriving(plan, outgoing)
            return _travelling(plan, dispatcher.dispatch, outgoing, arriving), [arriving]
        outgoing += [weights_TK[plan.tokens], plan.ids_TK]
        arriving = dispatcher.arriving(plan, outgoing)
        orders.append(Order.empty(plan.num_rows, weights_TK.shape[1], len(plan.experts), plan.num_sorted, weights_TK))
        return Communication(dispatch_and_sort, (plan, outgoing, arriving, orders[i])), [arriving]

    def dispatch_and_sort(plan: Plan, outgoing: list[Tensor], arriving: Arriving, order: Order) -> None:
        if plan.route is not None:
            dispatcher.dispatch(plan, outgoing, arriving)
        _, weights_NK, ids_NK = arriving.rows
        sort_by_expert(ids_NK, weights_NK, plan.experts.start, order)

    def take(i: int, arrived: list[Arriving]) -> list[Tensor]:
        sort = orders[i].by_expert
        rows_RH = tokens_TH.new_empty(sort.num_copies, hidden) if all_rows_RH is None else all_rows_RH[places[i]]
        gather(arrived.pop().rows[0], sort, rows_RH)  # what arrived goes as soon as it is sorted
        return [rows_RH]

    def work(i: int, rows: list[Tensor]) -> list[Tensor]:
        order, place, rows_RH = orders[i], places[i], rows.pop()
        num_rows = order.by_expert.num_copies
        act_RF = tokens_TH.new_empty(num_rows, width) if all_act_RF is None else all_act_RF[place]
        gate_up_R2F = None if all_gate_up_R2F is None else all_gate_up_R2F[place]
        grouped_mm_swiglu(rows_RH, experts.gate_up_e2FH, order.weights_R, order.groups, act_RF, gate_up_R2F)
        del rows_RH  # unless it is kept, the output takes its memory
        out_RH = tokens_TH.new_empty(num_rows, hidden)
        grouped_mm(act_RF, experts.down_eHF.mT, order.groups, out_RH)
        return [out_RH]

    def leave(i: int, out: list[Tensor]) -> Communication | None:
        plan = plans[i]
        homes = [out_TH[plan.tokens]]
        leaving = dispatcher.leaving(plan, homes)
        _fill(leaving, out.pop(), None, orders[i])
        return _travelling(plan, dispatcher.combine, leaving, homes)

    pipeline(Lanes(tokens_TH.device), range(len(plans)), arrive, take, work, leave)
    return out_TH, Kept(tuple(orders), all_rows_RH, all_gate_up_R2F, all_act_RF)


def backward(
    dispatcher: Dispatcher,
    plans: Sequence[Plan],
    kept: Kept,
    grad_TH: Tensor,
    tokens_TH: Tensor | None,
    experts: Weights,
    targets: Sequence[GradientTarget | None],
    grad_tokens_TH: Tensor | None = None,
) -> Gradients:
    """The gradients of :func:`forward`.

    What was not kept is rebuilt, chunk by chunk: with nothing kept but the orders this is the recompute of a graph-free
    forward fused with its backward. It needs neither the second grouped GEMM nor a combine, since nothing in backward reads
    the layer's output. Input and output gradient of a chunk are dispatched together.

    Args:
        dispatcher: As in forward.
        plans: As in forward: the adjoint maps run over the same plans.
        kept: What forward kept.
        grad_TH: ``[T, H]``, the gradient of the output.
        tokens_TH: The layer's input; needed where the rows were not kept.
        experts: The local experts' matrices.
        targets: What the gradients of the two matrices are added to and converted to; ``None`` where one is not wanted.
        grad_tokens_TH: A buffer for the input's gradient; allocated where it is not given.

    """
    orders, (gate_up_e2FH, down_eHF) = kept.orders, experts
    if grad_tokens_TH is None:
        grad_tokens_TH = grad_TH.new_empty(grad_TH.shape)
    num_slots = orders[0].by_expert.copies_MJ.shape[1]
    grad_weights_TK = orders[0].weights_R.new_empty(grad_TH.shape[0], num_slots)
    groups = ChunkGroups([order.groups for order in orders])
    frugal = kept.rows_RH is None
    of_gate_up, of_down = (
        None if target is None else WeightGradient(weight, groups, target, inputs, frugal)
        for weight, inputs, target in zip(experts, (kept.rows_RH, kept.act_RF), targets, strict=True)
    )
    places = groups.rows

    def arrive(i: int) -> tuple[Communication | None, list[Arriving]]:
        plan = plans[i]
        outgoing = [grad_TH[plan.tokens]]
        if kept.rows_RH is None:
            assert tokens_TH is not None
            outgoing.append(tokens_TH[plan.tokens])
        arriving = dispatcher.arriving(plan, outgoing)
        return _travelling(plan, dispatcher.dispatch, outgoing, arriving), [arriving]

    def take(i: int, arrived: list[Arriving]) -> list[_Taken]:
        sort, received = orders[i].by_expert, list(arrived.pop().rows)
        shape = (sort.num_copies, grad_TH.shape[1])
        grad_gate_up_R2F, rows_RH = _operands(of_gate_up, i)
        grad_out_RH, act_RF = _operands(of_down, i)
        if kept.rows_RH is None:
            rows_RH = grad_TH.new_empty(shape) if rows_RH is None else rows_RH
            gather(received.pop(), sort, rows_RH)
        else:
            rows_RH = kept.rows_RH[places[i]]
        grad_out_RH = grad_TH.new_empty(shape) if grad_out_RH is None else grad_out_RH
        gather(received.pop(), sort, grad_out_RH)
        return [(rows_RH, grad_out_RH, grad_gate_up_R2F, act_RF)]

    def work(i: int, taken: list[_Taken]) -> _BackwardChunk:
        order, group, num_rows = orders[i], orders[i].groups, orders[i].by_expert.num_copies
        rows_RH, grad_out_RH, grad_gate_up_R2F, act_RF = taken.pop()
        # what is rebuilt here is read once more at most, so it shares its memory with the gradient that takes its place
        if grad_gate_up_R2F is None:
            grad_gate_up_R2F = grad_TH.new_empty(num_rows, gate_up_e2FH.shape[1])
        if kept.gate_up_R2F is None:
            gate_up_R2F = grad_gate_up_R2F
            grouped_mm(rows_RH, gate_up_e2FH.mT, group, gate_up_R2F)
        else:
            gate_up_R2F = kept.gate_up_R2F[places[i]]

        grad_act_RF = grad_TH.new_empty(num_rows, down_eHF.shape[2])
        grouped_mm(grad_out_RH, down_eHF, group, grad_act_RF)
        factors = (grad_act_RF, gate_up_R2F, order.weights_R, grad_gate_up_R2F)
        if kept.act_RF is None:
            act_RF = grad_act_RF if act_RF is None else act_RF
            grad_weights_R = swiglu_backward(*factors, act_RF)
        else:
            act_RF = kept.act_RF[places[i]]
            grad_weights_R = swiglu_backward(*factors)
        del factors, gate_up_R2F, grad_act_RF
        waiting: list[_Summand] = []
        _add(of_down, i, grad_out_RH, act_RF, waiting)
        del grad_out_RH, act_RF
        was_read = _add(of_gate_up, i, grad_gate_up_R2F, rows_RH, waiting)
        grad_rows_RH = rows_RH if was_read and kept.rows_RH is None else torch.empty_like(rows_RH)
        grouped_mm(grad_gate_up_R2F, gate_up_e2FH, group, grad_rows_RH)
        return _BackwardChunk([grad_rows_RH], grad_weights_R, waiting)

    def leave(i: int, product: _BackwardChunk) -> Communication | None:
        plan = plans[i]
        homes = [grad_tokens_TH[plan.tokens], grad_weights_TK[plan.tokens]]
        leaving = dispatcher.leaving(plan, homes)
        _fill(leaving, product.grad_rows.pop(), product.grad_weights_R, orders[i])
        return _travelling(plan, dispatcher.combine, leaving, homes)

    def finish(i: int, product: _BackwardChunk) -> None:
        while product.waiting:
            gradient, grad_RM, rows_RN = product.waiting.pop(0)
            gradient.add(i, grad_RM, rows_RN)
            del grad_RM, rows_RN  # before the next gradient is made

    pipeline(Lanes(grad_TH.device), range(len(plans)), arrive, take, work, leave, finish)
    return Gradients(
        grad_tokens_TH,
        grad_weights_TK,
        None if of_gate_up is None else of_gate_up.result_eMN,
        None if of_down is None else of_down.result_eMN,
    )


_Taken = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""A chunk's rows and output gradients; where gate and up's gradients and the activation must lie, ``None`` for anywhere."""


class _BackwardChunk(NamedTuple):
    """What one chunk's backward hands on: to what leaves, and to the weight gradients, which nobody waits for."""

    grad_rows: list[Tensor]
    grad_weights_R: Tensor
    waiting: list[_Summand]


_Summand = tuple[WeightGradient, Tensor, Tensor]
"""What is to be added to a weight's gradient: its two operands."""


def _add(
    gradient: WeightGradient | None, chunk: int, grad_RM: Tensor, rows_RN: Tensor, waiting: list[_Summand]
) -> bool:
    """Add a chunk's part at once where memory counts, else while nobody waits for it; returns whether the operands can go."""
    if gradient is None:
        return True
    if gradient.at_once:
        return gradient.add(chunk, grad_RM, rows_RN)
    waiting.append((gradient, grad_RM, rows_RN))
    return False


def _travelling(plan: Plan, run: Callable[..., None], *args: object) -> Communication | None:
    """A dispatch or a combine, if there is anything to do."""
    return None if plan.route is None else Communication(run, (plan, *args))


def _fill(leaving: Leaving, rows_RH: Tensor, weights_R: Tensor | None, order: Order) -> None:
    """Sum the sorted rows of each received one, and bring its weights' numbers together, where the rows leave from."""
    copies_NK, num_sorted = order.by_expert.copies_MJ, order.by_expert.num_copies
    for place in leaving.places:
        part = RowMap(copies_NK[place.rows], num_sorted)
        reduce(rows_RH, part, place.out[0], place.num_summed)
        if weights_R is not None:
            collect(weights_R, part, place.out[1], place.num_summed)


def _operands(gradient: WeightGradient | None, chunk: int) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if gradient is None else gradient.operands(chunk)
