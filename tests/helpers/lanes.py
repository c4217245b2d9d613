"""Copies that come as late as they may: what does not wait for them reads or writes what it should not."""

from __future__ import annotations

import random
from collections import deque

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_moe.offload.copies import CopyLane


class LateTicket:
    def __init__(self, lane: LateLane) -> None:
        self.lane, self.run = lane, False

    def wait(self) -> None:
        while not self.run:
            self.lane.run_next()

    finish = wait

    def done(self) -> bool:
        if not self.run and random.random() < 0.2:
            self.lane.run_next()
        return self.run


class LateLane:
    """A lane of the CPU that copies when somebody waits, or sometimes asks, and holds no memory meanwhile."""

    freed_too_early = 0

    def __init__(self, device: torch.device) -> None:
        self.queue: deque = deque()

    def copy(self, target: Tensor, source: Tensor, after: LateTicket | None = None) -> LateTicket:
        ticket = LateTicket(self)
        places = [(StorageWeakRef(t.untyped_storage()), t.numel()) for t in (target, source)]
        self.queue.append((ticket, places, after))
        return ticket

    def run_next(self) -> None:
        ticket, places, after = self.queue.popleft()
        if after is not None:
            after.wait()
        storages = [torch.UntypedStorage._new_with_weak_ptr(ref.cdata) for ref, _ in places]
        if None in storages:
            LateLane.freed_too_early += 1
        else:
            target, source = (torch.empty(0, dtype=torch.uint8).set_(storage) for storage in storages)
            target[: places[0][1]].copy_(source[: places[1][1]])
        ticket.run = True


class SleepingLane(CopyLane):
    """A lane of a GPU whose copies begin late."""

    def copy(self, target, source, after=None):
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(random.choice([0, 10_000, 1_000_000]))
        return super().copy(target, source, after)


class CountingLane(CopyLane):
    """Counts what is copied, and how much of it was there at once."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.sizes: list[int] = []
        self.targets: list[StorageWeakRef] = []
        self.most = 0

    def copy(self, target, source, after=None):
        self.sizes.append(target.numel())
        self.targets.append(StorageWeakRef(target.untyped_storage()))
        alive = [size for size, ref in zip(self.sizes, self.targets, strict=True) if not ref.expired()]
        self.most = max(self.most, sum(alive))
        return super().copy(target, source, after)
