"""Callbacks for the Trainer and for Fabric, which work with any strategy."""

from lightning_moe.callbacks.bias_balancer import RouterBiasBalancer
from lightning_moe.callbacks.expert_load import ExpertLoadMonitor
from lightning_moe.callbacks.memory import MemoryMonitor
from lightning_moe.callbacks.offload import ActivationOffload, ModelOffload

__all__ = ["ActivationOffload", "ExpertLoadMonitor", "MemoryMonitor", "ModelOffload", "RouterBiasBalancer"]
