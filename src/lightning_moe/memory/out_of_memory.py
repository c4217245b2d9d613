"""One message for the moment when memory ends: where, what was largest, who had how much to do, and what to change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from lightning_moe.memory.gauge import Reading
from lightning_moe.memory.meter import Load
from lightning_moe.memory.owners import OUTSIDE
from lightning_moe.memory.summary import GIB

_MOST_RANKS = 16  # that a line shows one by one
_FRAGMENTED = 0.15  # of what is reserved, unused


@dataclass(frozen=True)
class Situation:
    """What is known when memory ends.

    Args:
        rank: Of this process.
        step: Steps that have ended.
        phase: Under way, ``None`` between steps.
        where: The layer that was entered last, ``""`` outside of all.
        reading: Of the device.
        held: Bytes by category.
        load: Of the routed experts at ``where``; ``None`` for another layer.
        rows_by_rank: Rows of each rank's fullest layer in the step that was told of last; empty before that.

    """

    rank: int
    step: int
    phase: str | None
    where: str
    reading: Reading
    held: Mapping[str, int]
    load: Load | None
    rows_by_rank: Sequence[float]


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error says that memory could not be had, on a device or on the host."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)


def explain(situation: Situation) -> str:
    """The message, several lines."""
    reading, held = situation.reading, situation.held
    shares = sorted(((size, name) for name, size in held.items() if size > 0), reverse=True)
    lines = [
        f"Out of memory on rank {situation.rank}, {_place(situation)}, after {situation.step} steps.",
        f"  in use: {_gib(reading.used)}, reserved by the allocator: {_gib(reading.reserved)}",
        "  of it: " + ", ".join(f"{name.replace('_', ' ')} {_gib(size)}" for size, name in shares),
        *_loads(situation),
        *(f"  to change: {advice}" for advice in _advice(situation, [name for _, name in shares])),
    ]
    return "\n".join(lines)


def _place(situation: Situation) -> str:
    if situation.phase is None:
        return "between training steps"
    if situation.phase == "optimizer":
        return "in the optimizer's step"
    return f"in {situation.phase}, " + (f"in `{situation.where}`" if situation.where else "outside of the layers")


def _loads(situation: Situation) -> list[str]:
    lines = []
    if situation.load is not None:
        lines.append(f"  tokens: {situation.load.tokens} on this rank; its experts here had {situation.load.rows} rows")
    rows = [int(count) for count in situation.rows_by_rank]
    if len(rows) > 1 and max(rows):
        order = sorted(range(len(rows)), key=lambda rank: -rows[rank])
        shown = order if len(rows) <= _MOST_RANKS else [*order[:3], order[-1]]
        counts = ", ".join(f"rank {rank}: {rows[rank]}" for rank in shown)
        lines.append(
            f"  rows of each rank's fullest layer, when last logged: {counts}; mean {sum(rows) / len(rows):.0f}"
        )
    return lines


def _advice(situation: Situation, by_size: Sequence[str]) -> list[str]:
    reading, rows = situation.reading, situation.rows_by_rank
    advice = [_AGAINST[by_size[0]]] if by_size else []
    if situation.load is not None:
        advice.append("inside routed experts more chunks hold less at once: `ChunkedEPStrategy(num_chunks=...)`")
    if rows and max(rows) > 1.5 * sum(rows) / len(rows):
        advice.append("the ranks' rows are uneven: balance the router, by an auxiliary loss or a bias")
    if reading.reserved - reading.used > _FRAGMENTED * reading.reserved:
        advice.append(
            f"{_gib(reading.reserved - reading.used)} is reserved but in pieces: set"
            " `PYTORCH_ALLOC_CONF=expandable_segments:True`"
        )
    return advice


_MORE_SHARDS = "shard over more processes"
_AGAINST = {
    "parameters": f"{_MORE_SHARDS}, keep `reshard_after_forward=True`, or store them in bfloat16 (`bf16-true`)",
    "gradients": f"{_MORE_SHARDS}; while gradients accumulate without communication, each process holds all of them",
    "optimizer_state": f"{_MORE_SHARDS}, or take an optimizer with a smaller state",
    "expert_activations": 'recompute more (`recompute="full"`, or `RecomputePolicy(routed="dispatch")`), or take smaller'
    " batches and accumulate gradients",
    OUTSIDE: "more chunks (`num_chunks`), or smaller batches and accumulated gradients",
    "rest": 'activations outside of the experts: recompute more (`recompute="selective"` or `"full"`), or take smaller batches'
    " and accumulate gradients",
}


def _gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB"
