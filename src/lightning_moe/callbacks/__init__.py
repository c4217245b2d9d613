"""Callbacks for the Trainer and for Fabric, which work with any strategy."""

from lightning_moe.callbacks.memory import MemoryMonitor

__all__ = ["MemoryMonitor"]
