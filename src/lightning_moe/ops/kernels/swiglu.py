"""The gated activation with the routing weight inside, one pass over memory forward and one backward.

Legend: R rows sorted by expert, F the experts' intermediate width.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lightning_moe.ops.kernels.launch import blocks, launch, power_of_2

BLOCK_F = 256  # at most; widths are multiples of it in practice, and a power of two near the width itself is not
TILE = 1024  # elements that a program holds at a time


def swiglu_rows(gate_up_R2F: Tensor, weights_R: Tensor, act_RF: Tensor) -> None:
    """Write ``silu(gate) * up * weight``.

    Args:
        gate_up_R2F: ``[R, 2F]``, contiguous, R and F at least 1.
        weights_R: float32 ``[R]``, contiguous.
        act_RF: ``[R, F]``, contiguous, written.

    """
    num_rows, width = act_RF.shape
    block_r, block_f = _blocks(width)
    launch(
        _forward_kernel,
        (blocks(num_rows, block_r), blocks(width, block_f)),
        (gate_up_R2F, weights_R, act_RF),
        (num_rows,),
        (width, block_r, block_f),
    )


def swiglu_backward_rows(
    grad_RF: Tensor,
    gate_up_R2F: Tensor,
    weights_R: Tensor,
    grad_gate_up_R2F: Tensor,
    grad_weights_R: Tensor,
    act_RF: Tensor | None,
) -> None:
    """Write the gradients, and the activation where a buffer for it is given.

    Args:
        grad_RF: ``[R, F]``, contiguous, R and F at least 1.
        gate_up_R2F: ``[R, 2F]``, contiguous.
        weights_R: float32 ``[R]``, contiguous.
        grad_gate_up_R2F: ``[R, 2F]``, contiguous, written; may be ``gate_up_R2F`` itself.
        grad_weights_R: float32 ``[R]``, contiguous, written.
        act_RF: ``[R, F]``, contiguous, written; may be ``grad_RF`` itself.

    """
    num_rows, width = grad_RF.shape
    block_r, block_f = _blocks(width)
    launch(
        _backward_kernel,
        (blocks(num_rows, block_r),),
        (grad_RF, gate_up_R2F, weights_R, grad_gate_up_R2F, grad_weights_R, act_RF),
        (num_rows,),
        (width, block_r, block_f),
    )


def _blocks(width: int) -> tuple[int, int]:
    block_f = min(power_of_2(width), BLOCK_F)
    return TILE // block_f, block_f


@triton.jit(do_not_specialize=["num_rows"])
def _forward_kernel(
    gate_up_ptr, weights_ptr, act_ptr, num_rows, WIDTH: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_F: tl.constexpr
):
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    f = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)[None, :]
    inside = (r < num_rows) & (f < WIDTH)
    gate_ptr = gate_up_ptr + r.to(tl.int64) * (2 * WIDTH) + f
    gate = tl.load(gate_ptr, mask=inside).to(tl.float32)
    up = tl.load(gate_ptr + WIDTH, mask=inside).to(tl.float32)
    weight = tl.load(weights_ptr + r, mask=r < num_rows)
    act = gate * tl.sigmoid(gate) * up * weight
    tl.store(act_ptr + r.to(tl.int64) * WIDTH + f, act.to(act_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _backward_kernel(
    grad_ptr,
    gate_up_ptr,
    weights_ptr,
    grad_gate_up_ptr,
    grad_weights_ptr,
    act_ptr,
    num_rows,
    WIDTH: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """A program owns whole rows, so that each weight's gradient is one sum in a fixed order."""
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    weight = tl.load(weights_ptr + r, mask=r < num_rows)
    line, line_of_two = r.to(tl.int64) * WIDTH, r.to(tl.int64) * (2 * WIDTH)
    products = tl.zeros((BLOCK_R, BLOCK_F), tl.float32)
    for start in tl.range(0, WIDTH, BLOCK_F):
        f = start + tl.arange(0, BLOCK_F)[None, :]
        inside = (r < num_rows) & (f < WIDTH)
        grad = tl.load(grad_ptr + line + f, mask=inside, other=0.0).to(tl.float32)
        gate = tl.load(gate_up_ptr + line_of_two + f, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gate_up_ptr + line_of_two + WIDTH + f, mask=inside, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        products += grad * silu * up
        if act_ptr is not None:
            tl.store(act_ptr + line + f, (silu * up * weight).to(act_ptr.dtype.element_ty), mask=inside)
        grad *= weight
        dtype = grad_gate_up_ptr.dtype.element_ty
        grad_gate = grad * up * (sigmoid + silu * (1 - sigmoid))
        tl.store(grad_gate_up_ptr + line_of_two + f, grad_gate.to(dtype), mask=inside)
        tl.store(grad_gate_up_ptr + line_of_two + WIDTH + f, (grad * silu).to(dtype), mask=inside)
    total = tl.sum(products, 1)[:, None]
    tl.store(grad_weights_ptr + r, total, mask=r < num_rows)
