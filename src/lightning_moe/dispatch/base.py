"""The protocol of a dispatcher and the plan it works from.

A dispatcher implements two linear maps over one plan, each the adjoint of the other:

* ``dispatch`` copies every token to the ranks that own its experts;
* ``combine`` sums the rows that came from one token back into it.

So the backward of one is the other on the same plan, and no dispatcher contains autograd. Property:
``<dispatch(x), r> == <x, combine(r)>``, summed over the ranks.

Legend: T tokens of a chunk, K experts per token, N rows received, R rows sorted by expert, E experts, e local experts,
X any trailing width (hidden size for tokens, K for their routing weights).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from torch import Tensor

from lightning_moe.ops.grouped_mm import Groups
from lightning_moe.ops.rows import RowMap, rows_by_key

Traffic = tuple[tuple[int, ...], ...]
"""``[P, P]``: rows from each rank to each rank of a group; ``traffic[i][j]`` go from i to j."""


@dataclass(frozen=True)
class Plan:
    """How one chunk of tokens travels: a value, made once, read by dispatch, combine and their backward.

    Args:
        tokens: The chunk's place in the local batch.
        to_ranks: Map from the chunk's T tokens to the rows sent, sorted by destination rank; ``None`` where no row leaves.
        traffic_PP: Rows from each rank to each rank of the group; empty where no row leaves.
        by_expert: Map from the N rows received to the R rows sorted by local expert.
        slots_R: int32 ``[R]``, flat index into the received ``[N, K]`` slots of each sorted row.
        groups: The rows of each local expert.

    """

    tokens: slice
    to_ranks: RowMap | None
    traffic_PP: Traffic
    by_expert: RowMap
    slots_R: Tensor
    groups: Groups


class Dispatcher(Protocol):
    """Two adjoint linear maps between tokens and the rows that this rank's experts work on.

    Every rank of the group makes the same calls in the same order, with zero tokens too. Both maps write into buffers
    that the caller owns.
    """

    @property
    def size(self) -> int:
        """Ranks in the expert-parallel group."""

    def plan(self, ids_TK: Tensor, num_experts: int, num_chunks: int) -> list[Plan]:
        """Agree with the other ranks on what goes where, for every chunk at once.

        Args:
            ids_TK: ``[T, K]`` integer, the global expert of each slot of the whole local batch; ``-1`` for none.
            num_experts: E, over all ranks; divisible by the size of the group.
            num_chunks: The same on every rank, whatever its tokens.

        Returns:
            One plan for each chunk.

        """

    def rows_like(self, plan: Plan, tokens_TX: Tensor) -> Tensor:
        """A buffer ``[N, X]`` for the rows that belong to ``tokens_TX``; its content is undefined.

        It may be ``tokens_TX`` itself where no row leaves the rank: then dispatch and combine have nothing to do.
        """

    def dispatch(self, plan: Plan, tokens: Sequence[Tensor], rows: Sequence[Tensor]) -> None:
        """Copy tokens ``[T, X]`` into the rows ``[N, X]`` of the ranks that own their experts.

        Several tensors, each with its own X, travel together: hidden states and routing weights, say.
        """

    def combine(self, plan: Plan, rows: Sequence[Tensor], tokens: Sequence[Tensor]) -> None:
        """Sum rows ``[N, X]`` into the tokens ``[T, X]`` that they were copied from; several tensors, as above."""


def chunk_slices(num_tokens: int, num_chunks: int) -> list[slice]:
    """Cut a batch into contiguous chunks whose sizes differ by one at most; with few tokens some are empty.

    >>> chunk_slices(5, 2)
    [slice(0, 3, None), slice(3, 5, None)]

    """
    bounds = [-(-num_tokens * i // num_chunks) for i in range(num_chunks + 1)]
    return [slice(start, stop) for start, stop in pairwise(bounds)]


def make_plan(
    tokens: slice,
    ids_NK: Tensor,
    counts: tuple[int, ...],
    to_ranks: RowMap | None = None,
    traffic_PP: Traffic = (),
) -> Plan:
    """Complete a plan with the order of the received rows on this rank.

    Args:
        tokens: See :class:`Plan`.
        ids_NK: int32 ``[N, K]``, the local expert of each received slot, ``-1`` for experts elsewhere.
        counts: Slots of each local expert, on the host.
        to_ranks: See :class:`Plan`.
        traffic_PP: See :class:`Plan`.

    """
    by_expert, slots_R, ends_e = rows_by_key(ids_NK, len(counts), sum(counts))
    return Plan(tokens, to_ranks, traffic_PP, by_expert, slots_R, Groups(counts, ends_e))
