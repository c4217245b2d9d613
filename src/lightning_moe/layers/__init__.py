"""The mixture-of-experts layer and its parts: plain modules that also work on one process."""

from lightning_moe.layers.experts import GroupedExperts
from lightning_moe.layers.moe import MoELayer
from lightning_moe.layers.router import Routing, TopKRouter
from lightning_moe.layers.shared import SharedExperts

__all__ = ["GroupedExperts", "MoELayer", "Routing", "SharedExperts", "TopKRouter"]
