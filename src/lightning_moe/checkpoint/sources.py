"""What can be loaded from: a folder of ``torch.distributed.checkpoint``, and a single file of ``torch.save``.

Opening one finds whether all of it is there. Then each rank reads its own part of it; no rank waits for another.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from lightning_moe.checkpoint.metadata import INDEX, Reader
from lightning_moe.checkpoint.optimizer import empty_state, shard_state
from lightning_moe.checkpoint.shards import copy_part

REST = "meta.pt"
"""The file of a folder that holds what is neither model nor optimizer, under Lightning's name for it."""


class Source(Protocol):
    """A checkpoint: models and optimizers under keys, and the rest."""

    rest: dict[str, Any]
    """What is neither model nor optimizer; of a file, all that it holds."""

    def keys(self) -> set[str]:
        """What it holds beside the rest."""

    def sizes(self, key: str) -> dict[str, torch.Size | None]:
        """The names of a model's values, and the shapes of those that are tensors."""

    def fill(self, key: str, values: dict[str, Any]) -> None:
        """Read a model's values: tensors into those that are given, each rank its own part, and what is no tensor."""

    def groups(self, key: str) -> list[dict[str, Any]]:
        """An optimizer's parameter groups."""

    def state(self, key: str, parameters: Mapping[Any, Tensor]) -> dict[Any, dict[str, Any]]:
        """An optimizer's state, sharded as the parameters, in new tensors; parameters are named as in its groups."""


def open_source(path: Path, weights_only: bool) -> Source:
    """Open the checkpoint at a path. No collective.

    Raises:
        FileNotFoundError: There is nothing.
        ValueError: It is no checkpoint, or not a complete one.
        pickle.UnpicklingError: It holds objects that only pickle restores, and ``weights_only`` is set.

    """
    if not path.exists():
        raise FileNotFoundError(f"There is no checkpoint at {path}.")
    return Folder(path, weights_only) if path.is_dir() else File(read_file(path, weights_only))


def read_file(path: Path, weights_only: bool) -> dict[str, Any]:
    """What ``torch.save`` wrote, mapped into memory and not read yet.

    Raises:
        ValueError: It is cut short, or something else.
        pickle.UnpicklingError: It holds objects that only pickle restores, and ``weights_only`` is set.

    """
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path} is cut short, or was not written by `torch.save`.")
    try:
        content = torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
    except pickle.UnpicklingError as error:
        raise pickle.UnpicklingError(
            f"{path} holds objects that only pickle can restore, and pickle runs what a file says. If you trust it, load it"
            f" with `ChunkedEPStrategy(weights_only=False)`. {error}"
        ) from error
    except (RuntimeError, EOFError, ValueError) as error:
        raise ValueError(f"{path} is damaged, or was not written by `torch.save`: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is no checkpoint: it holds a `{type(content).__name__}`, and not a dictionary.")
    return content


class Folder:
    """A folder to which every rank added a file.

    Args:
        path: The folder.
        weights_only: Refuse objects that only pickle restores.

    """

    def __init__(self, path: Path, weights_only: bool) -> None:
        missing = [name for name in (INDEX, REST) if not (path / name).is_file()]
        if missing:
            raise ValueError(
                f"{path} is no checkpoint, or one that was not completed: it has no {' and no '.join(missing)}."
            )
        self.rest = read_file(path / REST, weights_only)
        self._weights_only = weights_only
        self._reader = Reader(path)
        self._reader.set_up_storage_reader(self._reader.index, is_coordinator=False)
        self._paths: dict[str, tuple[Any, ...]] = self._reader.index.planner_data

    def keys(self) -> set[str]:
        return {path[0] for path in self._paths.values()}

    def sizes(self, key: str) -> dict[str, torch.Size | None]:
        return {path[1]: self._size(name) for name, path in self._below(key)}

    def fill(self, key: str, values: dict[str, Any]) -> None:
        names = {name: path[1] for name, path in self._below(key) if path[1] in values}
        read = self._read({name: values[short] for name, short in names.items()})
        values.update({short: read[name] for name, short in names.items()})

    def groups(self, key: str) -> list[dict[str, Any]]:
        values = {name: self._empty(name) for name, _ in self._below(key, "param_groups")}
        groups: list[dict[str, Any]] = self._nested(values, key, "param_groups", [])
        return groups

    def state(self, key: str, parameters: Mapping[Any, Tensor]) -> dict[Any, dict[str, Any]]:
        empty: dict[str, Tensor | None] = {}
        for name, path in self._below(key, "state"):
            entry = self._reader.index.state_dict_metadata[name]
            if len(path) > 2 and isinstance(entry, TensorStorageMetadata):
                empty[name] = empty_state(name, parameters[path[2]], entry.size, entry.properties.dtype)
            else:
                empty[name] = None
        state: dict[Any, dict[str, Any]] = self._nested(empty, key, "state", {})
        return state

    def _below(self, *keys: str) -> Iterator[tuple[str, tuple[Any, ...]]]:
        """Names in the index, and where in the nested state dict each belongs."""
        return ((name, path) for name, path in self._paths.items() if path[: len(keys)] == keys)

    def _size(self, name: str) -> torch.Size | None:
        entry = self._reader.index.state_dict_metadata[name]
        return entry.size if isinstance(entry, TensorStorageMetadata) else None

    def _empty(self, name: str) -> Tensor | None:
        entry = self._reader.index.state_dict_metadata[name]
        if isinstance(entry, TensorStorageMetadata):
            return torch.empty(entry.size, dtype=entry.properties.dtype)
        return None

    def _nested(self, values: Mapping[str, Any], key: str, branch: str, default: Any) -> Any:
        read = self._read(dict(values))
        return unflatten_state_dict(read, {name: self._paths[name] for name in read}).get(key, {}).get(branch, default)

    def _read(self, values: dict[str, Any]) -> dict[str, Any]:
        """Read into tensors in place, and set what is not a tensor."""
        planner = _Planner(self._weights_only)
        planner.set_up_planner(values, self._reader.index)
        self._reader.read_data(planner.create_local_plan(), planner).wait()
        return values


class _Planner(DefaultLoadPlanner):
    """Torch's own restores objects with pickle, whatever they are."""

    def __init__(self, weights_only: bool) -> None:
        super().__init__()
        self.weights_only = weights_only

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        loaded = torch.load(value, weights_only=self.weights_only)
        set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], loaded)


class File:
    """A single file with whole tensors. Each rank maps it, and reads the parts that it needs.

    Args:
        content: What :func:`read_file` has of it.

    """

    def __init__(self, content: dict[str, Any]) -> None:
        self.rest = content
        # the Trainer keeps optimizers in a list here, and under these keys in a folder
        self._content = self.rest | {
            f"optimizer_{i}": state for i, state in enumerate(self.rest.get("optimizer_states", []))
        }

    def keys(self) -> set[str]:
        return {key for key, value in self._content.items() if isinstance(value, dict)}

    def sizes(self, key: str) -> dict[str, torch.Size | None]:
        return {name: value.shape if isinstance(value, Tensor) else None for name, value in self._content[key].items()}

    def fill(self, key: str, values: dict[str, Any]) -> None:
        for name, value in self._content[key].items():
            if isinstance(values.get(name), Tensor):
                copy_part(values[name], value)
            elif name in values:
                values[name] = value

    def groups(self, key: str) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = self._content[key]["param_groups"]
        return groups

    def state(self, key: str, parameters: Mapping[Any, Tensor]) -> dict[Any, dict[str, Any]]:
        state = self._content[key]["state"]
        return {name: shard_state(entries, parameters[name]) for name, entries in state.items()}
