"""What is recomputed in backward instead of being kept."""

from lightning_moe.recompute.chain import Chain, Part, recompute
from lightning_moe.recompute.discard import DiscardOutputCheckpoint
from lightning_moe.recompute.policy import RecomputePolicy, RoutedMode

__all__ = ["Chain", "DiscardOutputCheckpoint", "Part", "RecomputePolicy", "RoutedMode", "recompute"]
