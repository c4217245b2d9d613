"""Loading a checkpoint into models and optimizers, however they are sharded.

All of it is read on all ranks before a value of a model or an optimizer is changed. Nothing in a checkpoint is executed,
unless the caller asks for pickled objects.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.optim import Optimizer

from lightning_moe.checkpoint.messages import class_name, listed, quoted
from lightning_moe.checkpoint.names import plain_name
from lightning_moe.checkpoint.optimizer import Match, match_groups, owner, restore
from lightning_moe.checkpoint.place import put_back
from lightning_moe.checkpoint.ranks import on_all_ranks, on_first_rank
from lightning_moe.checkpoint.shards import empty_shard
from lightning_moe.checkpoint.sources import File, Source, open_source, read_file

Sizes = Mapping[str, torch.Size | None]


def load_checkpoint(
    path: Path,
    modules: Mapping[str, nn.Module],
    optimizers: Mapping[str, Optimizer],
    strict: bool = True,
    weights_only: bool = True,
    wanted: Iterable[str] = (),
) -> dict[str, Any]:
    """Load a checkpoint, a folder or a single file. Collective; each rank reads its own shards, from the same path.

    Args:
        path: What :func:`~lightning_moe.checkpoint.save.save_folder` or ``torch.save`` wrote, here or under another strategy
            of Lightning, with any number of ranks.
        modules: Models to load into, sharded or plain, by the keys that they were saved under.
        optimizers: Optimizers of these models.
        strict: The models' names must be the checkpoint's. Otherwise what has the same name is loaded.
        weights_only: ``False`` loads pickled objects, which may run any code: only from files that you trust.
        wanted: Keys of what else must be in the checkpoint where loading is strict.

    Returns:
        What the checkpoint holds beside these models and optimizers.

    Raises:
        KeyError: It lacks something that is wanted.
        FileNotFoundError: There is nothing at the path.
        ValueError: It is no checkpoint, is damaged, or does not fit. The message names the file; nothing was changed.
        pickle.UnpicklingError: It holds pickled objects, and these are not allowed.
        RuntimeError: Another rank failed.

    """
    on_first_rank(partial(put_back, path))
    with on_all_ranks():
        source = open_source(path, weights_only)
        _refuse_missing_keys(path, source, modules, optimizers)
        for key in wanted if strict else ():
            if key not in source.rest:
                raise KeyError(
                    f"The requested state contains a key '{key}' that does not exist in the loaded checkpoint {path}."
                )
        with _naming(path):
            values = {key: _read(source, key, module, strict) for key, module in modules.items()}
            matches = {key: _match(source, key, optimizer, modules) for key, optimizer in optimizers.items()}
            states = {key: source.state(key, match.parameters) for key, match in matches.items()}
    with on_all_ranks(), _naming(path):
        for key, module in modules.items():
            module.load_state_dict(values[key], strict=False)
        for key, optimizer in optimizers.items():
            restore(optimizer, matches[key], states[key])
    loaded = modules.keys() | optimizers.keys()
    return {key: value for key, value in source.rest.items() if key not in loaded}


def keys_of(path: Path, weights_only: bool = True) -> set[str]:
    """The keys of what a checkpoint holds beside the rest. Collective, with the errors of :func:`load_checkpoint`."""
    on_first_rank(partial(put_back, path))
    with on_all_ranks():
        return open_source(path, weights_only).keys()


def load_weights(path: Path, module: nn.Module, strict: bool = True, weights_only: bool = True) -> None:
    """Load a file that holds a model's whole state dict and nothing else. Collective, as :func:`load_checkpoint`."""
    on_first_rank(partial(put_back, path))
    with on_all_ranks():
        if not path.is_file():
            raise FileNotFoundError(f"There is no file at {path}. To load a folder, pass the model in a dictionary.")
        source = File({"weights": read_file(path, weights_only)})
        with _naming(path):
            values = _read(source, "weights", module, strict)
    with on_all_ranks(), _naming(path):
        module.load_state_dict(values, strict=False)


def compare(kind: str, ours: Sizes, theirs: Sizes, strict: bool) -> None:
    """Raise a ``ValueError`` if saved values do not fit a model's.

    Args:
        kind: What the model is called.
        ours: The model's names and shapes.
        theirs: The saved ones.
        strict: Names must be the same.

    """
    shapes = [
        f"`{name}` has shape {list(size or ())} instead of {list(ours[name] or ())}"
        for name, size in theirs.items()
        if name in ours and size != ours[name]
    ]
    missing, unexpected = (
        listed(quoted(names)) for names in (ours.keys() - theirs.keys(), theirs.keys() - ours.keys())
    )
    wrong = [listed(shapes)] if shapes else []
    if strict and missing:
        wrong.append(f"it lacks {missing}")
    if strict and unexpected:
        wrong.append(f"it has {unexpected}, which the model has not")
    if wrong:
        hint = (
            ""
            if shapes
            else " To load what has the same name, pass `strict=False` (to a LightningModule: `strict_loading`)."
        )
        raise ValueError(f"It does not fit the `{kind}`: {'; '.join(wrong)}.{hint}")


def _read(source: Source, key: str, module: nn.Module, strict: bool) -> dict[str, Any]:
    """What a checkpoint has of a model's state dict, in new tensors, under the names that the model itself uses."""
    ours, sizes = get_model_state_dict(module), source.sizes(key)
    compare(class_name(module), _sizes(ours), sizes, strict)
    values = {
        name: empty_shard(value, value.dtype) if isinstance(value, Tensor) else None
        for name, value in ours.items()
        if name in sizes
    }
    source.fill(key, values)
    own_names = {plain_name(name): name for name in module.state_dict()}
    if foreign := values.keys() - own_names.keys():
        raise ValueError(f"The `{class_name(module)}` itself has {listed(quoted(foreign))} under another name.")
    return {own_names[name]: value for name, value in values.items()}


def _match(source: Source, key: str, optimizer: Optimizer, modules: Mapping[str, nn.Module]) -> Match:
    return match_groups(optimizer, owner(optimizer, modules), source.groups(key))


def _refuse_missing_keys(path: Path, source: Source, modules: Iterable[str], optimizers: Iterable[str]) -> None:
    keys = source.keys()
    there = ", ".join(sorted(map(repr, keys)))
    for key in modules:
        if key not in keys:
            raise ValueError(f"{path} holds no model under the key {key!r}: it has {there or 'nothing'}.")
    for key in optimizers:
        if key not in keys:
            raise ValueError(
                f"{path} holds no optimizer state under the key {key!r}: it has {there}. If it was saved with"
                " `weights_only=True`, it can be validated, tested or predicted with, but training cannot be resumed from it."
            )


def _sizes(values: Mapping[str, Any]) -> dict[str, torch.Size | None]:
    return {name: value.shape if isinstance(value, Tensor) else None for name, value in values.items()}


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Say which checkpoint an error is about."""
    try:
        yield
    except (
        ValueError,
        RuntimeError,
        EOFError,
        LookupError,
        AttributeError,
        TypeError,
        pickle.UnpicklingError,
    ) as error:
        raise ValueError(f"{path} cannot be loaded. {error}") from error
