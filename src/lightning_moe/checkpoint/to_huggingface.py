"""A model's weights into Hugging Face's format, each rank a share of them."""

from __future__ import annotations

import copy
import json
import math
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from lightning_moe._compat import unwrap_objects
from lightning_moe.checkpoint.messages import class_name
from lightning_moe.checkpoint.names import plain_layouts
from lightning_moe.checkpoint.ranks import gather, on_all_ranks
from lightning_moe.checkpoint.safetensors import INDEX, SINGLE, imported
from lightning_moe.checkpoint.shards import Region, region
from lightning_moe.models.layouts import Layout, Part
from lightning_moe.ops.local import local_part, this_rank

_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT])(i?)B\s*", re.IGNORECASE)


def save_huggingface(model: nn.Module, path: str | os.PathLike[str], max_shard_size: int | str = "5GB") -> None:
    """Save a model so that transformers' ``from_pretrained`` loads it. Collective.

    The ranks share out the tensors between them: each writes experts that it holds, and some of everything else. Besides what
    goes into the file that it writes, a rank holds one value of the model at a time, and of stacked experts only its own.
    Experts are stored each by itself, under Hugging Face's names, all in the dtype of the model.

    Args:
        model: A Hugging Face model, before or after the strategy set it up. To be called on all ranks.
        path: A folder on storage that all ranks share. Weights of an earlier export in it are replaced, once the new ones are
            complete; other files stay.
        max_shard_size: Bytes of weights in a file, as a number or as `"500MB"`; a larger tensor has a file of its own.

    Raises:
        TypeError: The model has no ``config``, or is on the meta device.
        ValueError: ``max_shard_size`` is no size.
        OSError: A file could not be written. On the other ranks this is a ``RuntimeError``.
        ImportError: The package safetensors is not installed.

    """
    model, path = unwrap_objects(model), Path(path)
    with on_all_ranks():
        imported("save_file")
        limit = _num_bytes(max_shard_size)
        values = model.state_dict(keep_vars=True)
        if not hasattr(getattr(model, "config", None), "save_pretrained"):
            raise TypeError(
                f"`{class_name(model)}` has no `config` that could be saved. Pass the Hugging Face model itself, such as"
                " `lightning_module.model`."
            )
        if any(value.is_meta for value in values.values()):
            raise TypeError(f"The `{class_name(model)}` is on the meta device, without weights to save.")
        path.mkdir(parents=True, exist_ok=True)
        writer = _Writer(path, limit)
    try:
        with on_all_ranks(), torch.no_grad():
            _write(values, plain_layouts(model), writer)
    except BaseException:
        writer.discard()
        raise
    with on_all_ranks():
        weight_map = writer.name_files()
    with on_all_ranks():
        if writer.rank == 0:
            _finish(model, path, weight_map, sum(value.numel() * value.itemsize for value in values.values()))


def _num_bytes(size: int | str) -> int:
    """A size as transformers takes it: ``"5GB"`` is 5 * 10^9 bytes, ``"5GiB"`` 5 * 2^30."""
    limit: object = size
    if isinstance(size, str) and (match := _SIZE.fullmatch(size)):
        number, prefix, binary = match.groups()
        limit = int(float(number) * (1024 if binary else 1000) ** (1 + "KMGT".index(prefix.upper())))
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
        raise ValueError(
            "Expected argument `max_shard_size` to be a positive number of bytes, or a size such as '5GB' or '500MiB', but got"
            f" {size!r}."
        )
    return limit


class _Writer:
    """Writes this rank's tensors into files of limited size, which get their names once all ranks have theirs."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit
        self.rank = this_rank()
        self.pending: dict[str, Tensor] = {}
        self.size = 0
        self.files: list[list[str]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        if self.pending and self.size + tensor.nbytes > self.limit:
            self.flush()
        self.pending[name] = tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)
        self.size += tensor.nbytes

    def flush(self) -> None:
        if self.pending:
            imported("save_file")(self.pending, self._partial(len(self.files)), metadata={"format": "pt"})
            self.files.append(list(self.pending))
            self.pending, self.size = {}, 0

    def name_files(self) -> dict[str, str]:
        """Give the files their names. Collective. Returns the name of a tensor -> that of its file."""
        by_rank = gather(self.files)
        total = sum(map(len, by_rank))
        weight_map: dict[str, str] = {}
        number = 0
        for rank, files in enumerate(by_rank):
            for i, names in enumerate(files):
                number += 1
                file = SINGLE if total == 1 else f"model-{number:05d}-of-{total:05d}.safetensors"
                weight_map |= dict.fromkeys(names, file)
                if rank == self.rank:
                    self._partial(i).replace(self.folder / file)
        return weight_map

    def discard(self) -> None:
        """Remove what was written."""
        for number in range(len(self.files) + 1):
            self._partial(number).unlink(missing_ok=True)

    def _partial(self, number: int) -> Path:
        return self.folder / f".model-{self.rank}-{number}.partial"


def _write(values: dict[str, Tensor], layouts: dict[str, list[Layout]], writer: _Writer) -> None:
    """Write what falls to this rank. Collective: a rank that cannot write still takes part until the end."""
    failure: Exception | None = None
    turn = 0
    for name, (layout, *_) in layouts.items():
        held = _spread(values[name], layout)
        for part in layout:
            turn += 1
            if failure is None and (tensor := held.part(part)) is not None and turn % held.copies == held.number:
                try:
                    writer.add(part.name, tensor)
                except Exception as error:
                    failure = error
    if failure is not None:
        raise failure
    writer.flush()


class _Held(NamedTuple):
    """What this rank has of a value while it is written."""

    local: Tensor
    region: Region
    copies: int
    """How many ranks have the same."""
    number: int
    """Which of them this rank is."""

    def part(self, part: Part) -> Tensor | None:
        """A part that lies in the region; ``None`` if it lies in another rank's."""
        index, *rest = part.where or (slice(0, 0),)
        if not isinstance(index, int):
            return self.local[part.where]
        start, stop = self.region[0].start, self.region[0].stop
        return self.local[(index - start, *rest)] if start <= index < stop else None


def _spread(value: Tensor, layout: Layout) -> _Held:
    """Gather a value, but leave experts that are stored each by itself on their ranks. Collective."""
    if not isinstance(value, DTensor):
        size, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        return _Held(value, region(value), size, rank)
    apart = all(isinstance(index, int) for part in layout for index in part.where[:1])
    placements = [p if apart and type(p) is Shard and p.dim == 0 else Replicate() for p in value.placements]
    spread = value.redistribute(placements=placements)
    coordinate = value.device_mesh.get_coordinate()
    assert coordinate is not None
    axes = [axis for axis, placement in enumerate(placements) if placement.is_replicate()]
    sizes = [value.device_mesh.size(axis) for axis in axes]
    number = 0
    for axis, size in zip(axes, sizes, strict=True):
        number = number * size + coordinate[axis]
    return _Held(local_part(spread), region(spread), math.prod(sizes), number)


def _finish(model: nn.Module, path: Path, weight_map: dict[str, str], total_size: int) -> None:
    """The index and the configuration; then files of an earlier export go. On one rank."""
    keep = set(weight_map.values())
    if keep != {SINGLE}:
        index = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
        (path / f".{INDEX}").write_text(json.dumps(index, indent=2) + "\n")
        (path / f".{INDEX}").replace(path / INDEX)
        keep.add(INDEX)
    config: Any = copy.deepcopy(model.config)
    config.architectures = [class_name(model)]
    config.dtype = next(parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    config.save_pretrained(path)
    generation: Any = getattr(model, "generation_config", None)
    if generation is not None:
        generation.save_pretrained(path)
    for file in path.iterdir():
        if _WEIGHTS.fullmatch(file.name) and file.name not in keep:
            file.unlink()
