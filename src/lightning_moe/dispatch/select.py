"""Which dispatcher an expert-parallel group uses, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch.distributed as dist

from lightning_moe.dispatch.all_to_all import AllToAllDispatcher
from lightning_moe.dispatch.base import Dispatcher
from lightning_moe.dispatch.local import LocalDispatcher

DispatcherName = Literal["auto", "local", "all_to_all"]
DISPATCHERS: tuple[str, ...] = get_args(DispatcherName)


@dataclass(frozen=True)
class Choice:
    """A dispatcher with the name it was chosen under and the reason, for the report at start."""

    dispatcher: Dispatcher
    name: str
    reason: str


def select_dispatcher(name: str, group: dist.ProcessGroup) -> Choice:
    """Pick the dispatcher of an expert-parallel group.

    Args:
        name: ``"auto"``, or one of :data:`DISPATCHERS`.
        group: The expert-parallel group.

    Raises:
        ValueError: The name is unknown, or that dispatcher cannot serve this group.

    """
    check_dispatcher_name(name)
    if name == "local" and group.size() > 1:
        raise ValueError(
            f"`dispatcher='local'` moves no tokens, so it serves `expert_parallel_size=1` only, but the expert-parallel"
            f" group has {group.size()} ranks. Use `dispatcher='auto'` or `dispatcher='all_to_all'`."
        )
    if name == "local" or (name == "auto" and group.size() == 1):
        return Choice(LocalDispatcher(), "local", "every rank holds all experts")
    backend = dist.get_backend(group)
    reason = "asked for by name" if name != "auto" else f"experts live on {group.size()} ranks"
    return Choice(AllToAllDispatcher(group), f"all_to_all over {backend}", reason)


def check_dispatcher_name(name: str) -> None:
    """Raise a ``ValueError`` unless ``name`` is one of :data:`DISPATCHERS`."""
    if name not in DISPATCHERS:
        raise ValueError(
            f"Expected argument `dispatcher` to be one of {', '.join(map(repr, DISPATCHERS))} but got {name!r}."
        )
