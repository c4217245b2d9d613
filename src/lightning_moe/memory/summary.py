"""From the figures of all ranks to those that are logged."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_moe.memory.meter import PHASES
from lightning_moe.memory.owners import CATEGORIES, TEMPORARY

GIB = 2**30
_COUNTS = ("expert_rows", "alloc_retries", "ooms")


def summarize(names: Sequence[str], by_rank: Sequence[Sequence[float]]) -> dict[str, float]:
    """The highest of all ranks for each figure, and ``<figure>_spread``, the highest less the lowest, where there are several.

    The categories of a phase are those of the rank with that phase's highest peak, so that they belong together; their
    spread is over all ranks. Bytes become GiB.

    >>> one, other = {"peak_allocated": 2**31, "expert_rows": 5}, {"peak_allocated": 2**30, "expert_rows": 8}
    >>> summarize(list(one), [list(one.values()), list(other.values())])
    {'peak_allocated': 2.0, 'expert_rows': 8, 'peak_allocated_spread': 1.0, 'expert_rows_spread': 3}

    """
    places = {name: i for i, name in enumerate(names)}
    values = {name: [figures[i] for figures in by_rank] for name, i in places.items()}
    summary = {name: max(of_ranks) for name, of_ranks in values.items()}
    for phase in PHASES:
        peak = next((name for name in names if name.startswith(f"{phase}/peak_")), None)
        if peak is not None:
            fullest = values[peak].index(summary[peak])
            for category in (*CATEGORIES, TEMPORARY):
                summary[f"{phase}/{category}"] = values[f"{phase}/{category}"][fullest]
    if len(by_rank) > 1:
        summary |= {f"{name}_spread": max(of_ranks) - min(of_ranks) for name, of_ranks in values.items()}
    return {name: value if name.startswith(_COUNTS) else value / GIB for name, value in summary.items()}
