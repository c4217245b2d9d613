"""Expert parallelism by an all-to-all exchange of rows; the transport is gloo, NCCL, or copies over NVLink.

A token goes once to each rank that holds any of its experts, however many of them live there: with 8 experts a token,
128 experts and 8 ranks, that is 5.3 rows instead of 8. The receiver makes the copies for its experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_moe.dispatch.base import Plan, Traffic, chunk_slices, make_plan
from lightning_moe.dispatch.transport import Transport
from lightning_moe.ops.rows import RowMap, count_keys, gather, rank_keys, reduce, rows_by_key


class AllToAllDispatcher:
    """See :class:`~lightning_moe.dispatch.base.Dispatcher`.

    Args:
        group: The expert-parallel group. Its timeout bounds every wait.
        transport: Moves the packed rows between the ranks of this group.

    """

    def __init__(self, group: dist.ProcessGroup, transport: Transport) -> None:
        self.group = group
        self.size = group.size()
        self.rank = group.rank()
        self.transport = transport

    def plan(self, ids_TK: Tensor, num_experts: int, num_chunks: int) -> list[Plan]:
        ids_TK = ids_TK.int()
        chunks = chunk_slices(ids_TK.shape[0], num_chunks)
        ranks_TP = rank_keys(ids_TK, num_experts // self.size, self.size)
        traffic_CPP, counts_Ce = self._exchange_counts(ids_TK, ranks_TP, num_experts, chunks)
        to_ranks = [
            rows_by_key(ranks_TP[tokens], self.size, sum(traffic_PP[self.rank])).rows
            for tokens, traffic_PP in zip(chunks, traffic_CPP, strict=True)
        ]
        ids_of_chunk = self._exchange_ids(ids_TK, num_experts // self.size, chunks, to_ranks, traffic_CPP)
        return [make_plan(*parts) for parts in zip(chunks, ids_of_chunk, counts_Ce, to_ranks, traffic_CPP, strict=True)]

    def rows_like(self, plan: Plan, tokens_TX: Tensor) -> Tensor:
        num_rows = sum(sent[self.rank] for sent in plan.traffic_PP)
        return tokens_TX.new_empty(num_rows, tokens_TX.shape[1])

    def dispatch(self, plan: Plan, tokens: Sequence[Tensor], rows: Sequence[Tensor]) -> None:
        assert plan.to_ranks is not None
        outboxes = self.transport.outboxes(plan.traffic_PP, tokens)
        for tokens_TX, packed_SX in zip(tokens, outboxes, strict=True):
            gather(tokens_TX, plan.to_ranks, packed_SX)
        self.transport.exchange(plan.traffic_PP, outboxes, rows)

    def combine(self, plan: Plan, rows: Sequence[Tensor], tokens: Sequence[Tensor]) -> None:
        assert plan.to_ranks is not None
        back_PP = tuple(zip(*plan.traffic_PP, strict=True))
        outboxes = self.transport.outboxes(back_PP, rows)
        for rows_NX, outbox_NX in zip(rows, outboxes, strict=True):
            outbox_NX.copy_(rows_NX)
        num_sent = sum(plan.traffic_PP[self.rank])
        packed = [rows_NX.new_empty(num_sent, rows_NX.shape[1]) for rows_NX in rows]
        self.transport.exchange(back_PP, outboxes, packed)
        for packed_SX, tokens_TX in zip(packed, tokens, strict=True):
            reduce(packed_SX, plan.to_ranks, tokens_TX)

    def _exchange_counts(
        self, ids_TK: Tensor, ranks_TP: Tensor, num_experts: int, chunks: list[slice]
    ) -> tuple[list[Traffic], list[tuple[int, ...]]]:
        """The layer's one host sync: rows from each rank to each rank ``[C, P, P]``, rows of each local expert ``[C, e]``.

        P ranks, C chunks. Every rank tells every other, for each chunk, how many tokens it sends to each rank, and how many
        slots of them want each expert.
        """
        sent_CP, slots_CE = count_keys(ranks_TP, self.size, chunks), count_keys(ids_TK, num_experts, chunks)
        told = torch.cat([sent_CP, slots_CE], dim=1)
        heard_PCx = told.new_empty(self.size, *told.shape)
        dist.all_to_all_single(heard_PCx, told.expand_as(heard_PCx).contiguous(), group=self.group)
        heard: list[list[list[int]]] = heard_PCx.tolist()
        by_chunk = list(zip(*heard, strict=True))
        traffic_CPP = [tuple(tuple(row[: self.size]) for row in rows_P) for rows_P in by_chunk]
        num_local = num_experts // self.size
        first = self.size + self.rank * num_local
        counts_Ce = [
            tuple(map(sum, zip(*(row[first : first + num_local] for row in rows_P), strict=True)))
            for rows_P in by_chunk
        ]
        return traffic_CPP, counts_Ce

    def _exchange_ids(
        self, ids_TK: Tensor, num_local: int, chunks: list[slice], to_ranks: list[RowMap], traffic_CPP: list[Traffic]
    ) -> list[Tensor]:
        """The local expert ids of the rows that each chunk will bring: int32 ``[N, K]``, ``-1`` for experts elsewhere.

        One exchange serves all chunks: what goes to a rank is ordered by chunk, and what comes from a rank splits into its
        chunks.
        """
        packed = [gather(ids_TK[tokens], rows) for tokens, rows in zip(chunks, to_ranks, strict=True)]
        parts_CP = [
            torch.split(packed_SK, list(traffic_PP[self.rank]))
            for packed_SK, traffic_PP in zip(packed, traffic_CPP, strict=True)
        ]
        outbox_SK = torch.cat([part for parts_C in zip(*parts_CP, strict=True) for part in parts_C])
        send_splits = [
            sum(rows_C) for rows_C in zip(*(traffic_PP[self.rank] for traffic_PP in traffic_CPP), strict=True)
        ]
        arrivals_PC = [[traffic_PP[peer][self.rank] for traffic_PP in traffic_CPP] for peer in range(self.size)]
        recv_splits = [sum(rows_C) for rows_C in arrivals_PC]
        ids_NK = outbox_SK.new_empty(sum(recv_splits), ids_TK.shape[1])
        dist.all_to_all_single(ids_NK, outbox_SK, recv_splits, send_splits, self.group)
        ids_NK -= self.rank * num_local
        ids_NK.masked_fill_(ids_NK >= num_local, -1)  # experts of the ranks before are negative already
        pieces = torch.split(ids_NK, [rows for rows_C in arrivals_PC for rows in rows_C])
        return [torch.cat(pieces[c :: len(chunks)]) for c in range(len(chunks))]
