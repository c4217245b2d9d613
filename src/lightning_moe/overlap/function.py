"""One autograd Function over both primitives, in four modes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_moe.dispatch.base import Dispatcher, Plan
from lightning_moe.ops.grouped_mm import Groups
from lightning_moe.ops.local import as_part_of, local_part
from lightning_moe.ops.routing import Order
from lightning_moe.ops.rows import RowMap
from lightning_moe.overlap import primitives
from lightning_moe.overlap.gradient_sums import GradientSum, GradientTarget
from lightning_moe.overlap.kept import name_kept
from lightning_moe.overlap.primitives import Kept, Weights
from lightning_moe.recompute.policy import RoutedMode

Watcher = Callable[[Sequence[Plan], Sequence[Tensor]], None]
"""Is told of a forward: its plans and what it keeps for backward. Before it has run it keeps nothing."""

watchers: list[Watcher] = []
"""Each is called twice in every forward of routed experts, before and after it; an error in one is the forward's."""


def chunked_experts(
    tokens_TH: Tensor,
    weights_TK: Tensor,
    gate_up_e2FH: Tensor,
    down_eHF: Tensor,
    dispatcher: Dispatcher,
    plans: Sequence[Plan],
    mode: RoutedMode,
    weight_grad_scale: float = 1.0,
    sums: tuple[GradientSum, GradientSum] | None = None,
) -> Tensor:
    """The routed experts' output, differentiable in tokens, routing weights and both matrices.

    Args:
        tokens_TH: ``[T, H]``, local tokens, in the dtype to compute in.
        weights_TK: ``[T, K]``, routing weights, float32 (float64 for float64 tokens).
        gate_up_e2FH: ``[e, 2F, H]``, local, or a DTensor with such a part on each rank. Where its dtype is another one, it is
            converted for the time of forward and again for that of backward, and the gradient has its own.
        down_eHF: ``[e, H, F]``, likewise.
        dispatcher: Moves rows between ranks.
        plans: From ``dispatcher.plan``, for these very routing weights.
        mode: What is kept for backward; see :class:`~lightning_moe.recompute.RecomputePolicy`.
        weight_grad_scale: Factor on the gradients of the two matrices.
        sums: Of the two matrices: they may hold gradients until a later backward's are added to them.

    Returns:
        ``[T, H]``. The gradient of each matrix is handed to autograd once, whatever the number of chunks.

    """
    tensors = (tokens_TH, weights_TK, gate_up_e2FH, down_eHF)
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in tensors):
        out_TH, _, _ = _forward(*tensors[:2], tensors[2:], dispatcher, plans, "full")
        _tell_watchers(plans, [])  # no backward will come: nothing is kept
        return out_TH
    options = (mode, weight_grad_scale, sums or (None, None))
    result: Tensor = _ChunkedExperts.apply(*tensors, dispatcher, plans, *options)  # type: ignore[no-untyped-call]
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
        sums: tuple[GradientSum | None, GradientSum | None],
    ) -> Tensor:
        matrices = (gate_up_e2FH, down_eHF)
        out_TH, kept, local = _forward(tokens_TH, weights_TK, matrices, dispatcher, plans, mode)
        ctx.dispatcher, ctx.plans, ctx.weight_grad_scale, ctx.sums = dispatcher, plans, weight_grad_scale, sums
        ctx.matrices = matrices
        ctx.restore, tensors = _flattened(kept)
        tensors = [tokens_TH if kept.rows_RH is None else None, *tensors]
        # of DTensors the parts: others' hooks for saved tensors may not know DTensors
        ctx.save_for_backward(*local, *tensors)
        _tell_watchers(plans, tensors)
        return out_TH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TH: Tensor) -> tuple[Tensor | None, ...]:
        gate_up_e2FH, down_eHF, tokens_TH, *tensors = ctx.saved_tensors
        grad_TH = grad_TH.contiguous()  # `sum().backward()` sends an expanded scalar
        targets = [
            _target(node, matrix.dtype, ctx.weight_grad_scale, held)
            for (node, _), matrix, held in zip(ctx.next_functions[2:4], ctx.matrices, ctx.sums, strict=True)
        ]
        with _without_autocast(grad_TH.device.type):
            grads = primitives.backward(
                ctx.dispatcher,
                ctx.plans,
                ctx.restore(tensors),
                grad_TH,
                tokens_TH,
                _converted((gate_up_e2FH, down_eHF), grad_TH.dtype),
                targets,
            )
        of_matrices = [
            None if grad is None else as_part_of(grad, matrix)
            for grad, matrix in zip(grads[2:], ctx.matrices, strict=True)
        ]
        return (*grads[:2], *of_matrices, *[None] * 5)


def _forward(
    tokens_TH: Tensor,
    weights_TK: Tensor,
    matrices: Sequence[Tensor],
    dispatcher: Dispatcher,
    plans: Sequence[Plan],
    mode: RoutedMode,
) -> tuple[Tensor, Kept, list[Tensor]]:
    """The output, what is kept, and the local parts of the matrices; watchers are told that it begins."""
    local = [local_part(matrix) for matrix in matrices]
    experts = _converted(local, tokens_TH.dtype)
    _tell_watchers(plans, [])
    with _without_autocast(tokens_TH.device.type):
        out_TH, kept = primitives.forward(dispatcher, plans, tokens_TH, weights_TK, experts, mode)
    return out_TH, kept, local


def _tell_watchers(plans: Sequence[Plan], kept: Sequence[Tensor | None]) -> None:
    for watcher in watchers:
        watcher(plans, [tensor for tensor in kept if tensor is not None])


def _target(node: Any, dtype: torch.dtype, scale: float, held: GradientSum | None) -> GradientTarget | None:
    """What becomes of a matrix's gradient in the backward that is running.

    Args:
        node: Where autograd takes it; ``None`` for a matrix that is frozen.
        dtype: Of the matrix.
        scale: Factor on the gradient.
        held: The sum over micro-batches, if there is one.

    """
    if node is None:
        return None
    try:
        is_wanted = torch._C._will_engine_execute_node(node)
    except RuntimeError:  # so torch answers where `autograd.grad` asks for this very leaf: nothing is to be accumulated
        return GradientTarget(dtype, scale)
    return GradientTarget.of(dtype, scale, held) if is_wanted else None


def _converted(matrices: Sequence[Tensor], dtype: torch.dtype) -> Weights:
    """Both in the dtype to compute in; `to` is asked only where it has something to do, since the device waits meanwhile."""
    return Weights(*(matrix if matrix.dtype == dtype else matrix.to(dtype) for matrix in matrices))


def _without_autocast(device_type: str) -> AbstractContextManager[Any]:
    # the context takes the host longer than a launch: it is entered where it is needed
    return torch.autocast(device_type, enabled=False) if torch.is_autocast_enabled(device_type) else nullcontext()


def _flattened(kept: Kept) -> tuple[Callable[[Sequence[Any]], Kept], list[Tensor | None]]:
    """The tensors, for autograd to hold, and how to put them back."""
    sizes = [order.groups.num_rows for order in kept.orders]
    tensors: list[Tensor | None] = [kept.rows_RH, kept.gate_up_R2F, kept.act_RF]
    name_kept(kept.rows_RH, kept.gate_up_R2F, kept.act_RF)
    for order in kept.orders:
        tensors += [order.by_expert.copies_MJ, order.groups.ends_e, order.weights_R]

    def restore(saved: Sequence[Any]) -> Kept:
        rows_RH, gate_up_R2F, act_RF, *rest = saved
        orders = tuple(
            Order(RowMap(copies_NK, num_sorted), Groups(num_sorted, ends_e), weights_R)
            for num_sorted, copies_NK, ends_e, weights_R in zip(sizes, rest[::3], rest[1::3], rest[2::3], strict=True)
        )
        return Kept(orders, rows_RH, gate_up_R2F, act_RF)

    return restore, tensors
