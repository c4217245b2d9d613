"""The plan of every dispatcher between several ranks.

A token goes once to each other rank that holds any of its experts, however many of them live there: with 8 experts a token,
128 experts and 8 ranks, that is 4.6 rows instead of 7. The receiver makes the copies for its experts. The token's row for
its own rank stays where it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lightning_moe.dispatch.base import Place, Plan, check_plan, nothing
from lightning_moe.dispatch.local import order_of_own
from lightning_moe.dispatch.schedule import schedule
from lightning_moe.dispatch.transport import Teller, Traffic
from lightning_moe.ops.routing import as_ids, chunk_slices, count_needs, place_copies
from lightning_moe.ops.rows import RowMap


class Planner:
    """The plan of every dispatcher between several ranks; its route is a :class:`Route`.

    Args:
        group: The expert-parallel group.
        teller: Tells each rank's host what the others send it.

    """

    def __init__(self, group: dist.ProcessGroup, teller: Teller) -> None:
        self.size = group.size()
        self.rank = group.rank()
        self._teller = teller

    def plan(
        self,
        ids_TK: Tensor,
        weights_TK: Tensor,
        num_experts: int,
        num_chunks: int,
        meanwhile: Callable[[], None] = nothing,
    ) -> list[Plan]:
        check_plan(num_experts, num_chunks, self.size)
        ids_TK = as_ids(ids_TK)
        chunks, num_units, num_travels = schedule(num_chunks, self.size)
        num_local, num_tokens = num_experts // self.size, ids_TK.shape[0]
        experts = range(self.rank * num_local, (self.rank + 1) * num_local)
        units = chunk_slices(num_tokens, num_units)
        tokens_of = [slice(units[chunk.units.start].start, units[chunk.units.stop - 1].stop) for chunk in chunks]
        blank = self._teller.blank((num_units, 2, self.size), ids_TK.device)
        count_needs(ids_TK, num_experts, blank.words, blank.mark)
        heard = self._teller.tell(blank)
        # the device sorts the first chunk's rows, if it has them, while the host waits
        first = tokens_of[0]
        order = None if chunks[0].peers else order_of_own(ids_TK[first], weights_TK[first], experts)
        copies_TJ = _Copies(ids_TK, num_experts, self.size, self.rank, num_travels)
        meanwhile()
        counts_PN = heard.wait()
        plans: list[Plan] = []
        num_written = 0  # so many tokens get the first part of their sum from own rows, the others from the peers' rows
        for chunk, tokens in zip(chunks, tokens_of, strict=True):
            num_tokens = tokens.stop - tokens.start
            num_rows = num_sorted = num_summed = 0
            route = None
            if chunk.own:
                _, slots_P = _summed(counts_PN[self.rank], chunk.units, self.size)
                num_rows, num_sorted = num_tokens, slots_P[self.rank]
            if chunk.peers:
                counts_P2P = [_summed(counts_N, chunk.units, self.size) for counts_N in counts_PN]
                traffic = _peers([tokens_P for tokens_P, _ in counts_P2P])
                num_received = sum(row[self.rank] for row in traffic)
                route = Route(copies_TJ, tokens, traffic, num_received, sum(traffic[self.rank]))
                num_rows += num_received
                num_sorted += sum(slots[self.rank] for rank, (_, slots) in enumerate(counts_P2P) if rank != self.rank)
                num_summed = min(max(num_written - tokens.start, 0), num_tokens)
            elif any(plan.route for plan in plans):
                num_summed = num_tokens
            else:
                num_written = tokens.stop
            order = order.cut(num_sorted) if order is not None and not plans else None
            plans.append(Plan(tokens, ids_TK[tokens], num_rows, experts, num_sorted, num_summed, order, route))
        return plans

    @staticmethod
    def append_own(plan: Plan, tokens: Sequence[Tensor], rows: Sequence[Tensor]) -> None:
        """Copy the tokens behind the peers' rows, where the plan takes the own ones too."""
        if _takes_own(plan):
            for tokens_TX, rows_NX in zip(tokens, rows, strict=True):
                rows_NX[plan.route.num_received :] = tokens_TX

    @staticmethod
    def places(plan: Plan, peers: Sequence[Tensor], tokens: Sequence[Tensor]) -> list[Place]:
        """The peers' rows go where they leave from, the own ones into the tokens at once."""
        num_received = plan.route.num_received
        places = [Place(slice(0, num_received), peers, 0)]
        if _takes_own(plan):
            places.append(Place(slice(num_received, plan.num_rows), tokens, plan.num_summed))
        return places

    @staticmethod
    def num_summed(plan: Plan) -> int:
        """So many of the first tokens hold a part of their sum when the peers' part is added."""
        return plan.tokens.stop - plan.tokens.start if _takes_own(plan) else plan.num_summed


@dataclass(frozen=True)
class _Copies:
    """Where the copies of all tokens go, found when it is first asked for: on the communication lane, behind the first work.

    That lane alone reads it, so it may be that lane's memory.
    """

    ids_TK: Tensor
    num_experts: int
    num_ranks: int
    rank: int
    num_travels: int

    @cached_property
    def places_TJ(self) -> Tensor:
        """See :func:`~lightning_moe.ops.routing.place_copies`."""
        return place_copies(self.ids_TK, self.num_experts, self.num_ranks, self.rank, self.num_travels)


@dataclass
class Route:
    """The rows of a chunk that travel; where it also takes own ones, those come after the peers', one for each token.

    Args:
        all_copies: Of all tokens.
        tokens: The chunk's.
        traffic: Rows from each rank to each other one.
        num_received: Rows that come to this rank, sorted by peer.
        num_sent: Rows that leave it, sorted by peer.
        handle: What a dispatcher found out about this route and needs again.

    """

    all_copies: _Copies
    tokens: slice
    traffic: Traffic
    num_received: int
    num_sent: int
    handle: Any = None

    @property
    def copies(self) -> RowMap:
        """Map from the chunk's T tokens to the S rows sent."""
        return RowMap(self.all_copies.places_TJ[self.tokens], self.num_sent)


def _takes_own(plan: Plan) -> bool:
    """Whether a chunk whose rows travel holds rows that stay, too."""
    return bool(plan.num_rows > plan.route.num_received)


def _summed(counts_U2P: list[int], units: slice, size: int) -> tuple[list[int], list[int]]:
    """Tokens and slots for each rank, over some units of a flattened ``[U, 2, P]``."""
    line = [
        counts_U2P[start : start + 2 * size] for start in range(2 * size * units.start, 2 * size * units.stop, 2 * size)
    ]
    sums = line[0] if len(line) == 1 else [sum(numbers) for numbers in zip(*line, strict=True)]
    return sums[:size], sums[size:]


def _peers(tokens_PP: list[list[int]]) -> Traffic:
    """Without the rows that stay where they are."""
    return tuple(tuple(0 if i == j else n for j, n in enumerate(row)) for i, row in enumerate(tokens_PP))
