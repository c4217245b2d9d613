"""The dispatcher of a rank that holds all the experts: no row leaves it, so tokens and rows are the same tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_moe.dispatch.base import Arriving, HostCopy, Leaving, Place, Plan, check_plan, nothing
from lightning_moe.ops.routing import Order, as_ids, chunk_slices, count_needs, sort_by_expert


class LocalDispatcher:
    """See :class:`~lightning_moe.dispatch.base.Dispatcher`."""

    size = 1

    def plan(
        self,
        ids_TK: Tensor,
        weights_TK: Tensor,
        num_experts: int,
        num_chunks: int,
        meanwhile: Callable[[], None] = nothing,
    ) -> list[Plan]:
        check_plan(num_experts, num_chunks, self.size)
        ids_TK, experts = as_ids(ids_TK), range(num_experts)
        counts_C21 = torch.empty(num_chunks, 2, 1, dtype=torch.int64, device=ids_TK.device)
        count_needs(ids_TK, num_experts, counts_C21)
        counts = HostCopy(counts_C21)
        chunks = chunk_slices(ids_TK.shape[0], num_chunks)
        orders = [order_of_own(ids_TK[tokens], weights_TK[tokens], experts) for tokens in chunks]
        meanwhile()
        return [
            Plan(
                tokens, ids_TK[tokens], tokens.stop - tokens.start, experts, num_sorted, 0, order.cut(num_sorted), None
            )
            for tokens, order, (_, (num_sorted,)) in zip(chunks, orders, counts.wait(), strict=True)
        ]

    def arriving(self, plan: Plan, tokens: Sequence[Tensor]) -> Arriving:
        return Rows(tokens)

    def dispatch(self, plan: Plan, tokens: Sequence[Tensor], arriving: Arriving) -> None:
        """Nothing to do."""

    def leaving(self, plan: Plan, tokens: Sequence[Tensor]) -> Leaving:
        return Places.of_own(plan, tokens)

    def combine(self, plan: Plan, leaving: Leaving, tokens: Sequence[Tensor]) -> None:
        """Nothing to do."""


def order_of_own(ids_TK: Tensor, weights_TK: Tensor, experts: range) -> Order:
    """The order of the tokens themselves by local expert, with more room than it may need: it waits for nothing.

    Args:
        ids_TK: int32 or int64 ``[T, K]``, global experts.
        weights_TK: ``[T, K]``.
        experts: The global experts that this rank holds.

    """
    num_tokens, top_k = ids_TK.shape
    order = Order.empty(num_tokens, top_k, len(experts), ids_TK.numel(), weights_TK)
    sort_by_expert(ids_TK, weights_TK, experts.start, order)
    return order


class Rows(NamedTuple):
    """What arrives without memory of its own."""

    rows: Sequence[Tensor]


class Places(NamedTuple):
    """What leaves without memory of its own."""

    places: Sequence[Place]

    @staticmethod
    def of_own(plan: Plan, tokens: Sequence[Tensor]) -> Places:
        """Rows that stay on their rank go into their tokens at once."""
        return Places([Place(slice(0, plan.num_rows), tokens, plan.num_summed)])
