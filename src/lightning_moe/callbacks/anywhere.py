"""What makes one class a callback of the Trainer and of Fabric."""

from __future__ import annotations

from typing import Any

from torch import nn

from lightning_moe._compat import Callback, FabricModule


class Anywhere(Callback):
    """A callback whose hooks take whatever they are given: the Trainer needs them all, and ``fabric.call`` passes anything."""


def _nothing(*_: Any, **__: Any) -> None:
    pass


for _name in vars(Callback):
    if _name.startswith("on_"):
        setattr(Anywhere, _name, _nothing)


def unwrapped(model: nn.Module) -> nn.Module:
    """What Fabric wrapped, with the names that its owner knows."""
    return model.module if isinstance(model, FabricModule) else model
