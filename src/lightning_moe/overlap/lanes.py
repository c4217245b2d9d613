"""Two lanes of work: compute, which is the caller's stream, and communication beside it.

Lifetimes across the lanes follow one rule: *every tensor that both lanes touch is allocated on the compute lane, and a
ticket holds it until the compute lane has waited for the communication that touches it*. Memory then returns to the
compute stream's pool only after its last reader, without ``record_stream`` and its late frees.

On a CPU there is one lane: communication runs when it is issued, and waiting does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import torch

Chunk = TypeVar("Chunk")
Arrived = TypeVar("Arrived")
Leaving = TypeVar("Leaving")


@dataclass
class Ticket:
    """Communication that was issued; :meth:`wait` orders the compute lane after it."""

    _event: torch.cuda.Event | None
    _held: tuple[Any, ...]

    def wait(self) -> None:
        """Let everything that the compute lane does from here on see the communication's result."""
        if self._event is not None:
            self._event.wait()
        self._held = ()


class Lanes:
    """The compute and the communication lane of one device.

    Args:
        device: Where the layer runs. Lanes of one device share one communication stream.

    """

    def __init__(self, device: torch.device) -> None:
        self._stream = _communication_stream(device) if device.type == "cuda" else None

    def communicate(self, run: Callable[..., None], *args: Any) -> Ticket:
        """Run ``run(*args)`` on the communication lane, after everything issued on the compute lane so far."""
        if self._stream is None:
            run(*args)
            return Ticket(None, ())
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            run(*args)
            return Ticket(self._stream.record_event(), args)


def pipeline(
    chunks: Sequence[Chunk],
    arrive: Callable[[Chunk], tuple[Ticket, Arrived]],
    work: Callable[[Chunk, Arrived], Leaving],
    leave: Callable[[Chunk, Leaving], Ticket],
    finish: Callable[[Chunk, Leaving], None] | None = None,
) -> None:
    """Run ``leave(work(arrive(chunk)))`` for every chunk, with the neighbours' communication beside each chunk's work.

    While chunk i is worked on, chunk i+1 arrives and chunk i-1 leaves. The communication lane sees arrive(0), arrive(1),
    leave(0), arrive(2), leave(1), ...: an order that depends on nothing but the number of chunks, so it is the same on
    every rank. What of a chunk's work nobody waits for goes into ``finish``, which runs beside the chunk's own leaving.
    """
    arriving = arrive(chunks[0])
    leaving: Ticket | None = None
    for i, chunk in enumerate(chunks):
        ticket, arrived = arriving
        ticket.wait()
        if i + 1 < len(chunks):
            arriving = arrive(chunks[i + 1])
        product = work(chunk, arrived)
        if leaving is not None:
            leaving.wait()
        leaving = leave(chunk, product)
        if finish is not None:
            finish(chunk, product)
    if leaving is not None:
        leaving.wait()


@lru_cache
def _communication_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]  # high priority: a transfer that waits for a free SM is a late one
