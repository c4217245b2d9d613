"""Mixture-of-experts training for PyTorch Lightning and Fabric: expert parallelism in overlapped chunks of tokens."""

from lightning_moe._version import __version__
from lightning_moe.checkpoint import load_huggingface, save_huggingface
from lightning_moe.layers import (
    GroupedExperts,
    MoELayer,
    Routing,
    SharedExperts,
    TopKRouter,
    load_balancing_loss,
    record_routing,
    router_z_loss,
)
from lightning_moe.parallel.gradients import clip_grad_norm_, total_grad_norm
from lightning_moe.recompute import RecomputePolicy
from lightning_moe.strategies import ChunkedEPStrategy

__all__ = [
    "ChunkedEPStrategy",
    "GroupedExperts",
    "MoELayer",
    "RecomputePolicy",
    "Routing",
    "SharedExperts",
    "TopKRouter",
    "__version__",
    "clip_grad_norm_",
    "load_balancing_loss",
    "load_huggingface",
    "record_routing",
    "router_z_loss",
    "save_huggingface",
    "total_grad_norm",
]
