"""Expert parallelism over DeepEP, whose kernels move rows between the GPUs of one host, and sum them on their way back.

A kernel reads a token once and writes it to every peer that needs it, so nothing is sorted by destination; but it runs on
multiprocessors that the experts' matrix products could use. Which token goes where DeepEP learns in a plan's first dispatch,
which leaves a handle for all later ones and for combine. How many rows arrive the plan knows: the host never waits.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_moe.buffers import subscribe
from lightning_moe.dispatch.base import Arriving, Leaving, Place, Plan
from lightning_moe.dispatch.bundle import columns, empty, row_bytes
from lightning_moe.dispatch.local import Places, Rows
from lightning_moe.dispatch.mailbox import Mailbox
from lightning_moe.dispatch.planner import Planner, Route

SIZES = (2, 4, 8)  # ranks of a group that DeepEP serves on one host

# a dispatched row's most bytes and their unit, and the most numbers that are summed beside a row: beyond these the GPU stops
_MOST_BYTES, _DISPATCH_UNIT, _MOST_NUMBERS = 16352, 32, 32
_COMBINE_UNIT = 512  # bytes of a row that the lanes of a warp sum at once


@dataclass(frozen=True)
class DeepEPSettings:
    """How DeepEP moves rows; the same on every rank.

    Args:
        multiprocessors: An even number; half of them send, half receive.
        dispatch_rows: Rows that a sender puts into a receiver's queue at once.
        combine_rows: Likewise, on the way back.
        queue_rows: Rows that a queue holds; there is one for each rank and each pair of multiprocessors.

    """

    multiprocessors: int
    dispatch_rows: int
    combine_rows: int
    queue_rows: int

    @staticmethod
    def of(size: int, multiprocessors: int) -> DeepEPSettings:
        """What was fastest on two H200s; in larger groups the same warps and memory serve more queues.

        >>> DeepEPSettings.of(size=2, multiprocessors=132)
        DeepEPSettings(multiprocessors=100, dispatch_rows=96, combine_rows=24, queue_rows=256)

        """
        # 32 multiprocessors stay free for kernels of other collectives, which may wait for a peer meanwhile
        return DeepEPSettings(max((multiprocessors - 32) // 2 * 2, 2), 192 // size, 48 // size, 512 // size)


class DeepEPDispatcher(Planner):
    """See :class:`~lightning_moe.dispatch.base.Dispatcher`.

    What is dispatched and combined begins with hidden states in bfloat16; the first call with others raises a ``ValueError``.

    Args:
        group: The expert-parallel group: ranks of one host, as many as ``SIZES`` names.
        device: This rank's GPU.
        timeout: How long a rank waits for the others' counts. DeepEP's kernels have a limit of their own.
        settings: Those of :meth:`DeepEPSettings.of` where they are not given.

    Raises:
        ImportError: There is no package ``deep_ep``.
        OSError: The ranks do not share memory.

    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, timeout: timedelta, settings: DeepEPSettings | None = None
    ) -> None:
        if settings is None:
            settings = DeepEPSettings.of(group.size(), torch.cuda.get_device_properties(device).multi_processor_count)
        self._buffer = _BufferV1(group, settings)
        super().__init__(group, Mailbox(group, timeout))

    def arriving(self, plan: Plan, tokens: Sequence[Tensor]) -> Arriving:
        messages = _messages(tokens)
        if plan.route is None:
            return Rows(tokens)
        inboxes = [empty(plan.num_rows, _width(message), tokens[0].device) for message in messages]
        rows = [row for inbox, message in zip(inboxes, messages, strict=True) for row in columns(inbox, message)]
        return _Arriving(rows, inboxes)

    def dispatch(self, plan: Plan, tokens: Sequence[Tensor], arriving: Arriving) -> None:
        if not isinstance(arriving, _Arriving):
            return
        num_received = plan.route.num_received
        for message, inbox_NW in zip(_messages(tokens), arriving.inboxes, strict=True):
            # what DeepEP returns is the communication lane's memory, so it is copied out before the lane uses it again
            inbox_NW[:num_received] = self._buffer.dispatch(_packed(message), plan.route).view(torch.uint8)
        self.append_own(plan, tokens, arriving.rows)

    def leaving(self, plan: Plan, tokens: Sequence[Tensor]) -> Leaving:
        _messages(tokens)
        if plan.route is None:
            return Places.of_own(plan, tokens)
        (tokens_TH, *slots), num_received = tokens, plan.route.num_received
        rows_NH = tokens_TH.new_empty(num_received, _width([tokens_TH], _COMBINE_UNIT) // 2)
        slots_NK = [slots_TK.new_empty(num_received, slots_TK.shape[1]) for slots_TK in slots]
        peers = [rows_NH[:, : tokens_TH.shape[1]], *slots_NK]
        return _Leaving(self.places(plan, peers, tokens), [rows_NH, *slots_NK])

    def combine(self, plan: Plan, leaving: Leaving, tokens: Sequence[Tensor]) -> None:
        if not isinstance(leaving, _Leaving):
            return
        sums = self._buffer.combine(leaving.outbox, plan.route)
        num_summed = self.num_summed(plan)
        for sums_TX, tokens_TX in zip(sums, tokens, strict=True):
            sums_TX = sums_TX[:, : tokens_TX.shape[1]]
            tokens_TX[:num_summed].add_(sums_TX[:num_summed])  # added in float32, rounded once
            tokens_TX[num_summed:] = sums_TX[num_summed:]


class _BufferV1:
    """``deep_ep.Buffer``, as part of the current stream; V2's ``ElasticBuffer`` would fit the same methods."""

    kind = "communication"

    def __init__(self, group: dist.ProcessGroup, settings: DeepEPSettings) -> None:
        self._library: Any = importlib.import_module("deep_ep")
        self._group = group
        count, queue_rows = settings.multiprocessors, settings.queue_rows
        # the last two are for several hosts
        self._dispatching = self._library.Config(count, settings.dispatch_rows, queue_rows, 6, 128)
        self._combining = self._library.Config(count, settings.combine_rows, queue_rows, 6, 128)
        self._row_bytes = self._num_bytes = 0
        self._buffer: Any = None
        subscribe(self)

    def dispatch(self, rows_TX: Tensor, route: Route) -> Tensor:
        """The peers' rows ``[N, X]``, sorted by peer."""
        buffer = self._for(rows_TX)
        if route.handle is not None:
            received_NX: Tensor = buffer.dispatch(rows_TX, handle=route.handle, config=self._dispatching)[0]
            return received_NX
        places_TJ, rank = route.copies.copies_MJ, self._group.rank()
        nowhere_T1 = torch.full_like(places_TJ[:, :1], -1)  # no token travels to its own rank
        wanted_TP = torch.cat([places_TJ[:, :rank], nowhere_T1, places_TJ[:, rank:]], dim=1) >= 0
        sent_P = wanted_TP.sum(0, dtype=torch.int32)
        received_NX, _, _, _, handle, _ = buffer.dispatch(
            rows_TX,
            num_tokens_per_rank=sent_P,
            is_token_in_rank=wanted_TP,
            # Nothing is asked about experts: one on each rank and one slot a token do. Where there are no tokens, the slots'
            # two pointers must both be null, or the GPU stops; those of new tensors are.
            num_tokens_per_expert=sent_P,
            topk_idx=torch.zeros_like(nowhere_T1, dtype=torch.int64),
            topk_weights=torch.zeros_like(nowhere_T1, dtype=torch.float32),
            num_worst_tokens=max(route.num_received, 1),  # told the number, DeepEP does not wait to learn it
            config=self._dispatching,
        )
        *before, sources_N, wanted_TP, heads_TP = handle
        route.handle = (*before, sources_N[: route.num_received], wanted_TP, heads_TP)
        return received_NX[: route.num_received]

    def combine(self, rows: Sequence[Tensor], route: Route) -> tuple[Tensor, ...]:
        """The sums ``[T, X]`` of bfloat16 rows ``[N, X]``, and of float32 numbers ``[N, K]`` beside them if there are any."""
        buffer, numbers_NK = self._for(rows[0]), rows[1] if len(rows) > 1 else None
        *sums, _ = buffer.combine(rows[0], route.handle, topk_weights=numbers_NK, config=self._combining)
        return tuple(sums[: len(rows)])

    def held_bytes(self) -> int:
        return self._num_bytes

    def release(self) -> None:
        """Give DeepEP's memory back. Collective; the next dispatch allocates anew."""
        if self._buffer is not None:
            self._buffer.destroy()
            self._buffer, self._row_bytes, self._num_bytes = None, 0, 0

    def _for(self, rows: Tensor) -> Any:
        """A buffer for rows as wide as these; which is the same on every rank, so all of them grow theirs at the same call."""
        num_bytes = rows.shape[1] * rows.element_size()
        if num_bytes > self._row_bytes:
            self.release()
            configs, size = (self._dispatching, self._combining), self._group.size()
            self._num_bytes = max(config.get_nvl_buffer_size_hint(num_bytes, size) for config in configs)
            self._buffer = self._library.Buffer(self._group, self._num_bytes, 0, explicitly_destroy=True)
            dist.barrier(self._group)  # each rank has cleared its own by now, and no peer may touch it before
            self._row_bytes = num_bytes
        return self._buffer


class _Arriving(NamedTuple):
    """The columns of an inbox for each message: uint8 ``[N, W]``."""

    rows: Sequence[Tensor]
    inboxes: Sequence[Tensor]


class _Leaving(NamedTuple):
    """The peers' rows, a contiguous tensor for each that is combined."""

    places: Sequence[Place]
    outbox: Sequence[Tensor]


def _messages(tokens: Sequence[Tensor]) -> list[list[Tensor]]:
    """What travels in one row: hidden states and the numbers behind them, since a row's time hardly depends on its width."""
    messages: list[list[Tensor]] = []
    for tensor in tokens:
        if tensor.dtype == torch.bfloat16 or not messages:
            messages.append([])
        messages[-1].append(tensor)
    for message in messages:
        most = max((numbers.shape[1] for numbers in message[1:]), default=0)
        if message[0].dtype != torch.bfloat16 or _width(message) > _MOST_BYTES or most > _MOST_NUMBERS:
            got = ", ".join(f"{tensor.shape[1]} x {tensor.dtype}" for tensor in message)
            raise ValueError(
                f"`dispatcher='deep_ep'` moves rows of torch.bfloat16, of at most {_MOST_BYTES} bytes and with at most"
                f" {_MOST_NUMBERS} experts a token, but got {got}. `dispatcher='all_to_all'` moves any."
            )
    return messages


def _packed(message: Sequence[Tensor]) -> Tensor:
    """A message's tensors side by side, contiguous: bfloat16 ``[T, W / 2]``."""
    rows_TH, width = message[0], _width(message)
    if len(message) == 1 and 2 * rows_TH.shape[1] == width:
        return rows_TH.contiguous()
    packed_TW = empty(rows_TH.shape[0], width, rows_TH.device)
    for column_TX, tensor_TX in zip(columns(packed_TW, message), message, strict=True):
        column_TX.copy_(tensor_TX)
    return packed_TW.view(torch.bfloat16)


def _width(message: Sequence[Tensor], unit: int = _DISPATCH_UNIT) -> int:
    return -(-row_bytes(message) // unit) * unit
