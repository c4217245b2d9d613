"""Copying rows to several places, and the adjoint: summing them back.

One pair of operations serves twice in the layer. Before communication, a token's row is copied once for each rank that
needs it; after communication, a received row is copied once for each local expert that needs it. The way back sums the
copies. ``gather`` and ``reduce`` over one :class:`RowMap` are each other's adjoint:
``<gather(x), r> == <x, reduce(r)>``.

Legend: M source rows, J copies of a source row at most, R copied rows, X any trailing width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_moe.ops import kernels


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


def gather(source_MX: Tensor, rows: RowMap, out_RX: Tensor | None = None) -> Tensor:
    """Copy each source row to every place that :attr:`RowMap.copies_MJ` names.

    Args:
        source_MX: ``[M, X]``, any dtype.
        rows: The map; its adjoint is :func:`reduce`.
        out_RX: A buffer for the result; allocated where it is not given.

    Returns:
        ``[R, X]`` of the same dtype.

    """
    if out_RX is None:
        out_RX = source_MX.new_empty(rows.source_R.shape[0], source_MX.shape[1])
    # a few numbers a row, routing weights say, are copied as fast by torch, and launched faster
    if out_RX.shape[1] >= 64 and kernels.serve(source_MX, out_RX):
        from lightning_moe.ops.kernels.rows import gather_rows

        gather_rows(source_MX, rows.copies_MJ, out_RX)
    else:
        torch.index_select(source_MX, 0, rows.source_R, out=out_RX)
    return out_RX


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
    if kernels.serve(copies_RX, out_MX):
        from lightning_moe.ops.kernels.rows import reduce_rows

        reduce_rows(copies_RX, rows.copies_MJ, out_MX)
        return
    total_MX = torch.zeros(out_MX.shape, dtype=accumulation_dtype(copies_RX.dtype), device=copies_RX.device)
    for copies_M in rows.copies_MJ.unbind(1):
        picked_MX = copies_RX.index_select(0, copies_M.clamp(min=0))
        # `where`, not a product with the mask: row 0 stands in for a missing copy and may hold anything
        total_MX += torch.where((copies_M >= 0).unsqueeze(1), picked_MX, 0)
    out_MX.copy_(total_MX)


class SortedRows(NamedTuple):
    """Slots sorted by key.

    Args:
        rows: The map from the M source rows to the R rows that have a key, sorted by it.
        slots_R: int32 ``[R]``, the flat index ``row * J + slot`` of each sorted row.
        ends: int32, one for each key: the end of its rows.

    """

    rows: RowMap
    slots_R: Tensor
    ends: Tensor


def rows_by_key(keys_MJ: Tensor, num_keys: int, num_rows: int) -> SortedRows:
    """Copy each row once for each of its keys, sorted by key; ties keep the order of slots, so the result is deterministic.

    Args:
        keys_MJ: int32 ``[M, J]``, below ``num_keys``, negative for none.
        num_keys: Number of keys.
        num_rows: R, how many slots have a key. It is known on the host, so that no size need be asked of the device.

    """
    if kernels.have(keys_MJ):
        from lightning_moe.ops.kernels.sorting import sort_slots

        source_R, copies_MJ, slots_R, ends = sort_slots(keys_MJ, num_keys, num_rows)
        return SortedRows(RowMap(source_R, copies_MJ), slots_R, ends)
    keys = torch.where(keys_MJ < 0, num_keys, keys_MJ).flatten()
    sorted_keys, slots = keys.sort(stable=True)
    copies = torch.full_like(keys, -1)
    copies[slots[:num_rows]] = torch.arange(num_rows, dtype=torch.int32, device=keys.device)
    slots_R = slots[:num_rows].int()
    ends = torch.searchsorted(sorted_keys, torch.arange(num_keys, dtype=keys.dtype, device=keys.device), right=True)
    return SortedRows(RowMap(slots_R // keys_MJ.shape[1], copies.view_as(keys_MJ)), slots_R, ends.int())


def rank_keys(ids_TK: Tensor, num_local: int, num_ranks: int) -> Tensor:
    """The ranks that each token must be sent to, as keys for :func:`rows_by_key`.

    Args:
        ids_TK: int32 ``[T, K]``, global expert of each slot, ``-1`` for none. Rank r holds experts ``r * e`` to
            ``r * e + e - 1``.
        num_local: e, the experts on each rank.
        num_ranks: P.

    Returns:
        int32 ``[T, P]``: r in column r where rank r is needed, else ``-1``.

    """
    if kernels.have(ids_TK):
        from lightning_moe.ops.kernels.sorting import ranks_of_tokens

        return ranks_of_tokens(ids_TK, num_local, num_ranks)
    rank_TK = torch.div(ids_TK, num_local, rounding_mode="floor").long() + 1  # -1, no expert, lands in column 0
    wanted = torch.zeros(ids_TK.shape[0], num_ranks + 1, dtype=torch.bool, device=ids_TK.device)
    wanted_TP = wanted.scatter_(1, rank_TK, True)[:, 1:]
    return torch.where(wanted_TP, torch.arange(num_ranks, dtype=torch.int32, device=ids_TK.device), -1)


def count_keys(keys_MJ: Tensor, num_keys: int, chunks: list[slice]) -> Tensor:
    """How often each key occurs in each chunk of rows: int32 ``[C, num_keys]``, without a host sync."""
    if kernels.have(keys_MJ):
        from lightning_moe.ops.kernels.sorting import add_counts

        counts_CE = torch.zeros(len(chunks), num_keys, dtype=torch.int32, device=keys_MJ.device)
        for counts_E, rows in zip(counts_CE.unbind(0), chunks, strict=True):
            if rows.start < rows.stop:
                add_counts(keys_MJ[rows], counts_E)
        return counts_CE
    counts_CE = torch.zeros(len(chunks), num_keys + 1, dtype=torch.int32, device=keys_MJ.device)
    for counts_E, rows in zip(counts_CE, chunks, strict=True):
        slots = keys_MJ[rows].flatten().long() + 1  # -1, no key, is counted in column 0
        counts_E.scatter_add_(0, slots, torch.ones_like(slots, dtype=torch.int32))
    return counts_CE[:, 1:]
