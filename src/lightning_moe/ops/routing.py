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


def as_ids(ids_TK: Tensor) -> Tensor:
    """Ids ``[T, K]`` of any integer dtype as those below take them: int32 or int64, contiguous; no copy where they are."""
    return (ids_TK if ids_TK.dtype in (torch.int32, torch.int64) else ids_TK.int()).contiguous()


def count_needs(ids_TK: Tensor, num_experts: int, counts_C2P: Tensor, mark: int = 0) -> None:
    """Count, in each chunk, the tokens that need each of P ranks, and the slots that name an expert of each rank.

    Args:
        ids_TK: int32 or int64 ``[T, K]``, the global expert of each slot, ``-1`` for none. Rank r holds experts ``r * e`` to
            ``r * e + e - 1``.
        num_experts: E, over all ranks.
        counts_C2P: Integer ``[C, 2, P]``, tokens and slots: each is written at once. The chunks are those of
            :func:`chunk_slices`. It may be memory of the host that the ids' device may write to.
        mark: A multiple of 2**32, added to each.

    """
    num_chunks, _, num_ranks = counts_C2P.shape
    if _serve(ids_TK):
        kernels.routing.count_ids(ids_TK, num_experts // num_ranks, counts_C2P, mark)
        return
    lines = []
    for tokens in chunk_slices(ids_TK.shape[0], num_chunks):
        slots_tP = _slots_of_ranks(ids_TK[tokens], num_experts // num_ranks, num_ranks)
        lines += [(slots_tP > 0).sum(0), slots_tP.sum(0)]
    counts_C2P.copy_(torch.stack(lines).view(counts_C2P.shape) + mark, non_blocking=True)


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
        kernels.routing.place_copies_of_ids(ids_TK, num_experts // num_ranks, rank, num_chunks, copies_TJ)
        return copies_TJ
    peers = [peer for peer in range(num_ranks) if peer != rank]
    for tokens in chunk_slices(ids_TK.shape[0], num_chunks):
        wanted_Jt = _slots_of_ranks(ids_TK[tokens], num_experts // num_ranks, num_ranks)[:, peers].t() > 0
        places_Jt = (wanted_Jt.flatten().cumsum(0) - 1).view_as(wanted_Jt)
        copies_TJ[tokens] = torch.where(wanted_Jt, places_Jt, -1).t().int()
    return copies_TJ


def _serve(ids_TK: Tensor) -> bool:
    return ids_TK.is_cuda and ids_TK.numel() > 0 and kernels.have_triton()


def _slots_of_ranks(ids_tK: Tensor, num_local: int, num_ranks: int) -> Tensor:
    """How many of each token's slots name an expert of each rank: int64 ``[t, P]``."""
    ranks_tK = torch.div(ids_tK.long(), num_local, rounding_mode="floor") + 1  # -1, no expert, lands in column 0
    slots_tP = torch.zeros(ids_tK.shape[0], num_ranks + 1, dtype=torch.int64, device=ids_tK.device)
    return slots_tP.scatter_add_(1, ranks_tK, torch.ones_like(ranks_tK))[:, 1:]


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
    def empty(num_rows: int, top_k: int, num_local: int, num_sorted: int, like: Tensor) -> Order:
        """Room for an order.

        Args:
            num_rows: N.
            top_k: K.
            num_local: e.
            num_sorted: R, or more while it is not known: see :meth:`cut`.
            like: Any tensor with the device and the dtype of the routing weights.

        """
        by_expert = RowMap(torch.empty(num_rows, top_k, dtype=torch.int32, device=like.device), num_sorted)
        ends_e = torch.empty(num_local, dtype=torch.int32, device=like.device)
        return Order(by_expert, Groups(num_sorted, ends_e), like.new_empty(num_sorted))

    def cut(self, num_sorted: int) -> Order:
        """The same order with the true R."""
        by_expert, groups = RowMap(self.by_expert.copies_MJ, num_sorted), Groups(num_sorted, self.groups.ends_e)
        return Order(by_expert, groups, self.weights_R[:num_sorted])


def sort_by_expert(ids_NK: Tensor, weights_NK: Tensor, first_expert: int, order: Order) -> None:
    """Sort the slots of received rows by local expert: fill an order.

    Args:
        ids_NK: int32 or int64 ``[N, K]``, global experts, ``-1`` for none.
        weights_NK: ``[N, K]``, their routing weights.
        first_expert: This rank's experts begin here; slots that name others are left out.
        order: From :meth:`Order.empty`, written.

    """
    copies_NK, ends_e, weights_R = order.by_expert.copies_MJ, order.groups.ends_e, order.weights_R
    if ids_NK.numel() and kernels.serve(weights_NK) and ids_NK.stride(1) == 1:
        kernels.routing.sort_slots(ids_NK, weights_NK, first_expert, copies_NK, ends_e, weights_R)
        return
    num_local = ends_e.shape[0]
    experts = ids_NK.flatten() - first_expert
    experts = torch.where((experts < 0) | (experts >= num_local), num_local, experts)
    sorted_experts, slots = experts.sort(stable=True)
    places = torch.arange(len(slots), dtype=torch.int32, device=slots.device)
    copies_NK.view(-1)[slots] = torch.where(sorted_experts < num_local, places, -1)
    weights_R.copy_(weights_NK.flatten()[slots[: weights_R.shape[0]]])
    locals_e = torch.arange(num_local, dtype=sorted_experts.dtype, device=slots.device)
    ends_e.copy_(torch.searchsorted(sorted_experts, locals_e, right=True))
