"""What cannot be parallelized is refused here, before anything is changed and before any collective."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

from lightning_moe.layers import GroupedExperts
from lightning_moe.models import Block
from lightning_moe.parallel.units import decoder_layers


def refuse_wrapped(model: nn.Module) -> None:
    """Raise a ``TypeError`` if somebody else wrapped or sharded the model, or a part of it."""
    for name, module in model.named_modules():
        where = f"`{name}`" if name else "the model"
        if isinstance(module, (DistributedDataParallel, DataParallel, FullyShardedDataParallel, FSDPModule)):
            wrapper = "fully_shard (FSDP2)" if isinstance(module, FSDPModule) else type(module).__name__
            raise TypeError(
                f"{where} is already wrapped by {wrapper}. The strategy shards the model itself: pass it as it was before."
            )
        if isinstance(module, torch._dynamo.OptimizedModule):
            raise TypeError(f"{where} was compiled with `torch.compile`, which is not supported. Pass it uncompiled.")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise TypeError(f"The parameter `{name}` is already a DTensor. Pass the model before it is distributed.")


def refuse_mixed_dtypes(roots: Iterable[nn.Module]) -> None:
    """Raise a ``TypeError`` if parameters that are gathered as one, and trained, have several dtypes."""
    for root in roots:
        layers = decoder_layers(root)
        for unit in (*layers, root):
            apart = {id(parameter) for layer in layers if layer is not unit for parameter in layer.parameters()}
            apart |= {
                id(p) for module in unit.modules() if isinstance(module, GroupedExperts) for p in module.parameters()
            }
            by_dtype: dict[torch.dtype, str] = {}
            for name, parameter in unit.named_parameters():
                if parameter.requires_grad and id(parameter) not in apart:
                    by_dtype.setdefault(parameter.dtype, name)
            if len(by_dtype) > 1:
                examples = ", ".join(f"`{name}` in {dtype}" for dtype, name in by_dtype.items())
                raise TypeError(
                    f"Trainable parameters of one `{type(unit).__name__}` have several dtypes ({examples}), but they are"
                    " gathered as one. Convert them to one dtype; to compute in bfloat16 and keep weights in float32, use"
                    " `precision='bf16-mixed'`."
                )


def refuse_sizes(blocks: Iterable[Block], expert_parallel_size: int, world_size: int) -> None:
    """Raise a ``ValueError`` if the weights of experts cannot be shared out between the ranks that hold the same ones."""
    num_shards = world_size // expert_parallel_size
    for block in blocks:
        for weight in block.layer.experts.parameters():
            if edp_dim(weight.shape, num_shards) or expert_parallel_size == 1:
                continue
            fitting = [
                size
                for size in range(1, world_size + 1)
                if world_size % size == weight.shape[0] % size == 0
                and (size == 1 or edp_dim(weight.shape, world_size // size))
            ]
            raise ValueError(
                f"`expert_parallel_size={expert_parallel_size}` leaves {num_shards} ranks to share out expert weights of shape"
                f" {tuple(weight.shape)} between them, but {num_shards} divides neither of the last two sizes. Sizes that fit"
                f" this model and {world_size} processes: {', '.join(map(str, fitting))}."
            )


def edp_dim(shape: torch.Size, num_shards: int) -> int:
    """The dim that FSDP cuts expert weights on: the first behind dim 0 that divides, so that both shardings stay plain ones.

    Dim 0 where none divides: there FSDP takes uneven shards, but only beside an expert-parallel size of 1.
    """
    return next((dim for dim in (1, 2) if shape[dim] % num_shards == 0), 0)
