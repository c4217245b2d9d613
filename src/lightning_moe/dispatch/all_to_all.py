"""Expert parallelism over ``torch.distributed``'s all-to-all, on gloo and NCCL.

A token goes once to each rank that holds any of its experts, however many of them live there: with 8 experts a token,
128 experts and 8 ranks, that is 5.3 rows instead of 8. The receiver makes the copies for its experts.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_moe.dispatch.base import Plan, chunk_slices, make_plan, slots_per_expert
from lightning_moe.ops.rows import gather, reduce, rows_by_rank, tokens_by_rank


class AllToAllDispatcher:
    """See :class:`~lightning_moe.dispatch.base.Dispatcher`.

    Args:
        group: The expert-parallel group. Its timeout bounds every wait.

    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size = group.size()
        self.rank = group.rank()

    def plan(self, ids_TK: Tensor, num_experts: int, num_chunks: int) -> list[Plan]:
        chunks = chunk_slices(ids_TK.shape[0], num_chunks)
        sent_PC, received_PC, counts_Ce = self._exchange_counts(ids_TK, num_experts, chunks)
        ids_of_chunk = self._exchange_ids(ids_TK, num_experts // self.size, sent_PC, received_PC)
        plans = []
        for c, tokens in enumerate(chunks):
            send_splits = tuple(sent_C[c] for sent_C in sent_PC)
            recv_splits = tuple(received_C[c] for received_C in received_PC)
            to_ranks = rows_by_rank(ids_TK[tokens], num_experts // self.size, send_splits)
            plans.append(make_plan(tokens, ids_of_chunk[c], tuple(counts_Ce[c]), to_ranks, send_splits, recv_splits))
        return plans

    def rows_like(self, plan: Plan, tokens_TX: Tensor) -> Tensor:
        return tokens_TX.new_empty(sum(plan.recv_splits), tokens_TX.shape[1])

    def dispatch(self, plan: Plan, tokens_TX: Tensor, rows_NX: Tensor) -> None:
        assert plan.to_ranks is not None
        packed_SX = gather(tokens_TX, plan.to_ranks)
        dist.all_to_all_single(rows_NX, packed_SX, list(plan.recv_splits), list(plan.send_splits), self.group)

    def combine(self, plan: Plan, rows_NX: Tensor, tokens_TX: Tensor) -> None:
        assert plan.to_ranks is not None
        packed_SX = rows_NX.new_empty(sum(plan.send_splits), rows_NX.shape[1])
        dist.all_to_all_single(packed_SX, rows_NX, list(plan.send_splits), list(plan.recv_splits), self.group)
        reduce(packed_SX, plan.to_ranks, tokens_TX)

    def _exchange_counts(
        self, ids_TK: Tensor, num_experts: int, chunks: list[slice]
    ) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
        """The layer's one host sync: rows sent and received ``[P, C]``, and rows of each local expert ``[C, e]``.

        P ranks, C chunks. What a rank is told about each chunk is one row: how many tokens it gets, and how many slots
        of them each of its experts.
        """
        wanted_TP = tokens_by_rank(ids_TK, num_experts // self.size, self.size)
        sent_PC = torch.stack([wanted_TP[tokens].sum(0) for tokens in chunks], dim=1)
        slots_PCe = slots_per_expert(ids_TK, num_experts, chunks).view(len(chunks), self.size, -1).transpose(0, 1)
        told_PCx = torch.cat([sent_PC.unsqueeze(2), slots_PCe], dim=2).contiguous()
        heard_PCx = torch.empty_like(told_PCx)
        dist.all_to_all_single(heard_PCx, told_PCx, group=self.group)
        rows_PC, counts_Ce = heard_PCx[:, :, 0], heard_PCx[:, :, 1:].sum(0)
        on_host = torch.cat([sent_PC.flatten(), rows_PC.flatten(), counts_Ce.flatten()]).tolist()
        first, second = sent_PC.numel(), 2 * sent_PC.numel()
        num_chunks = len(chunks)
        return (
            _rows_of(on_host[:first], num_chunks),
            _rows_of(on_host[first:second], num_chunks),
            _rows_of(on_host[second:], counts_Ce.shape[1]),
        )

    def _exchange_ids(
        self, ids_TK: Tensor, num_local: int, sent_PC: list[list[int]], received_PC: list[list[int]]
    ) -> list[Tensor]:
        """The local expert ids of the rows that each chunk will bring: int32 ``[N, K]``, ``-1`` for experts elsewhere.

        One exchange serves all chunks: they are contiguous, so rows sorted by (rank, token) are sorted by (rank, chunk,
        token), and what comes from a rank splits into its chunks.
        """
        send_splits, recv_splits = [sum(sent_C) for sent_C in sent_PC], [sum(received_C) for received_C in received_PC]
        packed_SK = gather(ids_TK.int(), rows_by_rank(ids_TK, num_local, tuple(send_splits)))
        ids_NK = packed_SK.new_empty(sum(recv_splits), ids_TK.shape[1])
        dist.all_to_all_single(ids_NK, packed_SK, recv_splits, send_splits, self.group)
        ids_NK = ids_NK - self.rank * num_local
        ids_NK = torch.where((ids_NK >= 0) & (ids_NK < num_local), ids_NK, -1)
        num_chunks = len(received_PC[0])
        pieces = torch.split(ids_NK, [rows for received_C in received_PC for rows in received_C])
        return [torch.cat(pieces[c::num_chunks]) for c in range(num_chunks)]


def _rows_of(flat: list[int], width: int) -> list[list[int]]:
    return [flat[start : start + width] for start in range(0, len(flat), width)]
