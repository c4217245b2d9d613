"""The load of experts as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_moe._compat import rank_zero_only, rank_zero_warn


@rank_zero_only
def save_heatmap(counts: Mapping[str, Tensor], path: str | Path, title: str) -> None:
    """Draw layers down and experts across, coloured by load, as a PNG. Only rank 0 does, and warns where it cannot.

    Args:
        counts: By layer, ``[E]`` tokens of each expert.
        path: The file. Its folder is made.
        title: Stands above.

    """
    try:
        from matplotlib.figure import Figure

        figure = Figure(layout="constrained")
        draw(counts, title, figure)
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=100)
    except (ImportError, OSError) as error:  # not worth a training
        rank_zero_warn(
            f"No heatmap of the experts' load was drawn: {error}. It takes matplotlib (`pip install matplotlib`), and a path"
            " that can be written to."
        )


def draw(counts: Mapping[str, Tensor], title: str, figure: Any) -> None:
    """Each expert's tokens over an even share of its layer's. Experts that a layer does not have stay white."""
    num_experts = max(len(counts_E) for counts_E in counts.values())
    loads_LE = torch.full((len(counts), num_experts), torch.nan)
    for row_E, counts_E in zip(loads_LE, counts.values(), strict=True):
        row_E[: len(counts_E)] = counts_E / counts_E.double().mean().clamp(min=1e-9)
    figure.set_size_inches(min(4 + num_experts / 12, 16), min(2 + len(counts) / 5, 16))
    axis = figure.subplots()
    # even is the middle of the colours; a load of twice that, or more, their end
    image = axis.imshow(loads_LE.numpy(), aspect="auto", cmap="coolwarm", vmin=0, vmax=2, interpolation="nearest")
    axis.set_yticks(range(len(counts)), list(counts), fontsize=6)
    axis.set_xlabel("expert")
    axis.set_title(title, fontsize=9)
    figure.colorbar(image, ax=axis, label="tokens over an even share", extend="max")
