"""How packed rows get from one rank to another: a collective, or copies over NVLink.

A transport exchanges rows that are already sorted by destination. Which rank sends how many rows to which is known to every
rank beforehand (``traffic_PP[i][j]``: rows from rank i to rank j), so nothing is asked for again, and decisions that all ranks
must take alike, such as growing a buffer, need no further agreement.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_moe.buffers import subscribe
from lightning_moe.dispatch.base import HostCopy
from lightning_moe.dispatch.mailbox import Blank, Mailbox

Traffic = tuple[tuple[int, ...], ...]
"""``[P, P]``: rows from each rank to each other rank of a group; ``traffic[i][j]`` go from i to j, none from i to i."""


DISPATCH, COMBINE = 0, 1
"""Ways: each has its own outbox, since the next chunk is packed while the last one leaves."""


class Told(Protocol):
    """Numbers on their way to the hosts."""

    def wait(self) -> list[list[int]]:
        """Every rank's numbers, those of one rank in one row."""


class Teller(Protocol):
    """Tells every rank's host some numbers, as many on each rank."""

    def blank(self, shape: Sequence[int], device: torch.device) -> Blank:
        """Where numbers of a device are to be written."""

    def tell(self, blank: Blank) -> Told:
        """Send the numbers that the device writes to a blank; waits for nobody else."""


class Transport(Protocol):
    """Moves rows of bytes between the ranks of one group. Every rank makes the same calls in the same order."""

    @property
    def name(self) -> str:
        """As the report shows it."""

    @property
    def teller(self) -> Teller:
        """Of the numbers of rows."""

    def outbox(self, way: int, traffic: Traffic, like: Tensor) -> Tensor:
        """Room for the rows that this rank is about to send, sorted by destination.

        It is to be filled on the current stream and handed to :meth:`exchange` before the next one of this way is asked for.

        Args:
            way: ``DISPATCH`` or ``COMBINE``.
            traffic: What :meth:`exchange` will be given.
            like: uint8 ``[..., W]``: rows of this width.

        Returns:
            uint8 ``[S, W]``.

        """

    def exchange(self, way: int, traffic: Traffic, outbox: Tensor, inbox: Tensor) -> None:
        """Send the outbox; fill the inbox, uint8 ``[N, W]``, with what arrives, sorted by source."""


class CollectiveTransport:
    """``all_to_all_single`` of ``torch.distributed``: gloo and NCCL, on any number of hosts."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._rank = group.rank()
        self.name = dist.get_backend(group)
        self.teller = CollectiveTeller(group)

    def outbox(self, way: int, traffic: Traffic, like: Tensor) -> Tensor:
        return like.new_empty(sum(traffic[self._rank]), like.shape[1])

    def exchange(self, way: int, traffic: Traffic, outbox: Tensor, inbox: Tensor) -> None:
        sent, received = list(traffic[self._rank]), [row[self._rank] for row in traffic]
        dist.all_to_all_single(inbox, outbox, received, sent, self._group)


class CollectiveTeller:
    """``all_gather`` of ``torch.distributed``."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def blank(self, shape: Sequence[int], device: torch.device) -> Blank:
        return Blank(torch.empty(*shape, dtype=torch.int64, device=device), 0)

    def tell(self, blank: Blank) -> Told:
        heard = blank.words.new_empty(self._group.size(), blank.words.numel())
        dist.all_gather(list(heard.unbind(0)), blank.words.flatten(), self._group)
        return HostCopy(heard)


class NVLinkTransport:
    """Copies out of the peers' memory, for GPUs of one host that can read each other's.

    Each rank packs its rows into an outbox in symmetric memory and signals that it is ready; each peer copies its part out
    with the copy engine, which takes no multiprocessor from the experts' matrix products, and signals that it is done. Counts
    go from host to host.

    Args:
        group: A group of NCCL ranks on one host.
        device: This rank's GPU.
        timeout: How long a signal is waited for before the kernel that waits gives up.

    """

    name = "NVLink copies"
    kind = "communication"

    def __init__(self, group: dist.ProcessGroup, device: torch.device, timeout: timedelta) -> None:
        self._group = group
        self._device = device
        self._rank, self._size = group.rank(), group.size()
        # each rank starts with another one, so that not all read the same memory at once
        self._peers = [(self._rank + step) % self._size for step in range(1, self._size)]
        self._timeout_ms = int(timeout.total_seconds() * 1000)
        self.teller = Mailbox(group, timeout)
        self._boxes: dict[int, _Box] = {}
        subscribe(self)
        # one stream a peer, so that copies from several peers run at once
        self._streams = [torch.cuda.Stream(device, priority=-1) for _ in self._peers[1:]]  # type: ignore[no-untyped-call]

    def outbox(self, way: int, traffic: Traffic, like: Tensor) -> Tensor:
        width = like.shape[1]
        box = self._box(way, max(map(sum, traffic)) * width)
        if box.in_use:
            for peer in self._peers:
                box.handle.wait_signal(peer, _DONE + way, self._timeout_ms)
            box.in_use = False
        num_rows = sum(traffic[self._rank])
        return box.mine[: num_rows * width].view(num_rows, width)

    def exchange(self, way: int, traffic: Traffic, outbox: Tensor, inbox: Tensor) -> None:
        box, me, width = self._boxes[way], self._rank, inbox.shape[1]
        arrivals = torch.split(inbox, [row[me] for row in traffic])
        for peer in self._peers:
            box.handle.put_signal(peer, _READY + way, self._timeout_ms)
        lane = torch.cuda.current_stream(self._device)
        packed = lane.record_event() if self._streams else None
        try:
            for peer, stream in zip(self._peers, [None, *self._streams], strict=True):
                first, arrival = sum(traffic[peer][:me]) * width, arrivals[peer]
                with torch.cuda.stream(stream):
                    if stream is not None and packed is not None:
                        stream.wait_event(packed)
                    box.handle.wait_signal(peer, _READY + way, self._timeout_ms)
                    arrival.copy_(box.of[peer][first : first + arrival.numel()].view_as(arrival))
                    box.handle.put_signal(peer, _DONE + way, self._timeout_ms)
        finally:
            for stream in self._streams:
                lane.wait_stream(stream)
        box.in_use = True

    def held_bytes(self) -> int:
        """Of the outboxes, in symmetric memory, which the caching allocator does not count."""
        return sum(box.mine.numel() for box in self._boxes.values())

    def release(self) -> None:
        """Give the outboxes back once every peer has read them. Collective; the next exchange allocates anew."""
        if self._boxes:
            self._settle()
            self._boxes = {}

    def _box(self, way: int, num_bytes: int) -> _Box:
        """An outbox of this size at least. Every rank knows the whole traffic, so all of them grow theirs at the same call."""
        box = self._boxes.get(way)
        if box is None or num_bytes > box.mine.numel():
            if box is not None:
                self._settle()
                del self._boxes[way], box
            num_bytes = -(-max(num_bytes + num_bytes // 8, 1) // _GRAIN) * _GRAIN
            self._boxes[way] = box = _Box(num_bytes, self._group, self._device)
        return box

    def _settle(self) -> None:
        torch.cuda.synchronize(self._device)
        dist.barrier(self._group, device_ids=[self._device.index])


_GRAIN = 2 << 20  # bytes; symmetric memory is mapped in pages of 2 MiB
_READY, _DONE = 0, 2  # channels of the signals; the way is added


class _Box:
    """One outbox, mapped into every peer."""

    def __init__(self, num_bytes: int, group: dist.ProcessGroup, device: torch.device) -> None:
        import torch.distributed._symmetric_memory as symmetric_memory

        self.mine = symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=device)
        # torch 2.11 clears the signals on the default stream, behind the work that is queued there, and does not wait: a
        # peer that knows the memory by then could signal before that, and would never be heard
        torch.cuda.synchronize(device)
        self.handle = symmetric_memory.rendezvous(self.mine, group)
        self.of = [self.handle.get_buffer(rank, (num_bytes,), torch.uint8) for rank in range(group.size())]
        self.in_use = False
