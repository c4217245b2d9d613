"""Reading the index of a distributed checkpoint without running code from it.

``torch.distributed.checkpoint`` writes the index, ``.metadata``, as a pickle, and reads it with ``pickle.load``, which calls
whatever a file says. Here only the classes are known that such an index is made of.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, Metadata

INDEX = ".metadata"

_NAMES = {
    ("torch.distributed.checkpoint.metadata", name)
    for name in (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    )
}
_NAMES |= {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib._local", "PosixPath"),
    ("pathlib._local", "WindowsPath"),
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _NAMES or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names `{module}.{name}`, which no index of a checkpoint needs")


class Reader(FileSystemReader):
    """Reads a folder of ``torch.distributed.checkpoint``; its index is checked before anything else is read.

    Args:
        path: The folder.

    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.index = read_index(path)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.index


def read_index(path: Path) -> Metadata:
    """The index of a folder, once the files that it speaks of are known to be there in full.

    Raises:
        ValueError: The index, or a file that it names, is damaged, cut short or not what it should be.

    """
    try:
        with (path / INDEX).open("rb") as file:
            index = _Unpickler(file).load()
        ends: dict[str, int] = {}
        for info in index.storage_data.values():
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        keys = {key for key in index.planner_data if isinstance(key, str)}
        if not isinstance(index, Metadata) or keys != set(index.state_dict_metadata):
            raise TypeError("it does not list a state dict")
    except (pickle.UnpicklingError, EOFError, LookupError, AttributeError, ImportError, TypeError, ValueError) as error:
        raise ValueError(f"{path / INDEX} is damaged, or no index of a checkpoint: {error}.") from error
    for name, end in ends.items():
        shard = path / name
        if shard.parent != path:
            raise ValueError(f"{path / INDEX} names the file {shard}, which is not in the folder.")
        if not shard.is_file():
            raise ValueError(f"{shard} is missing: the checkpoint is not complete.")
        if (size := shard.stat().st_size) < end:
            raise ValueError(f"{shard} is cut short: it has {size} bytes, and {end} are needed.")
    return index
