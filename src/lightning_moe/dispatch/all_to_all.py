"""Expert parallelism by an all-to-all exchange of rows; the transport is gloo, NCCL, or copies over NVLink.

A token goes once to each other rank that holds any of its experts, however many of them live there: with 8 experts a token,
128 experts and 8 ranks, that is 4.6 rows instead of 7. The receiver makes the copies for its experts. The token's row for
its own rank stays where it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_moe.dispatch.base import Arriving, HostCopy, Leaving, Place, Plan
from lightning_moe.dispatch.bundle import columns, empty, row_bytes
from lightning_moe.dispatch.local import Places, Rows
from lightning_moe.dispatch.schedule import Chunk, schedule
from lightning_moe.dispatch.transport import COMBINE, DISPATCH, Traffic, Transport
from lightning_moe.ops.routing import chunk_slices, count_needs, place_copies
from lightning_moe.ops.rows import RowMap, gather, reduce


class AllToAllDispatcher:
    """See :class:`~lightning_moe.dispatch.base.Dispatcher`.

    Args:
        group: The expert-parallel group. Its timeout bounds every wait.
        transport: Moves the packed rows between the ranks of this group.

    """

    def __init__(self, group: dist.ProcessGroup, transport: Transport) -> None:
        self.size = group.size()
        self.rank = group.rank()
        self.transport = transport
        self._peers = [peer for peer in range(self.size) if peer != self.rank]
        self._heard_at = [[*self._peers, self.rank].index(rank) for rank in range(self.size)]

    def plan(self, ids_TK: Tensor, num_experts: int, num_chunks: int) -> list[Plan]:
        chunks, num_units, num_travels = schedule(num_chunks, self.size)
        heard = HostCopy(self._tell(count_needs(ids_TK, num_experts, self.size, num_units)))
        # the device does this while the host waits
        copies_TJ = place_copies(ids_TK, num_experts, self.size, self.rank, num_travels)
        ids_TK = ids_TK.int()
        counts_PUX = heard.wait()[self._heard_at]
        return [self._plan(chunk, chunks[:i], counts_PUX, ids_TK, copies_TJ) for i, chunk in enumerate(chunks)]

    def arriving(self, plan: Plan, tokens: Sequence[Tensor]) -> Arriving:
        if plan.route.peers is None:
            return Rows(tokens)
        inbox_NW = empty(plan.num_rows, row_bytes(tokens), tokens[0].device)
        return _Arriving(columns(inbox_NW, tokens), inbox_NW)

    def dispatch(self, plan: Plan, tokens: Sequence[Tensor], arriving: Arriving) -> None:
        if not isinstance(arriving, _Arriving):
            return
        peers, inbox_NW = plan.route.peers, arriving.inbox_NW
        outbox = self.transport.outbox(DISPATCH, peers.traffic, inbox_NW)
        for tokens_TX, sent_SX in zip(tokens, columns(outbox, tokens), strict=True):
            gather(tokens_TX, peers.copies, sent_SX)
        self.transport.exchange(DISPATCH, peers.traffic, outbox, inbox_NW[: peers.num_received])
        if plan.route.own is not None:
            for tokens_TX, rows_NX in zip(tokens, arriving.rows, strict=True):
                rows_NX[peers.num_received :] = tokens_TX

    def leaving(self, plan: Plan, tokens: Sequence[Tensor]) -> Leaving:
        peers, own = plan.route
        num_received = 0 if peers is None else peers.num_received
        places = [] if own is None else [Place(slice(num_received, plan.num_rows), tokens, own.num_summed)]
        if peers is None:
            return Places(places)
        inbox_SW = empty(peers.copies.num_copies, row_bytes(tokens), tokens[0].device)
        outbox = self.transport.outbox(COMBINE, _transposed(peers.traffic), inbox_SW)
        return _Leaving([Place(slice(0, num_received), columns(outbox, tokens), 0), *places], outbox, inbox_SW)

    def combine(self, plan: Plan, leaving: Leaving, tokens: Sequence[Tensor]) -> None:
        if not isinstance(leaving, _Leaving):
            return
        peers = plan.route.peers
        self.transport.exchange(COMBINE, _transposed(peers.traffic), leaving.outbox, leaving.inbox_SW)
        for copies_SX, tokens_TX in zip(columns(leaving.inbox_SW, tokens), tokens, strict=True):
            reduce(copies_SX, peers.copies, tokens_TX, peers.num_summed)

    def _tell(self, counts_UX: Tensor) -> Tensor:
        """Tell every rank: int32 ``[P, U, X]``, the counts of the peers in order, then the own ones."""
        told = counts_UX.view(1, -1).view(torch.uint8)
        traffic = tuple(tuple(int(i != j) for j in range(self.size)) for i in range(self.size))
        heard = empty(self.size, told.shape[1], told.device)
        outbox = self.transport.outbox(DISPATCH, traffic, heard)
        outbox.copy_(told.expand_as(outbox))
        heard[-1:] = told
        self.transport.exchange(DISPATCH, traffic, outbox, heard[:-1])
        return heard.view(torch.int32).view(self.size, *counts_UX.shape)

    def _plan(
        self, chunk: Chunk, before: Sequence[Chunk], counts_PUX: Tensor, ids_TK: Tensor, copies_TJ: Tensor
    ) -> Plan:
        """One chunk's plan; counts are those of each rank's units: tokens for each rank, then slots of each expert."""
        num_units, num_local = counts_PUX.shape[1], (counts_PUX.shape[2] - self.size) // self.size
        units = chunk_slices(ids_TK.shape[0], num_units)
        tokens = slice(units[chunk.units.start].start, units[chunk.units.stop - 1].stop)
        num_tokens = tokens.stop - tokens.start
        # the own rows that were worked on before hold a part of their tokens' sums
        summed = max((units[c.units.stop - 1].stop for c in before if c.own), default=0)
        counts_PX = counts_PUX[:, chunk.units].sum(1)
        first_expert = self.rank * num_local
        mine = slice(self.size + first_expert, self.size + first_expert + num_local)
        counts_e, num_rows, peers, own = torch.zeros(num_local, dtype=counts_PX.dtype), 0, None, None
        if chunk.peers:
            sent_PP = counts_PX[:, : self.size].fill_diagonal_(0)
            traffic = tuple(map(tuple, sent_PP.tolist()))
            num_rows += sum(row[self.rank] for row in traffic)
            counts_e += counts_PX[self._peers, mine].sum(0)
            copies = RowMap(copies_TJ[tokens], sum(traffic[self.rank]))
            num_summed = num_tokens if chunk.own else min(max(summed - tokens.start, 0), num_tokens)
            peers = _Peers(copies, traffic, num_rows, num_summed)
        if chunk.own:
            num_rows += num_tokens
            counts_e += counts_PX[self.rank, mine]
            own = _Own(num_tokens if any(c.peers for c in before) else 0)
        return Plan(tokens, ids_TK[tokens], num_rows, first_expert, tuple(counts_e.tolist()), _Route(peers, own))


class _Peers(NamedTuple):
    """The rows of a chunk that travel.

    Args:
        copies: Map from the chunk's T tokens to the S rows sent, sorted by peer.
        traffic: Rows from each rank to each other one.
        num_received: Rows that come to this rank, sorted by peer.
        num_summed: So many of the chunk's first tokens hold a part of their sum when the peers' is added.

    """

    copies: RowMap
    traffic: Traffic
    num_received: int
    num_summed: int


class _Own(NamedTuple):
    """The rows of a chunk that stay: one for each token, whether it has experts here or not.

    Args:
        num_summed: So many of the chunk's tokens hold a part of their sum when the own one is added.

    """

    num_summed: int


class _Route(NamedTuple):
    """Which rows a chunk takes; the peers' come first."""

    peers: _Peers | None
    own: _Own | None


class _Arriving(NamedTuple):
    """The columns of an inbox: uint8 ``[N, W]``."""

    rows: Sequence[Tensor]
    inbox_NW: Tensor


class _Leaving(NamedTuple):
    """The columns of an outbox, and an inbox for the answer: uint8 ``[S, W]``."""

    places: Sequence[Place]
    outbox: Tensor
    inbox_SW: Tensor


def _transposed(traffic: Traffic) -> Traffic:
    return tuple(zip(*traffic, strict=True))
