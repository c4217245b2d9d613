"""Words that error messages share."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.distributed.fsdp import FSDPModule


def listed(items: Iterable[str], most: int = 4) -> str:
    """The first few of some names, in order, and how many more there are."""
    items = sorted(items)
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(items[:most]) + more


def quoted(names: Iterable[str]) -> list[str]:
    """Names as they stand in a message."""
    return [f"`{name}`" for name in names]


def class_name(module: nn.Module) -> str:
    """The name of a module's class, without what FSDP2 makes of it."""
    return next(cls for cls in type(module).__mro__ if not issubclass(cls, FSDPModule)).__name__
