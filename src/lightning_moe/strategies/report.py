"""The table that a strategy prints at start: what it did with the model."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_moe.models import Block
from lightning_moe.parallel.apply import Parallelism


@dataclass(frozen=True)
class Report:
    """Rows of (what, how)."""

    rows: tuple[tuple[str, str], ...]

    @staticmethod
    def of(blocks: list[Block], how: Parallelism, num_units: int, recomputed: dict[str, int], precision: str) -> Report:
        ep_size = how.mesh.expert_parallel.size()
        kinds = sorted({block.kind for block in blocks})
        counts = sorted({block.layer.experts.num_experts for block in blocks})
        experts = ", ".join(f"{count} per block, {count // ep_size} on each rank" for count in counts)
        where = blocks[0].name if len(blocks) == 1 else f"{blocks[0].name} .. {blocks[-1].name}"
        parts = [f"{name} ({count or 'this model has none'})" for name, count in recomputed.items()]
        return Report(
            (
                ("mesh", str(how.mesh)),
                ("MoE blocks", f"{len(blocks)} x {', '.join(kinds)} ({where or 'the model itself'})"),
                ("experts", experts),
                ("dispatcher", how.dispatcher.name),
                *(("", reason) for reason in how.dispatcher.reasons),
                ("chunks", f"{how.num_chunks}" + (" (no overlap)" if how.num_chunks == 1 else "")),
                ("recompute", ", ".join([*parts, f"routed experts: {how.recompute.routed}"])),
                ("dense parameters", f"FSDP2 over {how.mesh.world.size()} ranks, {num_units} decoder layers"),
                ("precision", precision),
            )
        )

    def __str__(self) -> str:
        width = max(len(what) for what, _ in self.rows)
        lines = [f"{what:<{width}}  {how}" for what, how in self.rows]
        rule = "-" * max(map(len, lines))
        return "\n".join(["ChunkedEPStrategy", rule, *lines, rule])
