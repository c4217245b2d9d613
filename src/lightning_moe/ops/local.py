"""From what is distributed to the part of it that lies here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, differentiable; a tensor that is not distributed is its own part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def as_part_of(local: Tensor, whole: Tensor) -> Tensor:
    """This rank's part of a tensor that is distributed as another one is; the inverse of :func:`local_part`."""
    if not isinstance(whole, DTensor):
        return local
    return DTensor.from_local(
        local, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def sharded_parameters(units: Iterable[FSDPModule]) -> Iterator[Any]:
    """What FSDP2 knows of each parameter: beside the one that the module shows there may be a gathered and a sharded one."""
    for unit in units:
        state: Any = unit._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.11 has one at most
        for group in [state._fsdp_param_group] if groups is None else groups:
            yield from [] if group is None else group.fsdp_params


def this_rank(group: dist.ProcessGroup | None = None) -> int:
    """This process's rank in a group, by default in the world; 0 where there is one process."""
    return dist.get_rank(group) if dist.is_initialized() else 0
