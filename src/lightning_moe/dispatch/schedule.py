"""Which rows are worked on when, so that communication always has something to hide behind.

Of a rank's own tokens, 1/P of the rows stay on the rank. They need no communication, so one half of them is worked on first,
while the first rows come in from the peers, and the other half last, while the last sums go back to them. In between come
the peers' rows, chunk by chunk.
"""

from __future__ import annotations

from functools import cache
from math import lcm
from typing import NamedTuple


class Chunk(NamedTuple):
    """Rows that are worked on together.

    Args:
        units: Of which tokens, as units of the batch.
        own: Whether it takes the rows that stay on their rank.
        peers: Whether it takes the rows that travel.

    """

    units: slice
    own: bool
    peers: bool


class Schedule(NamedTuple):
    """The chunks of one layer call.

    Args:
        chunks: In the order in which they are worked on.
        num_units: All tokens are cut into so many units, as by :func:`lightning_moe.ops.routing.chunk_slices`.
        num_travels: The rows that travel are cut into so many chunks.

    """

    chunks: tuple[Chunk, ...]
    num_units: int
    num_travels: int


@cache
def schedule(num_chunks: int, num_ranks: int) -> Schedule:
    """Cut the rows so that, with balanced routing, no chunk takes more than ``1 / num_chunks`` of them.

    One chunk takes all, without overlap: native expert parallelism.

    >>> [(chunk.units, chunk.own) for chunk in schedule(2, num_ranks=2).chunks]
    [(slice(0, 1, None), True), (slice(0, 2, None), False), (slice(1, 2, None), True)]

    """
    if num_chunks == 1:
        return Schedule((Chunk(slice(0, 1), own=True, peers=True),), 1, 1)
    num_travels = -(-num_chunks * (num_ranks - 1) // num_ranks)
    num_stays = max(2, -(-num_chunks // num_ranks))
    num_units = lcm(num_stays, num_travels or 1)
    stays = [Chunk(units, own=True, peers=False) for units in _cut(num_units, num_stays)]
    travels = [Chunk(units, own=False, peers=True) for units in _cut(num_units, num_travels)]
    half = num_stays // 2
    return Schedule((*stays[:half], *travels, *stays[half:]), num_units, num_travels or 1)


def _cut(num_units: int, count: int) -> list[slice]:
    return [slice(num_units * i // count, num_units * (i + 1) // count) for i in range(count)]
