"""The mixture-of-experts layer and its parts: plain modules that also work on one process."""

from lightning_moe.layers.experts import GroupedExperts
from lightning_moe.layers.losses import load_balancing_loss, router_z_loss
from lightning_moe.layers.moe import MoELayer
from lightning_moe.layers.record import RoutingRecord, moe_layers, record_routing
from lightning_moe.layers.router import Routing, TopKRouter
from lightning_moe.layers.shared import SharedExperts

__all__ = [
    "GroupedExperts",
    "MoELayer",
    "Routing",
    "RoutingRecord",
    "SharedExperts",
    "TopKRouter",
    "load_balancing_loss",
    "moe_layers",
    "record_routing",
    "router_z_loss",
]
