"""From expert ids to the places of rows, on both sides of the communication; no step asks the device for a size.

Before it, :func:`count_needs` counts what this rank has to send and :func:`place_copies` says where every copy of a token's row
goes. After it, :func:`sort_by_expert` finds the places of the received rows' copies, sorted by expert.

Legend: T local tokens, K experts a token, C chunks, P ranks, E experts, e of them on each rank, N received rows, R rows sorted
by expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from lightning_moe.ops import kernels
from lightning_moe.ops.grouped_mm import Groups
from lightning_moe.ops.rows import RowMap


def chunk_slices(num_tokens: int, num_chunks: int) -> list[slice]:
    """Cut a batch into contiguous chunks of equal size, to a token; with few tokens some are empty.

    >>> chunk_slices(5, 2)
    [slice(0, 3, None), slice(3, 5, None)]

    """
    bounds = [-(-num_tokens * i // num_chunks) for i in range(num_chunks + 1)]
    return [slice(start, stop) for start, stop in pairwise(bounds)]


def count_needs(ids_TK: Tensor, num_experts: int, num_ranks: int, num_chunks: int) -> Tensor:
    """Count, in each chunk, the tokens that need each rank, then the slots that name each expert.

    Args:
        ids_TK: int32 or int64 ``[T, K]``, the global expert of each slot, ``-1`` for none. Rank r holds experts ``r * e`` to
            ``r * e + e - 1``.
        num_experts: E, over all ranks.
        num_ranks: P.
        num_chunks: C; the chunks are those of :func:`chunk_slices`.

    Returns:
        int32 ``[C, P + E]``.

    """
    counts_CX = torch.zeros(num_chunks, num_ranks + num_experts, dtype=torch.int32, device=ids_TK.device)
    if _serve(ids_TK):
        from lightning_moe.ops.kernels.routing import count_ids

        count_ids(ids_TK, num_ranks, counts_CX)
        return counts_CX
    for counts_X, tokens in zip(counts_CX, chunk_slices(ids_TK.shape[0], num_chunks), strict=True):
        ids_tK = ids_TK[tokens].long()
        counts_X[:num_ranks] = _needed_ranks(ids_tK, num_experts // num_ranks, num_ranks).sum(0)
        slots = counts_X.new_zeros(num_experts + 1)  # -1, no expert, is counted in column 0
        slots.scatter_add_(0, ids_tK.flatten() + 1, torch.ones_like(ids_tK, dtype=torch.int32).flatten())
        counts_X[num_ranks:] = slots[1:]
    return counts_CX


def place_copies(ids_TK: Tensor, num_experts: int, num_ranks: int, rank: int, num_chunks: int) -> Tensor:
    """Find the place of each token's copy for each peer among all copies that its chunk sends.

    Copies are sorted by peer; each peer's keep the order of tokens.

    Args:
        ids_TK: As in :func:`count_needs`.
        num_experts: E.
        num_ranks: P.
        rank: This one, to which no copy is sent.
        num_chunks: C.

    Returns:
        int32 ``[T, P - 1]``, a column for each other rank in order; ``-1`` for none.

    """
    copies_TJ = torch.empty(ids_TK.shape[0], num_ranks - 1, dtype=torch.int32, device=ids_TK.device)
    if copies_TJ.numel() and _serve(ids_TK):
        from lightning_moe.ops.kernels.routing import place_copies_of_ids

        place_copies_of_ids(ids_TK, num_experts // num_ranks, rank, num_chunks, copies_TJ)
        return copies_TJ
    peers = [peer for peer in range(num_ranks) if peer != rank]
    for tokens in chunk_slices(ids_TK.shape[0], num_chunks):
        wanted_Jt = _needed_ranks(ids_TK[tokens].long(), num_experts // num_ranks, num_ranks)[:, peers].t()
        places_Jt = (wanted_Jt.flatten().cumsum(0) - 1).view_as(wanted_Jt)
        copies_TJ[tokens] = torch.where(wanted_Jt, places_Jt, -1).t().int()
    return copies_TJ


def _serve(ids_TK: Tensor) -> bool:
    return ids_TK.is_cuda and ids_TK.numel() > 0 and kernels.have_triton()


def _needed_ranks(ids_tK: Tensor, num_local: int, num_ranks: int) -> Tensor:
    """bool ``[t, P]``."""
    ranks_tK = torch.div(ids_tK, num_local, rounding_mode="floor") + 1  # -1, no expert, lands in column 0
    wanted_tP = torch.zeros(ids_tK.shape[0], num_ranks + 1, dtype=torch.bool, device=ids_tK.device)
    return wanted_tP.scatter_(1, ranks_tK, True)[:, 1:]


@dataclass(frozen=True)
class Order:
    """How received rows are sorted by expert; within an expert they keep the order of arrival.

    Args:
        by_expert: Map from the N received rows to the R sorted ones, one slot for each of the K experts.
        groups: The rows of each local expert.
        weights_R: The routing weight of each sorted row, float32 (float64).

    """

    by_expert: RowMap
    groups: Groups
    weights_R: Tensor

    @staticmethod
    def empty(num_rows: int, top_k: int, counts: tuple[int, ...], like: Tensor) -> Order:
        """Room for the order of N rows whose slots name each local expert so often.

        Args:
            num_rows: N.
            top_k: K.
            counts: R in all.
            like: Any tensor with the device and the dtype of the routing weights.

        """
        num_sorted = sum(counts)
        by_expert = RowMap(torch.empty(num_rows, top_k, dtype=torch.int32, device=like.device), num_sorted)
        ends_e = torch.empty(len(counts), dtype=torch.int32, device=like.device)
        return Order(by_expert, Groups(counts, ends_e), like.new_empty(num_sorted))


def sort_by_expert(ids_NK: Tensor, weights_NK: Tensor, first_expert: int, order: Order) -> None:
    """Sort the slots of received rows by local expert: fill an order.

    Args:
        ids_NK: int32 ``[N, K]``, global experts, ``-1`` for none.
        weights_NK: ``[N, K]``, their routing weights.
        first_expert: This rank's experts begin here; slots that name others are left out.
        order: From :meth:`Order.empty`, with the counts of these very ids; written.

    """
    copies_NK, num_sorted, ends_e = order.by_expert.copies_MJ, order.by_expert.num_copies, order.groups.ends_e
    if num_sorted and kernels.serve(weights_NK):
        from lightning_moe.ops.kernels.routing import sort_slots

        sort_slots(ids_NK, weights_NK, first_expert, copies_NK, ends_e, order.weights_R)
        return
    num_local = ends_e.shape[0]
    keys_NK = ids_NK - first_expert
    keys_NK = torch.where((keys_NK < 0) | (keys_NK >= num_local), num_local, keys_NK)
    sorted_keys, slots = keys_NK.flatten().sort(stable=True)
    copies = torch.full_like(slots, -1, dtype=torch.int32)
    copies[slots[:num_sorted]] = torch.arange(num_sorted, dtype=torch.int32, device=slots.device)
    copies_NK.copy_(copies.view_as(copies_NK))
    order.weights_R.copy_(weights_NK.flatten()[slots[:num_sorted]])
    experts = torch.arange(num_local, dtype=sorted_keys.dtype, device=slots.device)
    ends_e.copy_(torch.searchsorted(sorted_keys, experts, right=True))
