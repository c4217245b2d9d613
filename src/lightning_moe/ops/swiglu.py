"""The experts' gated activation, with the routing weight inside it.

The routing weight of a row multiplies the activation instead of the expert's output. The result is the same, since the
second matrix product is linear in its rows, and the second product's output is then not needed in backward.

Legend: R rows sorted by expert, F the experts' intermediate width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_moe.ops import kernels
from lightning_moe.ops.rows import accumulation_dtype


def swiglu(gate_up_R2F: Tensor, weights_R: Tensor, act_RF: Tensor) -> None:
    """``silu(gate) * up * weight``, computed in float32 (float64 for float64 input).

    Args:
        gate_up_R2F: ``[R, 2F]``: the gate's F columns, then the up projection's.
        weights_R: ``[R]``, routing weights, float32 or float64.
        act_RF: ``[R, F]``, contiguous, in the dtype of ``gate_up_R2F``, written.

    """
    if gate_up_R2F.shape[0] and kernels.serve(gate_up_R2F) and weights_R.dtype == torch.float32:
        kernels.swiglu.swiglu_rows(gate_up_R2F.contiguous(), weights_R.contiguous(), act_RF)
        return
    gate_RF, up_RF = gate_up_R2F.to(accumulation_dtype(gate_up_R2F.dtype)).chunk(2, dim=-1)
    act_RF.copy_(F.silu(gate_RF) * up_RF * weights_R.unsqueeze(1))


def swiglu_backward(
    grad_RF: Tensor,
    gate_up_R2F: Tensor,
    weights_R: Tensor,
    grad_gate_up_R2F: Tensor,
    act_RF: Tensor | None = None,
) -> Tensor:
    r"""The gradients of :func:`swiglu`, and the activation itself where a buffer for it is given.

    With s the logistic function, silu'(g) = s(g) (1 + g (1 - s(g))).

    Args:
        grad_RF: ``[R, F]``, the gradient of the activation.
        gate_up_R2F: ``[R, 2F]``, the forward input.
        weights_R: ``[R]``, routing weights.
        grad_gate_up_R2F: ``[R, 2F]``, contiguous, the first gradient in the dtype of ``gate_up_R2F``, written. It may be
            ``gate_up_R2F``, which is then overwritten.
        act_RF: ``[R, F]``, contiguous, :func:`swiglu`'s output, rebuilt in the same pass. It may be ``grad_RF``, which is
            then overwritten.

    Returns:
        The gradient of ``weights_R``, ``[R]``, in its dtype.

    """
    if grad_RF.shape[0] and kernels.serve(grad_RF) and weights_R.dtype == torch.float32:
        grad_weights_R = torch.empty_like(weights_R)
        inputs = (grad_RF.contiguous(), gate_up_R2F.contiguous(), weights_R.contiguous())
        kernels.swiglu.swiglu_backward_rows(*inputs, grad_gate_up_R2F, grad_weights_R, act_RF)
        return grad_weights_R
    dtype = accumulation_dtype(gate_up_R2F.dtype)
    gate_RF, up_RF = gate_up_R2F.to(dtype).chunk(2, dim=-1)
    sigmoid_RF = gate_RF.sigmoid()
    silu_RF = gate_RF * sigmoid_RF
    product_RF = silu_RF * up_RF
    grad_weights_R = (grad_RF.to(dtype) * product_RF).sum(-1)
    weighted_RF = grad_RF.to(dtype) * weights_R.unsqueeze(1)
    if act_RF is not None:
        act_RF.copy_(F.silu(gate_RF) * up_RF * weights_R.unsqueeze(1))  # as forward writes it: the same bits
    grad_gate_RF, grad_up_RF = grad_gate_up_R2F.chunk(2, dim=-1)
    grad_gate_RF.copy_(weighted_RF * up_RF * (sigmoid_RF + silu_RF * (1 - sigmoid_RF)))
    grad_up_RF.copy_(weighted_RF * silu_RF)
    return grad_weights_R
