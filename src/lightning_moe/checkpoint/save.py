"""Saving a checkpoint: beside the path first, and in its place only once it is complete."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.optim import Optimizer

from lightning_moe.checkpoint.optimizer import owner
from lightning_moe.checkpoint.place import discard, partial_path, prepare, replace
from lightning_moe.checkpoint.ranks import on_all_ranks
from lightning_moe.checkpoint.sources import REST
from lightning_moe.ops.local import this_rank


def state_dicts(
    state: Mapping[str, Any], whole: bool, keep: Mapping[str, Callable[[str, Any], bool]]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Take models and optimizers apart from the rest. Collective.

    Args:
        state: What is to be saved, by key.
        whole: Gather every tensor on rank 0, for a single file.
        keep: Key -> whether an item of what it stands for is saved, by name and value.

    Returns:
        State dicts of models and optimizers on the CPU, and the rest.

    """
    modules = {key: value for key, value in state.items() if isinstance(value, nn.Module)}
    options = StateDictOptions(full_state_dict=whole, cpu_offload=True)
    sharded: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    for key, value in state.items():
        into, saved = sharded, value
        if isinstance(value, nn.Module):
            saved = get_model_state_dict(value, options=options)
        elif isinstance(value, Optimizer):
            saved = get_optimizer_state_dict(owner(value, modules), value, options=options)
        else:
            into, saved = rest, value.state_dict() if hasattr(value, "state_dict") else value
        if key in keep:
            saved = {name: item for name, item in saved.items() if keep[key](name, item)}
        into[key] = saved
    return sharded, rest


def save_folder(path: Path, state: dict[str, Any], rest: bytes, group: dist.ProcessGroup | None = None) -> None:
    """Write a folder of ``torch.distributed.checkpoint`` to which each rank adds its shards. Collective.

    Args:
        path: On storage that all ranks share. What was there before is replaced, at the end.
        state: Models' and optimizers' state dicts of DTensors, by key.
        rest: What :func:`packed` made of everything else.
        group: The ranks.

    Raises:
        IsADirectoryError: There is a folder at the path that is no checkpoint.
        RuntimeError: A rank could not write; the message says which, and why. What was at the path is still there.

    """
    leader = this_rank(group) == 0
    partial = partial_path(path)
    with on_all_ranks(group):
        if leader:
            prepare(path)
            with writing(path):
                partial.mkdir()
                (partial / REST).write_bytes(rest)
    try:
        dcp.save(state, storage_writer=dcp.FileSystemWriter(partial), process_group=group)
    except CheckpointException as error:  # a `BaseException`, the same on all ranks
        if leader:
            discard(path)
        rank, (failure, _) = next(iter(error.failures.items()))
        message = f"{path} could not be saved: rank {rank} failed with {type(failure).__name__}: {failure}"
        raise RuntimeError(message) from failure
    with on_all_ranks(group):
        if leader:
            replace(partial, path)


def save_file(path: Path, content: dict[str, Any]) -> None:
    """Write a single file; to be called on one rank.

    Raises:
        IsADirectoryError: There is a folder at the path that is no checkpoint.
        RuntimeError: It could not be written; the message says why. What was at the path is still there.

    """
    prepare(path)
    # to a path torch's own writer would not say that the disk is full, but only that it is not where it should be
    with writing(path), partial_path(path).open("wb") as file:
        torch.save(content, file)
    replace(partial_path(path), path)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Leave nothing half-written where this context fails, and say which checkpoint could not be saved. On one rank."""
    try:
        yield
    except BaseException as error:
        discard(path)
        if isinstance(error, (OSError, RuntimeError)):
            reason = _reason(error)
            raise RuntimeError(f"{path} could not be saved: {type(reason).__name__}: {reason}") from error
        raise


def _reason(error: BaseException) -> BaseException:
    """The error of the file system behind those that torch's writer has when it closes a file that it could not write."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__context__
    return cause or error


def packed(rest: dict[str, Any]) -> bytes:
    """What is neither model nor optimizer, as the content of a file: what changes later does not change it."""
    buffer = io.BytesIO()
    torch.save(rest, buffer)
    return buffer.getvalue()
