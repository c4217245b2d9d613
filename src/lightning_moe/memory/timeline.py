"""A run's memory as a chart: what each phase held, step by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from lightning_moe.memory.meter import PHASES
from lightning_moe.memory.owners import CATEGORIES, TEMPORARY

Row = Mapping[str, float]


def save_timeline(rows: Sequence[Row], path: Path) -> None:
    """Write a PNG, a panel for each phase: categories stacked, in GiB, of the rank with the highest peak.

    Args:
        rows: From :func:`~lightning_moe.memory.summary.summarize`, with the ``step`` of each. Of a run that went on on another
            kind of device, those are drawn that have the last one's figures.
        path: Of the file.

    Raises:
        ImportError: Without matplotlib.

    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8), layout="constrained")
    rows = [row for row in rows if _peaks(row) == _peaks(rows[-1])]
    steps = [row["step"] for row in rows]
    categories = [*CATEGORIES, TEMPORARY]
    for phase, axis in zip(PHASES, figure.subplots(len(PHASES), 1, sharex=True, sharey=True), strict=True):
        stack = [[max(row[f"{phase}/{category}"], 0.0) for row in rows] for category in categories]
        axis.stackplot(steps, stack, labels=[name.replace("_", " ") for name in categories], step="mid")
        if f"{phase}/peak_reserved" in rows[0]:
            axis.step(steps, [row[f"{phase}/peak_reserved"] for row in rows], "k--", where="mid", label="reserved")
        axis.set_title(phase, fontsize=10)
        axis.set_ylabel("GiB")
    axis.set_xlabel("step")
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper", fontsize=8)
    figure.suptitle("Memory at each phase's peak, of the fullest rank", fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def _peaks(row: Row) -> set[str]:
    """What a device tells: a CPU has nothing reserved, and another name for what is used."""
    return {name for name in row if name.startswith("forward/peak_") and not name.endswith("_spread")}
