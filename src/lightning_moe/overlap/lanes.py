"""Two lanes of work: compute, which is the caller's stream, and communication beside it.

Lifetimes across the lanes follow one rule: *every tensor that both lanes touch is allocated on the compute lane, and a
ticket holds it until the compute lane has waited for the communication that touches it*. Memory then returns to the
compute stream's pool only after its last reader, without ``record_stream`` and its late frees.

On a CPU there is one lane: communication runs when it is issued, and waiting does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import torch

Chunk = TypeVar("Chunk")
Arrived = TypeVar("Arrived")
Taken = TypeVar("Taken")
Leaving = TypeVar("Leaving")


class Communication(NamedTuple):
    """A call that is to run on the communication lane: ``run(*args)``."""

    run: Callable[..., None]
    args: tuple[Any, ...]


class Ticket:
    """Communication that was issued; :meth:`wait` orders the compute lane after it."""

    def __init__(self, event: torch.cuda.Event | None, held: Communication | None) -> None:
        self._event, self._held = event, held

    def wait(self) -> None:
        """Let everything that the compute lane does from here on see the communication's result."""
        if self._event is not None:
            self._event.wait()
        self._held = None


class Lanes:
    """The compute and the communication lane of one device.

    Args:
        device: Where the layer runs, on the current stream. Lanes of one device share one communication stream.

    """

    def __init__(self, device: torch.device) -> None:
        self._communication = _communication_stream(device) if device.type == "cuda" else None
        self._compute = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def mark(self) -> torch.cuda.Event | None:
        """Now, on the compute lane."""
        return None if self._compute is None else self._compute.record_event()

    def communicate(self, communication: Communication | None, after: torch.cuda.Event | None = None) -> Ticket:
        """Run on the communication lane what may start once the compute lane has reached a mark, by default now.

        What it touches was allocated before the mark was taken; ``None`` is nothing.
        """
        if communication is None:
            return Ticket(None, None)
        if self._communication is None or self._compute is None:
            communication.run(*communication.args)
            return Ticket(None, None)
        self._communication.wait_event(after or self._compute.record_event())
        torch.cuda.set_stream(self._communication)  # a third of what the context manager takes
        try:
            communication.run(*communication.args)
        finally:
            torch.cuda.set_stream(self._compute)
        return Ticket(self._communication.record_event(), communication)

    def join(self) -> None:
        """Let the compute lane wait for all communication: after an error, nobody else does."""
        if self._communication is not None and self._compute is not None:
            self._compute.wait_stream(self._communication)


def pipeline(
    lanes: Lanes,
    chunks: Sequence[Chunk],
    arrive: Callable[[Chunk], tuple[Communication | None, Arrived]],
    take: Callable[[Chunk, Arrived], Taken],
    work: Callable[[Chunk, Taken], Leaving],
    leave: Callable[[Chunk, Leaving], Communication | None],
    finish: Callable[[Chunk, Leaving], None] | None = None,
) -> None:
    """Let every chunk arrive, take it in, work on it, let it leave, with the neighbours' communication beside the work.

    While chunk i is worked on, chunk i+1 arrives and chunk i-1 leaves. The communication lane sees arrive(0), arrive(1),
    leave(0), arrive(2), leave(1), ...: an order that depends on nothing but the number of chunks, so it is the same on
    every rank. What of a chunk's work nobody waits for goes into ``finish``, which runs beside the chunk's own leaving.

    The host issues a chunk's work before the next one's arrival, so that the device need not wait for the latter's launches;
    the arrival starts all the same with the work, since it waits only for the mark before it. Its memory is prepared while
    the device takes in what arrived, and may be the very memory that this took. What a chunk needs no more is let go before
    the next one's work begins.
    """
    try:
        arrival, rows = arrive(chunks[0])
        arriving, arrived = lanes.communicate(arrival), [rows]
        del arrival, rows
        leaving: Ticket | None = None
        for i, chunk in enumerate(chunks):
            arriving.wait()
            taken = take(chunk, arrived.pop())
            following = arrive(chunks[i + 1]) if i + 1 < len(chunks) else None
            start = lanes.mark()
            product = work(chunk, taken)
            del taken
            if following is not None:
                arriving = lanes.communicate(following[0], start)
                arrived.append(following[1])
                del following
            if leaving is not None:
                leaving.wait()
            leaving = lanes.communicate(leave(chunk, product))
            if finish is not None:
                finish(chunk, product)
            del product
        if leaving is not None:
            leaving.wait()
    except BaseException:
        lanes.join()  # buffers go back to the compute lane's pool as this unwinds
        raise


@lru_cache
def _communication_stream(device: torch.device) -> torch.cuda.Stream:
    # high priority: a packing kernel that waits for a multiprocessor is a late transfer
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
