"""Giving values to a model that was built on the meta device and sharded there.

No process ever holds more than its shards and one module's own parameters. A module is initialized whole, with the same
random numbers on every rank, and each rank keeps its part: the result does not depend on how the model is sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from lightning_moe.layers import GroupedExperts
from lightning_moe.ops.local import local_part

Initialize = Callable[[nn.Module], object]


@torch.no_grad()
def materialize(model: nn.Module, device: torch.device) -> None:
    """Allocate and initialize every module that has meta tensors; what is real already stays as it is. Collective.

    A module is initialized by Hugging Face's ``_init_weights`` of the model it belongs to, or else by its own
    ``reset_parameters``. Rank 0's random state decides the values.

    Args:
        model: A model that :func:`~lightning_moe.parallel.apply.parallelize` sharded.
        device: Where its tensors go.

    Raises:
        TypeError: A module has parameters or buffers that nothing initializes.

    """
    owners = [(name, module, initialize) for name, module, initialize in _initializers(model) if _has_meta(module)]
    if not owners:
        return
    aliases = _aliases(model)
    real = [
        (module, key, tensor.detach())
        for module in model.modules()
        for key, tensor in _named_tensors(module)
        if not tensor.is_meta
    ]
    model.to_empty(device=device)  # from the root, so that FSDP takes note
    for owner, name, first_owner, first_name in aliases:  # each holder of a tied parameter was given one of its own
        setattr(owner, name, getattr(first_owner, first_name))
    seed = torch.randint(2**31, (1,)).to(device)
    dist.broadcast(seed, 0)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(int(seed.item()))
        for name, module, initialize in owners:
            _initialize_whole(name, module, initialize)
    for module, key, tensor in real:
        local_part(dict(_named_tensors(module))[key]).copy_(local_part(tensor))


def _initializers(model: nn.Module) -> Iterator[tuple[str, nn.Module, Initialize | None]]:
    """Every module that owns tensors, with what initializes it."""

    def visit(
        name: str, module: nn.Module, inherited: Initialize | None
    ) -> Iterator[tuple[str, nn.Module, Initialize | None]]:
        inherited = getattr(module, "_init_weights", inherited)
        if _tensors(module):
            ours = isinstance(module, GroupedExperts) or inherited is None
            yield name, module, _reset if ours and hasattr(module, "reset_parameters") else inherited
        for child_name, child in module.named_children():
            yield from visit(f"{name}.{child_name}" if name else child_name, child, inherited)

    yield from visit("", model, None)


def _reset(module: Any) -> None:
    module.reset_parameters()


def _has_meta(module: nn.Module) -> bool:
    return any(tensor.is_meta for tensor in _tensors(module))


def _initialize_whole(name: str, module: nn.Module, initialize: Initialize | None) -> None:
    """Initialize a module with whole tensors in place of its shards, then keep this rank's part of them."""
    shards = {
        key: parameter for key, parameter in module.named_parameters(recurse=False) if isinstance(parameter, DTensor)
    }
    for key, shard in shards.items():
        whole = torch.empty(shard.shape, dtype=shard.dtype, device=shard.device)
        module._parameters[key] = nn.Parameter(whole, requires_grad=shard.requires_grad)
    for tensor in _tensors(module):
        tensor.fill_(_unset(tensor.dtype))
    if initialize is not None:
        initialize(module)
    left = [key for key, tensor in _named_tensors(module) if _looks_unset(tensor)]
    if left:
        raise TypeError(
            f"{f'`{name}`' if name else 'The model itself'} (`{type(module).__name__}`) was built on the meta device, but"
            f" nothing initializes its {', '.join(map(repr, left))}. Give the module a `reset_parameters()` method, or build"
            " it on a real device."
        )
    for key, shard in shards.items():
        whole = module.get_parameter(key).detach()
        mine = distribute_tensor(whole, shard.device_mesh, shard.placements, src_data_rank=None)
        shard.to_local().copy_(mine.to_local())
        module._parameters[key] = shard


def _unset(dtype: torch.dtype) -> float | int | bool:
    """A value that no initialization leaves behind (of a bool there is none: it is taken as it comes)."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return False if dtype == torch.bool else torch.iinfo(dtype).max


def _looks_unset(tensor: Tensor) -> bool:
    if tensor.dtype == torch.bool or tensor.numel() == 0:
        return False
    value = _unset(tensor.dtype)
    return bool((tensor.isnan() if value != value else tensor == value).any())


def _aliases(model: nn.Module) -> list[tuple[nn.Module, str, nn.Module, str]]:
    """Parameters that several modules share: each further holder, and the first."""
    first: dict[int, tuple[nn.Module, str]] = {}
    aliases = []
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) in first:
                aliases.append((module, name, *first[id(parameter)]))
            first.setdefault(id(parameter), (module, name))
    return aliases


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters and buffers that a module owns itself."""
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)


def _tensors(module: nn.Module) -> list[Tensor]:
    return [tensor for _, tensor in _named_tensors(module)]
