"""An error on one rank is an error on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


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
    said = None if failure is None else f"{type(failure).__name__}: {failure}"
    heard = [said]
    if dist.is_initialized():
        heard = [None] * dist.get_world_size(group)
        dist.all_gather_object(heard, said, group)
    if failure is not None:
        raise failure
    for rank, message in enumerate(heard):
        if message is not None:
            raise RuntimeError(f"Rank {rank} failed: {message}")
