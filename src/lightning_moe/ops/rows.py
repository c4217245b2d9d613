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


@dataclass(frozen=True)
class RowMap:
    """Which source row each copy was made from, and where each source row's copies went.

    Args:
        source_R: int32 ``[R]``, the source row of each copied row.
        copies_MJ: int32 ``[M, J]``, the copied rows of each source row; ``-1`` where there is none.

    """

    source_R: Tensor
    copies_MJ: Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums are taken in: float64 stays float64, everything narrower is summed in float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def gather(source_MX: Tensor, rows: RowMap) -> Tensor:
    """Copy each source row to every place that :attr:`RowMap.copies_MJ` names.

    Args:
        source_MX: ``[M, X]``, any dtype.
        rows: The map; its adjoint is :func:`reduce`.

    Returns:
        ``[R, X]`` of the same dtype.

    """
    return source_MX.index_select(0, rows.source_R)


def reduce(copies_RX: Tensor, rows: RowMap, out_MX: Tensor) -> None:
    """Sum the copies of each source row: the adjoint of :func:`gather`.

    The sum runs over J in order and in float32 (float64 for float64 input), so it does not depend on which row
    arrived first, as atomic additions would.

    Args:
        copies_RX: ``[R, X]``.
        rows: The map that :func:`gather` was given.
        out_MX: ``[M, X]``, written; rows without copies become zero.

    """
    if copies_RX.shape[0] == 0:
        out_MX.zero_()
        return
    total_MX = torch.zeros(out_MX.shape, dtype=accumulation_dtype(copies_RX.dtype), device=copies_RX.device)
    for copies_M in rows.copies_MJ.unbind(1):
        picked_MX = copies_RX.index_select(0, copies_M.clamp(min=0))
        # `where`, not a product with the mask: row 0 stands in for a missing copy and may hold anything
        total_MX += torch.where((copies_M >= 0).unsqueeze(1), picked_MX, 0)
    out_MX.copy_(total_MX)


def rows_by_expert(ids_NK: Tensor, counts: tuple[int, ...]) -> tuple[RowMap, Tensor]:
    """Sort (row, slot) pairs by local expert; ties keep the order of rows, so the result is deterministic.

    Args:
        ids_NK: int32 ``[N, K]``, the local expert that each slot of a received row wants, ``-1`` for none here.
        counts: How many slots want each of the e local experts, on the host (sizes are needed without a device sync).

    Returns:
        The map from the N received rows to the R = ``sum(counts)`` sorted rows, and ``slots_R``: int32 ``[R]``, the flat
        index ``row * K + slot`` of each sorted row.

    """
    num_slots, num_sorted = ids_NK.numel(), sum(counts)
    sort_key = torch.where(ids_NK < 0, len(counts), ids_NK).flatten()
    slots_R = sort_key.argsort(stable=True)[:num_sorted]
    copies = torch.full((num_slots,), -1, dtype=torch.int32, device=ids_NK.device)
    copies[slots_R] = torch.arange(num_sorted, dtype=torch.int32, device=ids_NK.device)
    slots_R = slots_R.int()
    return RowMap(slots_R // ids_NK.shape[1], copies.view_as(ids_NK)), slots_R


def rows_by_rank(ids_TK: Tensor, num_local_experts: int, splits: tuple[int, ...]) -> RowMap:
    """Copy each token once for each rank that holds any of its experts, sorted by rank, then by token.

    Args:
        ids_TK: ``[T, K]``, global expert of each slot, ``-1`` for none. Rank r holds experts ``r * e`` to ``r * e + e - 1``.
        num_local_experts: e, the experts on each rank.
        splits: How many rows go to each rank, on the host.

    Returns:
        The map from T tokens to ``sum(splits)`` rows; ``copies_MJ`` is ``[T, len(splits)]``.

    """
    num_ranks, num_tokens, num_rows = len(splits), ids_TK.shape[0], sum(splits)
    wanted = tokens_by_rank(ids_TK, num_local_experts, num_ranks).t().reshape(-1)  # rank-major, so rows sort by rank
    position = torch.where(wanted, wanted.cumsum(0) - 1, num_rows)
    source = torch.empty(num_rows + 1, dtype=torch.int32, device=ids_TK.device)  # the last row takes what is not sent
    source[position] = torch.arange(num_tokens, dtype=torch.int32, device=ids_TK.device).repeat(num_ranks)
    copies = torch.where(wanted, position, -1).int().view(num_ranks, num_tokens).t().contiguous()
    return RowMap(source[:num_rows], copies)


def tokens_by_rank(ids_TK: Tensor, num_local_experts: int, num_ranks: int) -> Tensor:
    """Which ranks each token must be sent to: bool ``[T, num_ranks]``, from global expert ids ``[T, K]``."""
    rank_TK = torch.div(ids_TK, num_local_experts, rounding_mode="floor").long() + 1  # -1, no expert, lands in column 0
    wanted = torch.zeros(ids_TK.shape[0], num_ranks + 1, dtype=torch.bool, device=ids_TK.device)
    return wanted.scatter_(1, rank_TK, True)[:, 1:]
