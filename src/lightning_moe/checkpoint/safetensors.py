"""Reading safetensors files part by part, and the folders that Hugging Face makes of them."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_moe.checkpoint.shards import Region
from lightning_moe.models.layouts import Part

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class Tensors:
    """The tensors of a model's files, opened and not read. To be used as a context.

    Args:
        path: A folder with ``model.safetensors``, or with several files and their index, or a single file.

    Raises:
        FileNotFoundError: The folder, its weights, or a file that its index names is missing.
        ValueError: A file is damaged or cut short.

    """

    def __init__(self, path: Path) -> None:
        self._stack = ExitStack()
        self._slices: dict[str, Any] = {}
        for file, names in _files(path).items():
            self._open(file, names)

    def __enter__(self) -> Tensors:
        return self

    def __exit__(self, *_: object) -> None:
        self._slices.clear()
        self._stack.close()

    def names(self) -> set[str]:
        return set(self._slices)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slices[name].get_shape())

    def kind(self, name: str) -> str:
        """The dtype, as safetensors calls it."""
        return str(self._slices[name].get_dtype())

    def copy_part(self, part: Part, target: Tensor, held: Region) -> None:
        """Copy what a part has in common with a region of its value.

        Args:
            part: A part of the value.
            target: The region's values, written to.
            held: Where they lie in the value.

        """
        read, write = [], []
        for index, here in zip(part.where, held, strict=True):
            if isinstance(index, int):
                if not here.start <= index < here.stop:
                    return
                write.append(index - here.start)
                continue
            start, stop = max(index.start, here.start), min(index.stop, here.stop)
            if start >= stop:
                return
            read.append(slice(start - index.start, stop - index.start))
            write.append(slice(start - here.start, stop - here.start))
        target[tuple(write)] = self._slices[part.name][tuple(read)].to(target.dtype)

    def _open(self, file: Path, names: set[str]) -> None:
        safe_open = imported("safe_open")
        try:
            opened = self._stack.enter_context(safe_open(file, framework="pt"))
            there = set(opened.keys())
        except Exception as error:  # of a type that safetensors makes in Rust
            raise ValueError(f"{file} is damaged, cut short, or no safetensors file: {error}") from error
        if missing := names - there:
            raise ValueError(f"{file} lacks `{min(missing)}`, which the index of its folder says it has.")
        self._slices |= {name: opened.get_slice(name) for name in there}


def imported(name: str) -> Any:
    """``safe_open`` or ``save_file`` of the package safetensors.

    Raises:
        ImportError: It is not installed.

    """
    try:
        import safetensors
        import safetensors.torch
    except ImportError as error:
        raise ImportError(
            "Hugging Face's weights are in safetensors files. Install what reads them with `pip install safetensors`, or with"
            " transformers: `pip install 'lightning_moe[hf]'`."
        ) from error
    return safetensors.safe_open if name == "safe_open" else safetensors.torch.save_file


def _files(path: Path) -> dict[Path, set[str]]:
    """Each file, and the names that an index says are in it."""
    if path.is_file():
        return {path: set()}
    if (path / INDEX).is_file():
        try:
            names: dict[str, str] = json.loads((path / INDEX).read_text())["weight_map"]
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(f"{path / INDEX} is damaged, or no index of a model: {error!r}.") from error
        files: dict[Path, set[str]] = {}
        for name, file in names.items():
            files.setdefault(path / file, set()).add(name)
    elif (path / SINGLE).is_file():
        files = {path / SINGLE: set()}
    else:
        hint = (
            ""
            if path.exists()
            else " A model on the Hugging Face Hub is fetched by `huggingface_hub.snapshot_download`."
        )
        raise FileNotFoundError(f"{path} holds no {SINGLE} and no {INDEX}.{hint}")
    for needed in files:
        if not needed.is_file():
            raise FileNotFoundError(f"{needed} is missing, and {path / INDEX} says that it holds weights.")
    return files
