"""How packed rows get from one rank to another: a collective, or copies over NVLink.

A transport exchanges rows that are already sorted by destination. Which rank sends how many rows to which is known to every
rank beforehand (``traffic_PP[i][j]``: rows from rank i to rank j), so nothing is asked for again, and decisions that all ranks
must take alike, such as growing a buffer, need no further agreement.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from itertools import accumulate
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_moe.dispatch.base import Traffic


class Transport(Protocol):
    """Moves rows between the ranks of one group. Every rank makes the same calls in the same order."""

    @property
    def name(self) -> str:
        """As the report shows it."""

    def outboxes(self, traffic: Traffic, like: Sequence[Tensor]) -> list[Tensor]:
        """For each tensor ``[..., X]`` a buffer ``[S, X]`` in its dtype, for the rows that this rank is about to send.

        They are to be filled on the current stream and handed to :meth:`exchange` before the next ones are asked for.
        """

    def exchange(self, traffic: Traffic, outboxes: Sequence[Tensor], inboxes: Sequence[Tensor]) -> None:
        """Send the outboxes' rows, sorted by destination; fill each ``[N, X]`` with what arrives, sorted by source."""


class CollectiveTransport:
    """``all_to_all_single`` of ``torch.distributed``: gloo and NCCL, on any number of hosts."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._rank = group.rank()
        self.name = dist.get_backend(group)

    def outboxes(self, traffic: Traffic, like: Sequence[Tensor]) -> list[Tensor]:
        num_sent = sum(traffic[self._rank])
        return [like_TX.new_empty(num_sent, like_TX.shape[1]) for like_TX in like]

    def exchange(self, traffic: Traffic, outboxes: Sequence[Tensor], inboxes: Sequence[Tensor]) -> None:
        sent, received = list(traffic[self._rank]), [row[self._rank] for row in traffic]
        for outbox_SX, inbox_NX in zip(outboxes, inboxes, strict=True):
            dist.all_to_all_single(inbox_NX, outbox_SX, received, sent, self._group)


class NVLinkTransport:
    """Copies out of the peers' memory, for GPUs of one host that can read each other's.

    Each rank packs its rows into an outbox in symmetric memory and signals that it is ready; each peer copies its part out
    with the copy engine, which takes no multiprocessor from the experts' matrix products, and signals that it is done. Two
    outboxes take turns: while the peers still read one, the next is packed.

    Args:
        group: A group of NCCL ranks on one host.
        device: This rank's GPU.
        timeout: How long a signal is waited for before the kernel that waits gives up.

    """

    name = "NVLink copies"

    def __init__(self, group: dist.ProcessGroup, device: torch.device, timeout: timedelta) -> None:
        self._group = group
        self._device = device
        self._rank, self._size = group.rank(), group.size()
        self._timeout_ms = int(timeout.total_seconds() * 1000)
        self._boxes: list[_Box] = []
        self._turn = 0
        # one stream a peer, so that copies from several peers run at once
        self._streams = [torch.cuda.Stream(device, priority=-1) for _ in range(self._size - 2)]  # type: ignore[no-untyped-call]

    def outboxes(self, traffic: Traffic, like: Sequence[Tensor]) -> list[Tensor]:
        regions = self._regions(traffic, like)
        self._grow(regions[-1][1])
        self._turn ^= 1
        box = self._boxes[self._turn]
        if box.was_read:
            for peer in self._peers():
                box.handle.wait_signal(peer, _DONE + self._turn, self._timeout_ms)
            box.was_read = False
        num_sent = sum(traffic[self._rank])
        return [
            _rows(box.mine[start:], 0, num_sent, like_TX) for (start, _), like_TX in zip(regions, like, strict=True)
        ]

    def exchange(self, traffic: Traffic, outboxes: Sequence[Tensor], inboxes: Sequence[Tensor]) -> None:
        box, me = self._boxes[self._turn], self._rank
        regions = self._regions(traffic, inboxes)
        arrivals = [row[me] for row in traffic]
        arrival_of = [torch.split(inbox_NX, arrivals) for inbox_NX in inboxes]
        for peer in self._peers():
            box.handle.put_signal(peer, _READY + self._turn, self._timeout_ms)
        lane = torch.cuda.current_stream(self._device)
        packed = lane.record_event()
        for peer, stream in zip(self._peers(), [lane, *self._streams], strict=True):
            first = sum(traffic[peer][:me])
            stream.wait_event(packed)
            with torch.cuda.stream(stream):
                box.handle.wait_signal(peer, _READY + self._turn, self._timeout_ms)
                for (start, _), parts in zip(regions, arrival_of, strict=True):
                    parts[peer].copy_(_rows(box.of[peer][start:], first, arrivals[peer], parts[peer]))
                box.handle.put_signal(peer, _DONE + self._turn, self._timeout_ms)
        first = sum(traffic[me][:me])
        for parts, outbox_SX in zip(arrival_of, outboxes, strict=True):
            parts[me].copy_(outbox_SX[first : first + arrivals[me]])
        for stream in self._streams:
            lane.wait_stream(stream)
        box.was_read = True

    def release(self) -> None:
        """Give the memory back once every peer has read it. Collective; the next exchange allocates anew."""
        if self._boxes:
            torch.cuda.synchronize(self._device)
            dist.barrier(self._group, device_ids=[self._device.index])
            self._boxes = []

    def _regions(self, traffic: Traffic, like: Sequence[Tensor]) -> list[tuple[int, int]]:
        """Where each tensor's rows begin and end in an outbox, in bytes: alike on every rank, so the largest sets the size."""
        most = max(sum(row) for row in traffic)
        sizes = [-(-most * like_TX.shape[1] * like_TX.element_size() // _ALIGN) * _ALIGN for like_TX in like]
        ends = list(accumulate(sizes))
        return list(zip([0, *ends[:-1]], ends, strict=True))

    def _peers(self) -> list[int]:
        """The other ranks, each rank starting with another one, so that not all read the same memory at once."""
        return [(self._rank + step) % self._size for step in range(1, self._size)]

    def _grow(self, num_bytes: int) -> None:
        """Every rank knows the whole traffic, so all of them grow at the same call. Collective when it does anything."""
        if self._boxes and num_bytes <= self._boxes[0].mine.numel():
            return
        self.release()
        num_bytes = -(-max(num_bytes + num_bytes // 8, 1) // _GRAIN) * _GRAIN
        self._boxes = [_Box(num_bytes, self._group, self._device) for _ in range(2)]


_GRAIN = 2 << 20  # bytes; symmetric memory is mapped in pages of 2 MiB
_ALIGN = 256  # bytes; where a tensor may begin
_READY, _DONE = 0, 2  # channels of the signals; the turn, 0 or 1, is added


class _Box:
    """One outbox, mapped into every peer."""

    def __init__(self, num_bytes: int, group: dist.ProcessGroup, device: torch.device) -> None:
        import torch.distributed._symmetric_memory as symmetric_memory

        self.mine = symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=device)
        self.handle = symmetric_memory.rendezvous(self.mine, group)
        self.of = [self.handle.get_buffer(rank, (num_bytes,), torch.uint8) for rank in range(group.size())]
        self.was_read = False


def _rows(memory: Tensor, first: int, count: int, like_TX: Tensor) -> Tensor:
    """Rows ``first`` to ``first + count`` of raw memory seen as a ``[..., X]`` tensor in the dtype of ``like_TX``."""
    width = like_TX.shape[1] * like_TX.element_size()
    return memory[first * width : (first + count) * width].view(like_TX.dtype).view(count, like_TX.shape[1])
