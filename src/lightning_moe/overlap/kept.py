"""Names of what the routed experts keep for backward, so that whoever moves it elsewhere can be told which."""

from __future__ import annotations

from torch import Tensor

from lightning_moe.recompute.policy import RoutedMode

KEPT: dict[RoutedMode, tuple[str, ...]] = {
    "none": ("rows", "gate_up", "act"),
    "act": ("rows", "gate_up"),
    "dispatch": ("gate_up",),
    "full": (),
}
"""Mode -> the first grouped GEMM's input, its output and the second one's input, as far as they are kept."""

NAMES = KEPT["none"]


def name_kept(*tensors: Tensor | None) -> None:
    """Give what is kept, in the order of ``NAMES``, its names."""
    for name, tensor in zip(NAMES, tensors, strict=True):
        if tensor is not None:
            tensor.kept_name = name  # type: ignore[attr-defined]


def kept_name(tensor: Tensor) -> str | None:
    """The name that a tensor was given, if any."""
    return getattr(tensor, "kept_name", None)
