"""A benchmark's result as a table, a JSON file and a chart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write(result: dict[str, Any], folder: str | None) -> None:
    """Print the table; with a folder, write ``op-<shape>-ep<n>-<routing>.json`` and, with matplotlib, a PNG beside it."""
    print(table(result))
    if folder is None:
        return
    name = f"{result['benchmark']}-{result['shape']}-ep{result['expert_parallel_size']}-{result['routing']}"
    path = Path(folder) / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {path}")
    try:
        chart(result, path.with_suffix(".png"))
        print(f"wrote {path.with_suffix('.png')}")
    except ImportError:
        print("no chart: `pip install matplotlib` to have one")


def table(result: dict[str, Any]) -> str:
    """The rows as text."""
    facts = result["environment"]
    lines = [
        f"shape {result['shape']}: H {result['hidden']}, F {result['ffn']}, E {result['experts']}, K {result['top_k']},"
        f" {result['tokens']} tokens a rank, EP {result['expert_parallel_size']}, {result['routing']} routing;"
        f" {facts['device']}, torch {facts['torch']}, commit {facts['commit'][:10]}",
        *(f"{name}: {reason}" for name, reason in result["dispatchers"].items()),
        f"{'what':<6} {'direction':<9} {'mode':<9} {'dispatcher':<11} {'chunks':>6} {'ms':>8} {'quartiles':>15} {'x floor':>8}"
        f" {'TFLOP/s':>8} {'alloc GiB':>9} {'of it result':>12} {'reserved':>9}",
    ]
    for row in result["rows"]:
        low, high = row["ms_quartiles"]
        lines.append(
            f"{row['what']:<6} {row['direction']:<9} {row['mode']:<9} {row['dispatcher']:<11} {row['chunks']:>6}"
            f" {row['ms']:>8.3f} {low:>7.3f}-{high:<7.3f} {row['times_floor']:>8.3f} {row['tflops']:>8.1f}"
            f" {row['allocated_gib']:>9.3f} {row['result_gib']:>12.3f} {row['reserved_gib']:>9.3f}"
        )
    return "\n".join(lines)


def chart(result: dict[str, Any], path: Path) -> None:
    """Bars of time by case, one panel for each direction and mode, the floor as a line."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = list(dict.fromkeys((row["what"], row["direction"], row["mode"]) for row in result["rows"]))
    figure, axes = plt.subplots(1, len(panels), figsize=(4.2 * len(panels), 3.6), squeeze=False)
    for axis, panel in zip(axes[0], panels, strict=True):
        rows = [row for row in result["rows"] if (row["what"], row["direction"], row["mode"]) == panel]
        bars = [row for row in rows if row["dispatcher"] != "floor"]
        axis.bar(
            [f"{row['dispatcher']}\n{row['chunks']}" for row in bars], [row["ms"] for row in bars], color="#4878a8"
        )
        for row in rows:
            if row["dispatcher"] == "floor":
                axis.axhline(row["ms"], color="#c44e52", linestyle="--", label="floor: no communication")
        axis.set_title(f"{panel[0]}: {panel[1]}, recompute {panel[2]}", fontsize=10)
        axis.set_ylabel("ms, slowest rank")
        axis.legend(fontsize=8, loc="lower right")
    figure.suptitle(
        f"shape {result['shape']}, EP {result['expert_parallel_size']}, {result['environment']['device']}", fontsize=10
    )
    figure.tight_layout()
    figure.savefig(path, dpi=120)
