"""Activations, and whole models between phases, in host memory."""

from lightning_moe.offload.activations import ActivationOffloader
from lightning_moe.offload.model import ModelOffloader

__all__ = ["ActivationOffloader", "ModelOffloader"]
