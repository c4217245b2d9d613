"""A rank that fails leaves word of it, and ranks that lose a peer by it pass the word on."""

from __future__ import annotations

import re
import sys
import time
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any

import torch.distributed as dist

from lightning_moe.strategies.agreement import list_ranks

_KEY = "lightning_moe/failed"
_PATIENCE = 5.0  # seconds that a rank which lost a peer waits for word of the reason
_LOST_PEER = re.compile("gloo|nccl", re.IGNORECASE)  # in messages of torch.distributed


def explain(error: BaseException) -> None:
    """Leave word of an error for the other ranks, or find out whose error it is the consequence of, and say so in a note to it.

    Not collective: each rank calls this when it fails, and waits some seconds at most.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    is_consequence = _is_consequence(error)
    word = "" if is_consequence else f"{type(error).__name__}: {error}".split("\n")[0][:300]
    try:
        store = dist.distributed_c10d._get_default_store()
        store.set(f"{_KEY}/{dist.get_rank()}", word)
        if is_consequence:
            error.add_note(_reason(store))
    except RuntimeError:  # the store lives in rank 0's process, unless torchrun keeps it
        if is_consequence:
            error.add_note("Rank 0 has ended, and so this rank lost it: rank 0's own output may say why.")


def forget() -> None:
    """Take back what this rank said of an earlier failure, which somebody caught: another run begins. Not collective."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        with suppress(RuntimeError):  # a store that cannot be asked
            dist.distributed_c10d._get_default_store().delete_key(f"{_KEY}/{dist.get_rank()}")


def explain_uncaught() -> None:
    """Have errors that nobody catches explained, where no framework reports them."""
    if getattr(sys.excepthook, "func", None) is not _excepthook:
        sys.excepthook = partial(_excepthook, sys.excepthook)


def _excepthook(
    previous: Any, kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    explain(error)
    previous(kind, error, traceback)


def _is_consequence(error: BaseException) -> bool:
    if isinstance(error, (dist.DistError, TimeoutError)):
        return True
    return isinstance(error, RuntimeError) and _LOST_PEER.search(str(error)) is not None


def _reason(store: Any) -> str:
    others = [rank for rank in range(dist.get_world_size()) if rank != dist.get_rank()]
    deadline = time.monotonic() + _PATIENCE
    heard: dict[int, str] = {}
    while len(heard) < len(others) and not any(heard.values()) and time.monotonic() < deadline:
        heard |= {
            rank: store.get(f"{_KEY}/{rank}").decode()
            for rank in others
            if rank not in heard and store.check([f"{_KEY}/{rank}"])
        }
        time.sleep(0.05)
    causes = [f"rank {rank} failed with {word}" for rank, word in heard.items() if word]
    if causes:
        return f"This rank lost a peer, since {'; '.join(causes)}. That rank's own output has more."
    if silent := [rank for rank in others if rank not in heard]:
        return (
            f"This rank lost a peer. Nothing was heard of {list_ranks(silent)}: killed from outside (by the kernel, when the"
            " host's memory ends; by a scheduler), crashed, or hanging. Training can go on from the last checkpoint."
        )
    return "Every rank lost a peer, and none had an error of its own: the network between them may have failed."
