"""Copies between device and host beside the compute stream, and the host memory that they go to.

On a CPU the same calls copy at once, and waiting does nothing.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Ticket:
    """A copy that was issued."""

    def __init__(self, event: torch.cuda.Event | None) -> None:
        self._event = event

    def wait(self) -> None:
        """Let everything that the current stream does from here on see the copy's result."""
        if self._event is not None:
            self._event.wait()

    def done(self) -> bool:
        """Whether the copy has finished, as far as the host knows."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def finish(self) -> None:
        """Block the host until it has."""
        if self._event is not None:
            self._event.synchronize()


class CopyLane:
    """One direction of copies: a stream of its own, on which they run in the order of issue.

    Args:
        device: The device's side of the copies.

    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def copy(self, target: Tensor, source: Tensor, after: Ticket | None = None) -> Ticket:
        """Copy what is there once the current stream has come this far, and once another copy has finished.

        The caller holds both tensors until the stream that they were allocated on has waited for the ticket, or the copy is
        done: only then may their memory be used again.
        """
        if self._stream is None:
            target.copy_(source)
            return Ticket(None)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            if after is not None:
                after.wait()
            target.copy_(source, non_blocking=True)
        return Ticket(self._stream.record_event())


class HostBuffer(NamedTuple):
    """Host memory, and the last copy that touched it before it came here, if any."""

    memory: Tensor
    last: Ticket | None


class HostPool:
    """Host memory that is used again: pinned, where a device copies to it. Sizes are powers of two, as torch rounds them too.

    What is given back may still be read by a copy to the device: whoever takes it next writes ``after`` that copy.
    When the pool goes, so does its memory, and what torch had put aside of it.
    """

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._free: defaultdict[int, list[HostBuffer]] = defaultdict(list)
        weakref.finalize(self, _release, self._free, pinned).atexit = False

    def take(self, num_bytes: int) -> HostBuffer:
        """At least that many bytes, as uint8."""
        size = 1 << (num_bytes - 1).bit_length()
        if self._free[size]:
            return self._free[size].pop()
        return HostBuffer(torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned), None)

    def give(self, buffer: HostBuffer) -> None:
        """Take back what :meth:`take` gave, with the last copy that touches it."""
        self._free[buffer.memory.numel()].append(buffer)

    def free_bytes(self) -> int:
        """Bytes that wait to be used again."""
        return sum(size * len(buffers) for size, buffers in self._free.items())


def as_bytes(storage: torch.UntypedStorage) -> Tensor:
    """A storage's memory as a uint8 tensor."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def empty_host_cache() -> None:
    """Unpin what torch keeps of pinned memory that nobody holds."""
    if torch.cuda.is_available():
        torch._C._host_emptyCache()


def _release(free: dict[int, list[HostBuffer]], pinned: bool) -> None:
    free.clear()
    if pinned:
        empty_host_cache()
