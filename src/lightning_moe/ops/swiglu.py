"""The experts' gated activation, with the routing weight inside it.

The routing weight of a row multiplies the activation instead of the expert's output. The result is the same, since the
second matrix product is linear in its rows, and the second product's output is then not needed in backward.

Legend: R rows sorted by expert, F the experts' intermediate width.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from lightning_moe.ops.rows import accumulation_dtype


def swiglu(gate_up_R2F: Tensor, weights_R: Tensor) -> Tensor:
    """``silu(gate) * up * weight``, computed in float32 (float64 for float64 input).

    Args:
        gate_up_R2F: ``[R, 2F]``: the gate's F columns, then the up projection's.
        weights_R: ``[R]``, routing weights, float32 or float64.

    Returns:
        ``[R, F]`` in the dtype of ``gate_up_R2F``.

    """
    gate_RF, up_RF = gate_up_R2F.to(accumulation_dtype(gate_up_R2F.dtype)).chunk(2, dim=-1)
    return (F.silu(gate_RF) * up_RF * weights_R.unsqueeze(1)).to(gate_up_R2F.dtype)


def swiglu_backward(grad_RF: Tensor, gate_up_R2F: Tensor, weights_R: Tensor) -> tuple[Tensor, Tensor]:
    r"""The gradients of :func:`swiglu`.

    With s the logistic function, silu'(g) = s(g) (1 + g (1 - s(g))).

    Args:
        grad_RF: ``[R, F]``, the gradient of the activation.
        gate_up_R2F: ``[R, 2F]``, the forward input.
        weights_R: ``[R]``, routing weights.

    Returns:
        The gradient of ``gate_up_R2F`` in its dtype, and of ``weights_R``, ``[R]``, in float32 (float64).

    """
    dtype = accumulation_dtype(gate_up_R2F.dtype)
    gate_RF, up_RF = gate_up_R2F.to(dtype).chunk(2, dim=-1)
    grad_RF = grad_RF.to(dtype)
    sigmoid_RF = gate_RF.sigmoid()
    silu_RF = gate_RF * sigmoid_RF
    grad_weights_R = (grad_RF * silu_RF * up_RF).sum(-1)
    grad_RF = grad_RF * weights_R.unsqueeze(1)
    grad_gate_up_R2F = gate_up_R2F.new_empty(gate_up_R2F.shape)
    grad_gate_RF, grad_up_RF = grad_gate_up_R2F.chunk(2, dim=-1)
    grad_gate_RF.copy_(grad_RF * up_RF * (sigmoid_RF + silu_RF * (1 - sigmoid_RF)))
    grad_up_RF.copy_(grad_RF * silu_RF)
    return grad_gate_up_R2F, grad_weights_R
