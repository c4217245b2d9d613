"""What ranks tell each other: an error on one rank is an error on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from lightning_moe.ops.local import this_rank


@contextmanager
def on_all_ranks(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Leave the context on all ranks of the group or on none: nobody goes on to wait for a rank that failed. Collective.

    Args:
        group: The ranks; by default all. Without a process group it is this process alone.

    Raises:
        RuntimeError: The context failed on another rank; the message says on which, and how. A rank on which it failed itself
            raises its own error.

    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    heard = gather(None if failure is None else f"{type(failure).__name__}: {failure}", group)
    if failure is not None:
        raise failure
    for rank, message in enumerate(heard):
        if message is not None:
            raise RuntimeError(f"Rank {rank} failed: {message}")


def on_first_rank(act: Callable[[], None], group: dist.ProcessGroup | None = None) -> None:
    """Let one rank do something; an error of it is every rank's. Collective, as :func:`on_all_ranks`."""
    with on_all_ranks(group):
        if this_rank() == 0:
            act()


def gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's value, which must be picklable; without a process group this process's alone. Collective."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values
