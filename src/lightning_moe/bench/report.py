"""A benchmark's result as a table, a JSON file and a chart."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def save(result: dict[str, Any], name: str, folder: str | None, draw: Callable[[dict[str, Any], Any], None]) -> None:
    """With a folder, write ``<name>.json`` and, with matplotlib, what ``draw(result, figure)`` makes of it as a PNG."""
    if folder is None:
        return
    path = Path(folder) / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {path}")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no chart: `pip install matplotlib` to have one")
        return
    figure = Figure(layout="constrained")
    draw(result, figure)
    figure.savefig(path.with_suffix(".png"), dpi=100)
    print(f"wrote {path.with_suffix('.png')}")


def machine(result: dict[str, Any]) -> str:
    """Where it was measured, for a table's first line."""
    facts = result["environment"]
    return f"{facts['device']}, torch {facts['torch']}, commit {facts['commit'][:10]}"


def table(result: dict[str, Any]) -> str:
    """The rows as text."""
    lines = [
        f"shape {result['shape']}: H {result['hidden']}, F {result['ffn']}, E {result['experts']}, K {result['top_k']},"
        f" {result['tokens']} tokens a rank, EP {result['expert_parallel_size']}, {result['routing']} routing;"
        f" {machine(result)}",
        *(f"{name}: {reason}" for name, reason in result["dispatchers"].items()),
        f"{'what':<6} {'direction':<9} {'mode':<9} {'dispatcher':<11} {'chunks':>6} {'ms':>8} {'quartiles':>15} {'x floor':>8}"
        f" {'TFLOP/s':>8} {'alloc GiB':>9} {'of it result':>12} {'reserved':>9} {'buffers':>8}",
    ]
    for row in result["rows"]:
        low, high = row["ms_quartiles"]
        lines.append(
            f"{row['what']:<6} {row['direction']:<9} {row['mode']:<9} {row['dispatcher']:<11} {row['chunks']:>6}"
            f" {row['ms']:>8.3f} {low:>7.3f}-{high:<7.3f} {row['times_floor']:>8.3f} {row['tflops']:>8.1f}"
            f" {row['allocated_gib']:>9.3f} {row['result_gib']:>12.3f} {row['reserved_gib']:>9.3f}"
            f" {row['communication_gib']:>8.3f}"
        )
    return "\n".join(lines)


def chart(result: dict[str, Any], figure: Any) -> None:
    """Bars of time by chunks and dispatcher, a panel for each direction and mode, the floor as a line."""
    kinds = list(dict.fromkeys(row["what"] for row in result["rows"]))
    panels = list(dict.fromkeys((row["direction"], row["mode"]) for row in result["rows"]))
    dispatchers = [name for name in dict.fromkeys(row["dispatcher"] for row in result["rows"]) if name != "floor"]
    chunks = sorted({row["chunks"] for row in result["rows"] if row["dispatcher"] != "floor"})
    figure.set_size_inches(11, 3 * len(kinds))
    axes = figure.subplots(len(kinds), len(panels), squeeze=False, sharey="col")
    for kind, line in zip(kinds, axes, strict=True):
        line[0].set_ylabel("ms, slowest rank")
        for (direction, mode), axis in zip(panels, line, strict=True):
            rows = [
                row for row in result["rows"] if (row["what"], row["direction"], row["mode"]) == (kind, direction, mode)
            ]
            for place, name in enumerate(dispatchers):
                times = {row["chunks"]: row["ms"] for row in rows if row["dispatcher"] == name}
                width = 0.8 / len(dispatchers)
                axis.bar([chunks.index(n) + place * width for n in times], times.values(), width, label=name)
            axis.axhline(next(row["ms"] for row in rows if row["dispatcher"] == "floor"), color="black", linestyle="--")
            axis.set_xticks([i + 0.4 - 0.4 / len(dispatchers) for i in range(len(chunks))], [f"n={n}" for n in chunks])
            axis.set_title(f"{kind}: {direction}, recompute {mode}", fontsize=9)
    axes[0][0].legend(fontsize=7, loc="lower right", title="dashed: the floor", title_fontsize=7)
    figure.suptitle(
        f"shape {result['shape']}, EP {result['expert_parallel_size']}, {result['routing']} routing,"
        f" {result['environment']['device']}",
        fontsize=10,
    )
