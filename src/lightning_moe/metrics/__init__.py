"""Metrics of routing: how tokens are shared out between experts."""

from lightning_moe.metrics.functional import dead_experts, load_entropy, load_imbalance
from lightning_moe.metrics.load import DeadExperts, DroppedTokens, LoadEntropy, LoadImbalance, TokensPerExpert

__all__ = [
    "DeadExperts",
    "DroppedTokens",
    "LoadEntropy",
    "LoadImbalance",
    "TokensPerExpert",
    "dead_experts",
    "load_entropy",
    "load_imbalance",
]
