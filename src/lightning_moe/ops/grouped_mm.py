"""One matrix product for each expert, over rows that are sorted by expert.

``torch.nn.functional.grouped_mm`` where it serves (its dtypes, its alignment); otherwise one ``torch.mm`` for each
expert, which is also the float64 reference.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Groups:
    """Where each expert's rows begin and end, on both sides of the bus.

    Args:
        counts: Rows of each of the e experts, on the host.
        ends_e: int32 ``[e]``, their cumulative sum, on the device.

    """

    counts: tuple[int, ...]
    ends_e: Tensor

    def slices(self) -> list[slice]:
        """The rows of each expert."""
        starts = [sum(self.counts[:e]) for e in range(len(self.counts))]
        return [slice(start, start + count) for start, count in zip(starts, self.counts, strict=True)]


def grouped_mm(rows_RN: Tensor, weight_eNM: Tensor, groups: Groups) -> Tensor:
    """Multiply each expert's rows with that expert's matrix.

    Args:
        rows_RN: ``[R, N]``, sorted by expert.
        weight_eNM: ``[e, N, M]``; a transposed view is as good as a contiguous tensor.
        groups: The rows of each expert; they sum to R.

    Returns:
        ``[R, M]`` in the dtype of the input.

    """
    if _native(rows_RN, weight_eNM):
        return F.grouped_mm(rows_RN, weight_eNM, offs=groups.ends_e)
    out_RM = rows_RN.new_empty(rows_RN.shape[0], weight_eNM.shape[2])
    for expert, rows in enumerate(groups.slices()):
        torch.mm(rows_RN[rows], weight_eNM[expert], out=out_RM[rows])
    return out_RM


def add_weight_gradient(total_eMN: Tensor, grad_RM: Tensor, rows_RN: Tensor, groups: Groups) -> None:
    """Add each expert's ``grad^T rows`` to the running total.

    The total is float32 for every narrower input, so that gradients which are summed over chunks are rounded once.

    Args:
        total_eMN: ``[e, M, N]`` float32 (float64 for float64 input), changed in place.
        grad_RM: ``[R, M]``, the gradient of :func:`grouped_mm`'s output.
        rows_RN: ``[R, N]``, its input.
        groups: The rows of each expert.

    """
    widen = grad_RM.device.type == "cuda" and grad_RM.dtype != total_eMN.dtype
    for total_MN, rows in zip(total_eMN, groups.slices(), strict=True):
        if rows.start == rows.stop:
            continue
        if widen:  # the GEMM accumulates in float32 anyway: take that result before it is rounded
            total_MN += torch.mm(grad_RM[rows].t(), rows_RN[rows], out_dtype=total_MN.dtype)
        else:
            total_MN.addmm_(grad_RM[rows].t().to(total_MN.dtype), rows_RN[rows].to(total_MN.dtype))


def _native(rows_RN: Tensor, weight_eNM: Tensor) -> bool:
    """Whether ``F.grouped_mm`` takes these operands (float64 and odd strides it does not)."""
    if rows_RN.dtype not in (torch.bfloat16, torch.float32) or rows_RN.shape[0] == 0:
        return False
    if rows_RN.device.type == "cuda" and rows_RN.dtype != torch.bfloat16:
        return False
    aligned = 16 // rows_RN.element_size()
    strides = [s for s in (*rows_RN.stride(), *weight_eNM.stride()[1:]) if s != 1]
    return all(stride % aligned == 0 for stride in strides) and weight_eNM.shape[2] % aligned == 0
