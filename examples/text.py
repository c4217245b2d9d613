"""Real text, byte by byte: the files of a folder, cut into windows, and batches that a resumed run takes up exactly."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

VOCABULARY = 256
SUFFIXES = (".py", ".txt")
MAX_BYTES = 64 * 2**20
MAX_VALIDATION_BYTES = 2**17


class Windows(Dataset[Tensor]):
    """Windows of ``length`` tokens, side by side, as int64 ids."""

    def __init__(self, data: Tensor, length: int) -> None:
        self.data = data
        self.length = length

    def __len__(self) -> int:
        return len(self.data) // self.length

    def __getitem__(self, index: int) -> Tensor:
        return self.data[index * self.length : (index + 1) * self.length].long()


def as_bytes(text: bytearray) -> Tensor:
    """The ids of text for a model over bytes."""
    return torch.frombuffer(text, dtype=torch.uint8)


def windows(
    folder: str | None, length: int, encode: Callable[[bytearray], Tensor] = as_bytes
) -> tuple[Windows, Windows]:
    """The windows to train on, and those of the tail, to validate on; by default of Python's standard library."""
    root = Path(folder or sysconfig.get_path("stdlib"))
    if not root.is_dir():
        raise SystemExit(f"{root} is not a folder. Give a folder of text files with `--data`.")
    text = _read(root)
    data = encode(text) if text else torch.empty(0)
    held_out = min(len(data) // 10, MAX_VALIDATION_BYTES)
    if held_out < length:
        raise SystemExit(
            f"{root} holds {len(data):,} tokens of text (files in {' or '.join(SUFFIXES)}), but at least {10 * length:,} are"
            " needed. Give another folder with `--data`."
        )
    return Windows(data[:-held_out], length), Windows(data[-held_out:], length)


class TrainLoader(DataLoader[Tensor]):
    """This rank's batches, one a step. Its ``step`` is saved with a checkpoint, and it goes on from there."""

    def __init__(self, dataset: Windows, batch_size: int, steps: int) -> None:
        super().__init__(dataset, batch_size, sampler=_Draws(dataset, batch_size, steps))
        self.step = 0

    def __iter__(self) -> Iterator[Tensor]:
        self.sampler.first_step = self.step
        for batch in super().__iter__():
            self.step += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


class _Draws(DistributedSampler[int]):
    """Windows drawn at random by the number of the step alone, so that it does not matter where a run was interrupted.

    A ``DistributedSampler``, since these are left as they are by Lightning.
    """

    def __init__(self, dataset: Windows, batch_size: int, steps: int) -> None:
        super().__init__(dataset)  # asks the process group for rank and world size
        self.batch_size = batch_size
        self.steps = steps
        self.first_step = 0

    def __len__(self) -> int:
        return self.steps * self.batch_size

    def __iter__(self) -> Iterator[int]:
        for step in range(self.first_step, self.steps):
            generator = torch.Generator().manual_seed(step)
            drawn = torch.randint(len(self.dataset), (self.num_replicas, self.batch_size), generator=generator)
            yield from drawn[self.rank].tolist()


def _read(root: Path) -> bytearray:
    """The folder's files one after another, by name; what cannot be read, and installed packages, are left out."""
    text = bytearray()
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if name not in ("site-packages", "dist-packages"))
        for file in sorted(files):
            if file.endswith(SUFFIXES):
                try:
                    text += Path(folder, file).read_bytes()
                except OSError:
                    continue
                if len(text) >= MAX_BYTES:
                    return text[:MAX_BYTES]
    return text
