"""One matrix product for each expert, over rows that are sorted by expert.

A kernel of our own on Hopper GPUs; ``torch.nn.functional.grouped_mm`` where it serves (its dtypes, its alignment); otherwise
one ``torch.mm`` for each expert, which is also the float64 reference, and has to ask the device for the experts' rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_moe.ops import kernels
from lightning_moe.ops.rows import accumulation_dtype
from lightning_moe.ops.swiglu import swiglu


@dataclass(frozen=True)
class Groups:
    """The rows of each expert, one expert after the other.

    Args:
        num_rows: R, of all of them.
        ends_e: int32 ``[e]``, where each expert's end, on the device.

    """

    num_rows: int
    ends_e: Tensor

    @cached_property
    def slices(self) -> list[slice]:
        """The rows of each expert, on the host: this waits for the device."""
        ends = self.ends_e.tolist()
        return [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def grouped_mm(rows_RN: Tensor, weight_eNM: Tensor, groups: Groups, out_RM: Tensor) -> None:
    """Multiply each expert's rows with that expert's matrix.

    Args:
        rows_RN: ``[R, N]``, sorted by expert.
        weight_eNM: ``[e, N, M]``; a transposed view is as good as a contiguous tensor.
        groups: The rows of each expert; they sum to R.
        out_RM: ``[R, M]`` in the dtype of the input, contiguous, written.

    """
    if rows_RN.shape[0] == 0:
        return
    if _serve(rows_RN, weight_eNM):
        kernels.grouped_mm.grouped_mm_of_experts(rows_RN, weight_eNM, groups.ends_e, out_RM)
    elif _native(rows_RN, weight_eNM):
        out_RM.copy_(F.grouped_mm(rows_RN, weight_eNM, offs=groups.ends_e))
    else:
        for expert, rows in enumerate(groups.slices):
            torch.mm(rows_RN[rows], weight_eNM[expert], out=out_RM[rows])


def grouped_mm_swiglu(
    rows_RH: Tensor,
    gate_up_e2FH: Tensor,
    weights_R: Tensor,
    groups: Groups,
    act_RF: Tensor,
    gate_up_R2F: Tensor | None = None,
) -> None:
    """Multiply each expert's rows with its first matrix, transposed, and activate them as :mod:`lightning_moe.ops.swiglu` does.

    Args:
        rows_RH: ``[R, H]``, sorted by expert.
        gate_up_e2FH: ``[e, 2F, H]``: the gate's F rows, then the up projection's.
        weights_R: ``[R]``, routing weights, float32 (float64 for float64 rows).
        groups: The rows of each expert; they sum to R.
        act_RF: ``[R, F]`` in the dtype of the input, contiguous, written.
        gate_up_R2F: ``[R, 2F]``, likewise, what the activation is computed from, for those who need it later.

    """
    if rows_RH.shape[0] == 0:
        return
    if _serve(rows_RH, gate_up_e2FH) and gate_up_e2FH.is_contiguous():
        kernels.grouped_mm.gate_up_swiglu_of_experts(
            rows_RH, gate_up_e2FH, weights_R, groups.ends_e, act_RF, gate_up_R2F
        )
        return
    if gate_up_R2F is None:
        gate_up_R2F = rows_RH.new_empty(rows_RH.shape[0], gate_up_e2FH.shape[1])
    grouped_mm(rows_RH, gate_up_e2FH.mT, groups, gate_up_R2F)
    swiglu(gate_up_R2F, weights_R, act_RF)


def weight_gradient(
    out_eMN: Tensor,
    grad_RM: Tensor,
    rows_RN: Tensor,
    groups: Groups,
    total_eMN: Tensor | None = None,
    scale: float = 1.0,
) -> None:
    """Write ``(total + grad^T rows) * scale`` for each expert, rounded once, to the dtype of the output.

    So a gradient that is summed over chunks of rows costs no pass over memory of its own: the first chunk writes a
    float32 total instead of adding to zeros, and the last writes the finished gradient instead of a total. With one
    chunk there is no total at all. Nor is there one, and the product is as fast as if there were one chunk, where all
    chunks' rows lie in one buffer, one chunk after the other: ``groups`` are then the experts of each chunk in turn.

    Args:
        out_eMN: ``[e, M, N]``, written; an expert without rows gets ``total * scale``. It may be the total itself.
        grad_RM: ``[R, M]``, the gradient of :func:`grouped_mm`'s output.
        rows_RN: ``[R, N]``, its input.
        groups: The rows of each expert, of C chunks in turn: ``C * e`` groups.
        total_eMN: ``[e, M, N]``, what other rows gave so far, float32 (float64 for float64 input); ``None`` for zero.
        scale: A factor on the sum.

    """
    if rows_RN.shape[0] == 0:
        if total_eMN is None:
            out_eMN.zero_()
        else:
            out_eMN.copy_(total_eMN * scale)
        return
    operands = (out_eMN, grad_RM, rows_RN)
    if kernels.serve(rows_RN) and kernels.weight_gradient.serves(*operands, total_eMN):
        kernels.weight_gradient.weight_gradient_of_experts(*operands, groups.ends_e, total_eMN, scale)
        return
    num_experts, slices = out_eMN.shape[0], groups.slices
    for expert in range(num_experts):
        sum_MN = None if total_eMN is None else total_eMN[expert]
        for rows in slices[expert::num_experts]:
            if rows.start < rows.stop:
                product_MN = _product(grad_RM[rows].t(), rows_RN[rows], accumulation_dtype(grad_RM.dtype))
                sum_MN = product_MN if sum_MN is None else product_MN.add_(sum_MN)
        out_eMN[expert] = 0 if sum_MN is None else sum_MN * scale


def _product(grad_MR: Tensor, rows_RN: Tensor, dtype: torch.dtype) -> Tensor:
    """One expert's product, summed and returned in ``dtype``."""
    if grad_MR.is_cuda and grad_MR.dtype != dtype:  # the GEMM sums in float32 anyway: take that before it is rounded
        return torch.mm(grad_MR, rows_RN, out_dtype=dtype)
    return torch.mm(grad_MR.to(dtype), rows_RN.to(dtype))


def _serve(rows_RN: Tensor, weight_eNM: Tensor) -> bool:
    """Whether our own kernels take these operands."""
    return kernels.serve(rows_RN) and kernels.grouped_mm.serves(rows_RN, weight_eNM)


def _native(rows_RN: Tensor, weight_eNM: Tensor) -> bool:
    """Whether ``F.grouped_mm`` takes these operands (float64 and odd strides it does not)."""
    if rows_RN.dtype not in (torch.bfloat16, torch.float32):
        return False
    if rows_RN.device.type == "cuda" and rows_RN.dtype != torch.bfloat16:
        return False
    aligned = 16 // rows_RN.element_size()
    return _aligned(rows_RN, aligned) and _aligned(weight_eNM, aligned) and weight_eNM.shape[2] % aligned == 0


def _aligned(matrix: Tensor, multiple: int) -> bool:
    """Whether the last two dimensions are a dense matrix, plain or transposed, whose lines start at such multiples."""
    (rows, columns), (row_stride, column_stride) = matrix.shape[-2:], matrix.stride()[-2:]
    if column_stride == 1 and row_stride >= columns:
        return row_stride % multiple == 0
    return row_stride == 1 and column_stride >= rows and column_stride % multiple == 0
