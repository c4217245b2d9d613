"""Expert parallelism by an all-to-all exchange of rows; the transport is gloo, NCCL, or copies over NVLink."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from lightning_moe.dispatch.base import Arriving, Leaving, Place, Plan
from lightning_moe.dispatch.bundle import columns, empty, row_bytes
from lightning_moe.dispatch.local import Places, Rows
from lightning_moe.dispatch.planner import Planner
from lightning_moe.dispatch.transport import COMBINE, DISPATCH, Traffic, Transport
from lightning_moe.ops.rows import gather, reduce


class AllToAllDispatcher(Planner):
    """See :class:`~lightning_moe.dispatch.base.Dispatcher`.

    Args:
        group: The expert-parallel group.
        transport: Moves the packed rows between the ranks of this group.

    """

    def __init__(self, group: dist.ProcessGroup, transport: Transport) -> None:
        super().__init__(group, transport.teller)
        self.transport = transport

    def arriving(self, plan: Plan, tokens: Sequence[Tensor]) -> Arriving:
        if plan.route is None:
            return Rows(tokens)
        return _Arriving(tokens, empty(plan.num_rows, row_bytes(tokens), tokens[0].device))

    def dispatch(self, plan: Plan, tokens: Sequence[Tensor], arriving: Arriving) -> None:
        if not isinstance(arriving, _Arriving):
            return
        route, inbox_NW = plan.route, arriving.inbox_NW
        outbox = self.transport.outbox(DISPATCH, route.traffic, inbox_NW)
        copies = route.copies
        for tokens_TX, sent_SX in zip(tokens, columns(outbox, tokens), strict=True):
            gather(tokens_TX, copies, sent_SX)
        self.transport.exchange(DISPATCH, route.traffic, outbox, inbox_NW[: route.num_received])
        self.append_own(plan, tokens, arriving.rows)

    def leaving(self, plan: Plan, tokens: Sequence[Tensor]) -> Leaving:
        route = plan.route
        if route is None:
            return Places.of_own(plan, tokens)
        inbox_SW = empty(route.num_sent, row_bytes(tokens), tokens[0].device)
        outbox = self.transport.outbox(COMBINE, _transposed(route.traffic), inbox_SW)
        return _Leaving(self.places(plan, columns(outbox, tokens), tokens), outbox, inbox_SW)

    def combine(self, plan: Plan, leaving: Leaving, tokens: Sequence[Tensor]) -> None:
        if not isinstance(leaving, _Leaving):
            return
        route = plan.route
        self.transport.exchange(COMBINE, _transposed(route.traffic), leaving.outbox, leaving.inbox_SW)
        copies, num_summed = route.copies, self.num_summed(plan)
        for copies_SX, tokens_TX in zip(columns(leaving.inbox_SW, tokens), tokens, strict=True):
            reduce(copies_SX, copies, tokens_TX, num_summed)


@dataclass(frozen=True)
class _Arriving:
    """An inbox, uint8 ``[N, W]``, for rows like some tensors."""

    like: Sequence[Tensor]
    inbox_NW: Tensor

    @cached_property
    def rows(self) -> Sequence[Tensor]:
        """Its columns, found when they are needed: the first matrix product does not wait for that."""
        return columns(self.inbox_NW, self.like)


class _Leaving(NamedTuple):
    """The columns of an outbox, and an inbox for the answer: uint8 ``[S, W]``."""

    places: Sequence[Place]
    outbox: Tensor
    inbox_SW: Tensor


def _transposed(traffic: Traffic) -> Traffic:
    return tuple(zip(*traffic, strict=True))
