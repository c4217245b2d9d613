"""Memory that components hold between calls, and the one hook that makes them give it back.

Buffers of communication outlive the call that made them, so that the next one need not wait for new memory. Whoever wants the
device for something else, such as a model that moves to the host between two phases of training, calls
:func:`release_buffers`. A component takes part by subscribing; any floor of the package may.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from typing import Protocol


class Buffers(Protocol):
    """What somebody holds between calls."""

    @property
    def kind(self) -> str:
        """What it is, as reports show it: ``"communication"``, say."""

    def held_bytes(self) -> int:
        """How much is held on this process's device at the moment."""

    def release(self) -> None:
        """Give it back; the next call takes it anew. Where it is shared by ranks, all of them call this."""


_subscribers: list[weakref.ref[Buffers]] = []


def subscribe(buffers: Buffers) -> None:
    """Let :func:`held_bytes` and :func:`release_buffers` know of some buffers, for as long as these live.

    Ranks that share buffers subscribe in the same order.
    """
    _subscribers.append(weakref.ref(buffers, _subscribers.remove))


def held_bytes() -> dict[str, int]:
    """Bytes held between calls, by kind."""
    held: Counter[str] = Counter()
    for buffers in _alive():
        held[buffers.kind] += buffers.held_bytes()
    return dict(held)


def release_buffers() -> None:
    """Give back all that is held between calls. Every rank calls it, at the same point."""
    gc.collect()  # what only waits for the collector on one rank is gone on another
    for buffers in _alive():
        buffers.release()


def _alive() -> list[Buffers]:
    return [buffers for reference in _subscribers if (buffers := reference()) is not None]
