"""Which part of a whole tensor this rank holds."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from lightning_moe.ops.local import as_part_of, local_part

Region = tuple[slice, ...]
"""A box in a tensor: a slice with start and stop for each dim."""


def region(tensor: Tensor) -> Region:
    """Where this rank's part lies in the whole tensor; of a plain tensor that is all of it."""
    if isinstance(tensor, DTensor):
        sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    else:
        sizes, offsets = tuple(tensor.shape), (0,) * tensor.dim()
    return tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))


def empty_shard(like: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor that is sharded as another one is, without values."""
    return as_part_of(torch.empty_like(local_part(like), dtype=dtype, requires_grad=False), like)


@torch.no_grad()
def copy_part(target: Tensor, whole: Tensor) -> None:
    """Copy this rank's part of a whole tensor into a shard. No collective."""
    local_part(target).copy_(whole[region(target)])
