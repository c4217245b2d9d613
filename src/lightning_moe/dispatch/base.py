"""The protocol of a dispatcher and the plan it works from.

A dispatcher implements two linear maps over one plan, each the adjoint of the other:

* ``dispatch`` copies every token to the ranks that own its experts;
* ``combine`` sums the rows that came from one token back into it.

So the backward of one is the other on the same plan, and no dispatcher contains autograd. Property:
``<dispatch(x), r> == <x, combine(r)>``, summed over the ranks and over the plans of one layer.

Legend: T tokens of a chunk, K experts per token, N rows received, R rows sorted by expert, E experts, X any trailing width
(hidden size for tokens, K for their routing weights and ids).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_moe.ops.routing import Order


@dataclass(frozen=True)
class Plan:
    """What becomes of one chunk of rows: a value, made once, read by dispatch, combine and their backward.

    Args:
        tokens: The tokens that its rows belong to, a part of the local batch.
        ids_TK: int32 or int64 ``[T, K]``, the global experts of these tokens, ``-1`` for none: they travel with the tokens.
        num_rows: N.
        experts: The global experts that this rank holds.
        num_sorted: R, the slots of the received rows that name one of them.
        num_summed: So many of its first tokens hold a part of their sum once the plans before it have been combined.
        order: How the rows are sorted by expert, where that is known before they arrive.
        route: The dispatcher's own; ``None`` where no row leaves the rank, and nothing is to be dispatched or combined.

    """

    tokens: slice
    ids_TK: Tensor
    num_rows: int
    experts: range
    num_sorted: int
    num_summed: int
    order: Order | None
    route: Any


class Arriving(Protocol):
    """Memory that a dispatch fills."""

    @property
    def rows(self) -> Sequence[Tensor]:
        """``[N, X]`` for each tensor that is dispatched, int32 for int64 perhaps; elements of a row lie side by side."""


class Place(NamedTuple):
    """Where some of a chunk's N rows go.

    Args:
        rows: Which ones.
        out: ``[n, X]`` for each tensor that is combined.
        num_summed: So many of the first of them are tokens that hold a part of their sum already: they are added to.

    """

    rows: slice
    out: Sequence[Tensor]
    num_summed: int


class Leaving(Protocol):
    """Memory that a combine empties."""

    @property
    def places(self) -> Sequence[Place]:
        """To be written before the combine; together they take all N rows."""


def check_plan(num_experts: int, num_chunks: int, size: int) -> None:
    """Raise a ``ValueError`` for numbers that no plan can be made of."""
    if num_chunks < 1 or num_experts % size:
        raise ValueError(
            f"Expected at least 1 chunk, and experts that {size} ranks can share out evenly, but got {num_chunks} chunks and"
            f" {num_experts} experts."
        )


def nothing() -> None:
    """Do nothing."""


class Dispatcher(Protocol):
    """Two adjoint linear maps between tokens and the rows that this rank's experts work on.

    Every rank of the group makes the same calls in the same order, with zero tokens too. The memory of a transfer is made on
    the compute lane, before the transfer is issued to the communication lane. Several tensors travel together, each with its
    own width: hidden states, routing weights and ids, say.
    """

    @property
    def size(self) -> int:
        """Ranks in the expert-parallel group."""

    def plan(
        self,
        ids_TK: Tensor,
        weights_TK: Tensor,
        num_experts: int,
        num_chunks: int,
        meanwhile: Callable[[], None] = nothing,
    ) -> list[Plan]:
        """Agree with the other ranks on what goes where, for every chunk at once; the layer's one host sync.

        Args:
            ids_TK: ``[T, K]`` integer, the global expert of each slot of the whole local batch; ``-1`` for none. They may not
                change while the plans are in use, which need not copy them.
            weights_TK: ``[T, K]``, their routing weights, float32 (float64): those that the rows will be multiplied with, since
                plans may hold them already.
            num_experts: E, over all ranks; divisible by the size of the group.
            num_chunks: The same on every rank, whatever its tokens. With balanced routing no plan holds more than this
                part of the layer's rows; there may be more plans than chunks.
            meanwhile: Is called before the host waits, to give the device work that does not need the plans.

        Returns:
            The plans, in the order in which they must be worked on.

        """

    def arriving(self, plan: Plan, tokens: Sequence[Tensor]) -> Arriving:
        """Room for the rows that belong to tokens ``[T, X]``; its content is undefined."""

    def dispatch(self, plan: Plan, tokens: Sequence[Tensor], arriving: Arriving) -> None:
        """Copy tokens ``[T, X]`` into the rows of the ranks that own their experts."""

    def leaving(self, plan: Plan, tokens: Sequence[Tensor]) -> Leaving:
        """Places for the rows that are to be summed into tokens ``[T, X]``; the plans before have been combined."""

    def combine(self, plan: Plan, leaving: Leaving, tokens: Sequence[Tensor]) -> None:
        """Sum rows into the tokens ``[T, X]`` that they were copied from."""


class HostCopy:
    """A tensor on its way to the host, so that more work can be issued before its numbers are waited for."""

    def __init__(self, tensor: Tensor) -> None:
        self._arrived: torch.cuda.Event | None = None
        self._copy = tensor
        if tensor.is_cuda:
            self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._copy.copy_(tensor, non_blocking=True)
            self._arrived = torch.cuda.current_stream(tensor.device).record_event()

    @property
    def has_arrived(self) -> bool:
        """Whether :meth:`wait` returns at once."""
        return self._arrived is None or self._arrived.query()  # type: ignore[no-untyped-call]

    def wait(self) -> list[Any]:
        """Its numbers."""
        if self._arrived is not None:
            self._arrived.synchronize()
        numbers: list[Any] = self._copy.tolist()
        return numbers
