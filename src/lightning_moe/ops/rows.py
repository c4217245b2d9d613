"""Copying rows to several places, and the adjoint: summing them back.

One pair of operations serves twice in the layer. Before communication, a token's row is copied once for each rank that
needs it; after communication, a received row is copied once for each local expert that needs it. The way back sums the
copies. ``gather`` and ``reduce`` over one :class:`RowMap` are each other's adjoint:
``<gather(x), r> == <x, reduce(r)>``.

Legend: M source rows, J copies of a source row at most, R copied rows, X any trailing width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_moe.ops import kernels


@dataclass(frozen=True)
class RowMap:
    """Where each source row's copies are.

    Args:
        copies_MJ: int32 ``[M, J]``, the copied rows of each source row, each of ``range(R)`` once; ``-1`` where there is none.
        num_copies: R.

    """

    copies_MJ: Tensor
    num_copies: int


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums are taken in: float64 stays float64, everything narrower is summed in float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def gather(source_MX: Tensor, rows: RowMap, out_RX: Tensor) -> None:
    """Copy each source row to every place that :attr:`RowMap.copies_MJ` names.

    Args:
        source_MX: ``[M, X]``, any dtype.
        rows: The map; its adjoint is :func:`reduce`.
        out_RX: ``[R, X]`` of the same dtype, or int32 for int64, written.

    """
    if rows.num_copies == 0:
        return
    if kernels.serve(source_MX, out_RX):
        kernels.rows.gather_rows(source_MX, rows.copies_MJ, out_RX)
        return
    out_RX.copy_(source_MX.index_select(0, _sources(rows)))


def reduce(copies_RX: Tensor, rows: RowMap, out_MX: Tensor, num_summed: int = 0) -> None:
    """Sum the copies of each source row: the adjoint of :func:`gather`.

    The sum runs over J in order and in float32 (float64 for float64 input), so it does not depend on which row
    arrived first, as atomic additions would.

    Args:
        copies_RX: ``[R, X]``.
        rows: The map that :func:`gather` was given.
        out_MX: ``[M, X]``, written; rows without copies become zero.
        num_summed: So many of the first rows of the output hold a part of their sum already, and are added to.

    """
    if rows.num_copies == 0:
        out_MX[num_summed:].zero_()
        return
    if kernels.serve(copies_RX, out_MX):
        kernels.rows.reduce_rows(copies_RX, rows.copies_MJ, out_MX, num_summed)
        return
    total_MX = torch.zeros(out_MX.shape, dtype=accumulation_dtype(copies_RX.dtype), device=copies_RX.device)
    total_MX[:num_summed] = out_MX[:num_summed]
    for copies_M in rows.copies_MJ.unbind(1):
        picked_MX = copies_RX.index_select(0, copies_M.clamp(min=0))
        # `where`, not a product with the mask: row 0 stands in for a missing copy and may hold anything
        total_MX += torch.where((copies_M >= 0).unsqueeze(1), picked_MX, 0)
    out_MX.copy_(total_MX)


def collect(values_R: Tensor, rows: RowMap, out_MJ: Tensor, num_summed: int = 0) -> None:
    """Bring a number of each copied row back to the slot of its source row that it was copied for.

    Args:
        values_R: ``[R]``.
        rows: The map.
        out_MJ: ``[M, J]`` of the same dtype, written; slots without a copy become zero.
        num_summed: As in :func:`reduce`.

    """
    if rows.num_copies and kernels.serve(values_R, out_MJ):
        kernels.rows.collect_values(values_R, rows.copies_MJ, out_MJ, num_summed)
        return
    padded = torch.cat([values_R, values_R.new_zeros(1)])  # so that index -1 exists, and is zero
    values_MJ = padded[rows.copies_MJ.long()]
    values_MJ[:num_summed] += out_MJ[:num_summed]
    out_MJ.copy_(values_MJ)


def _sources(rows: RowMap) -> Tensor:
    """int64 ``[R]``, the source row of each copied row."""
    copies_MJ, num_copies = rows.copies_MJ.long(), rows.num_copies
    # what has no copy is written to one place after the last
    source = torch.empty(num_copies + 1, dtype=torch.int64, device=copies_MJ.device)
    rows_MJ = torch.arange(copies_MJ.shape[0], device=copies_MJ.device).unsqueeze(1).expand_as(copies_MJ)
    source[torch.where(copies_MJ < 0, num_copies, copies_MJ)] = rows_MJ
    return source[:num_copies]
