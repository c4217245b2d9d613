"""The dispatcher of a rank that holds all the experts: no row leaves it, so tokens and rows are the same tensor."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lightning_moe.dispatch.base import Plan, chunk_slices, make_plan
from lightning_moe.ops.rows import count_keys


class LocalDispatcher:
    """See :class:`~lightning_moe.dispatch.base.Dispatcher`."""

    size = 1

    def plan(self, ids_TK: Tensor, num_experts: int, num_chunks: int) -> list[Plan]:
        chunks = chunk_slices(ids_TK.shape[0], num_chunks)
        ids_TK = ids_TK.int()
        counts_CE = count_keys(ids_TK, num_experts, chunks).tolist()  # the layer's one host sync
        return [
            make_plan(tokens, ids_TK[tokens], tuple(counts_E))
            for tokens, counts_E in zip(chunks, counts_CE, strict=True)
        ]

    def rows_like(self, plan: Plan, tokens_TX: Tensor) -> Tensor:
        return tokens_TX

    def dispatch(self, plan: Plan, tokens: Sequence[Tensor], rows: Sequence[Tensor]) -> None:
        for tokens_TX, rows_NX in zip(tokens, rows, strict=True):
            if rows_NX is not tokens_TX:
                rows_NX.copy_(tokens_TX)

    def combine(self, plan: Plan, rows: Sequence[Tensor], tokens: Sequence[Tensor]) -> None:
        self.dispatch(plan, rows, tokens)
