"""The dispatcher of a rank that holds all the experts: no row leaves it, so tokens and rows are the same tensor."""

from __future__ import annotations

from torch import Tensor

from lightning_moe.dispatch.base import Plan, chunk_slices, make_plan, slots_per_expert


class LocalDispatcher:
    """See :class:`~lightning_moe.dispatch.base.Dispatcher`."""

    size = 1

    def plan(self, ids_TK: Tensor, num_experts: int, num_chunks: int) -> list[Plan]:
        chunks = chunk_slices(ids_TK.shape[0], num_chunks)
        counts_CE = slots_per_expert(ids_TK, num_experts, chunks).tolist()  # the layer's one host sync
        ids_TK = ids_TK.int()
        return [
            make_plan(tokens, ids_TK[tokens], tuple(counts_E))
            for tokens, counts_E in zip(chunks, counts_CE, strict=True)
        ]

    def rows_like(self, plan: Plan, tokens_TX: Tensor) -> Tensor:
        return tokens_TX

    def dispatch(self, plan: Plan, tokens_TX: Tensor, rows_NX: Tensor) -> None:
        if rows_NX is not tokens_TX:
            rows_NX.copy_(tokens_TX)

    def combine(self, plan: Plan, rows_NX: Tensor, tokens_TX: Tensor) -> None:
        if tokens_TX is not rows_NX:
            tokens_TX.copy_(rows_NX)
