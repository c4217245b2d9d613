"""The dispatcher of a rank that holds all the experts: no row leaves it, so tokens and rows are the same tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from lightning_moe.dispatch.base import Arriving, HostCopy, Leaving, Place, Plan
from lightning_moe.ops.routing import chunk_slices, count_needs


class LocalDispatcher:
    """See :class:`~lightning_moe.dispatch.base.Dispatcher`."""

    size = 1

    def plan(self, ids_TK: Tensor, num_experts: int, num_chunks: int) -> list[Plan]:
        counts = HostCopy(count_needs(ids_TK, num_experts, 1, num_chunks))
        ids_TK = ids_TK.int()
        counts_CX = counts.wait().tolist()
        return [
            Plan(tokens, ids_TK[tokens], tokens.stop - tokens.start, 0, tuple(counts_X[1:]), None)
            for tokens, counts_X in zip(chunk_slices(ids_TK.shape[0], num_chunks), counts_CX, strict=True)
        ]

    def arriving(self, plan: Plan, tokens: Sequence[Tensor]) -> Arriving:
        return Rows(tokens)

    def dispatch(self, plan: Plan, tokens: Sequence[Tensor], arriving: Arriving) -> None:
        """Nothing to do."""

    def leaving(self, plan: Plan, tokens: Sequence[Tensor]) -> Leaving:
        return Places([Place(slice(0, plan.num_rows), tokens, 0)])

    def combine(self, plan: Plan, leaving: Leaving, tokens: Sequence[Tensor]) -> None:
        """Nothing to do."""


class Rows(NamedTuple):
    """What arrives without memory of its own."""

    rows: Sequence[Tensor]


class Places(NamedTuple):
    """What leaves without memory of its own."""

    places: Sequence[Place]
