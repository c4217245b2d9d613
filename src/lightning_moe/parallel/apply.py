"""A model in, an expert-parallel model out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DataParallel, DistributedDataParallel

from lightning_moe.dispatch import Choice
from lightning_moe.layers import GroupedExperts, MoELayer
from lightning_moe.models import FAMILIES, Block, swap_blocks
from lightning_moe.parallel.mesh import MoEMesh
from lightning_moe.recompute import RecomputePolicy

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True)
class Parallelism:
    """How a model is run.

    Args:
        mesh: The ranks.
        dispatcher: What moves tokens between them.
        num_chunks: Chunks of the local tokens in each MoE layer.
        recompute: What backward recomputes.
        param_dtype: The dtype that parameters are all-gathered and computed in; ``None`` for their own.
        reshard_after_forward: Free a layer's gathered parameters after its forward and gather them again in backward.

    """

    mesh: MoEMesh
    dispatcher: Choice
    num_chunks: int = 1
    recompute: RecomputePolicy = field(default_factory=RecomputePolicy)
    param_dtype: torch.dtype | None = None
    reshard_after_forward: bool = True


def find_blocks(model: nn.Module) -> list[Block]:
    """Swap the model's MoE blocks for layers and list them; nothing is sharded yet, and no collective runs.

    Raises:
        TypeError: The model is already wrapped or sharded by something else.
        ValueError: It has no MoE block that this package knows.

    """
    refuse_wrapped(model)
    blocks = swap_blocks(model)
    if not blocks:
        families = ", ".join(sorted({name.rpartition(".")[2] for name in FAMILIES}))
        raise ValueError(
            f"No mixture-of-experts block was found in `{type(model).__name__}`. Known blocks: `lightning_moe.MoELayer` and"
            f" Hugging Face's {families}. Build the model from one of them; a model without experts needs no expert"
            " parallelism, so use Lightning's own `FSDPStrategy` or `ModelParallelStrategy` for it."
        )
    return blocks


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


def parallelize(roots: Iterable[nn.Module], blocks: list[Block], how: Parallelism) -> None:
    """Shard a model in place.

    Experts go on dim 0 over the expert-parallel ranks, then with FSDP2 over the ranks that hold the same experts. Everything
    else goes with FSDP2 over the world, one unit a decoder layer, then one for each root. Every parameter ends as a DTensor.

    Args:
        roots: The modules whose ``forward`` is called from outside; together they hold all parameters.
        blocks: The MoE layers in them, from :func:`find_blocks`.
        how: The parallelism.

    """
    precision = MixedPrecisionPolicy(param_dtype=how.param_dtype, reduce_dtype=_reduce_dtype(blocks))
    roots = list(roots)
    for block in blocks:
        experts = block.layer.experts
        # The loss is the mean over the world, so a gradient is the world's sum divided by its size. An expert's gradient
        # arrives as the sum over its expert-parallel peers' tokens, and FSDP averages it over the expert-data-parallel ranks.
        scale = 1.0 / how.dispatcher.dispatcher.size
        experts.distribute(how.dispatcher.dispatcher, how.num_chunks, how.recompute.routed, scale)
        _shard_experts(experts, how, precision)
    for root in roots:
        for unit in decoder_layers(root):
            fully_shard(unit, mesh=how.mesh.world, mp_policy=precision, reshard_after_forward=how.reshard_after_forward)
    for root in roots:
        if not isinstance(root, FSDPModule):
            # the root is needed again at once in backward: resharding it would only gather it twice
            fully_shard(root, mesh=how.mesh.world, mp_policy=precision, reshard_after_forward=False)
        root.register_forward_hook(_reshard_if_no_backward_comes)


def decoder_layers(root: nn.Module) -> list[nn.Module]:
    """The modules that are gathered and freed as one: items of the module lists in which MoE layers live.

    All items of such a list count, those without experts too.
    """
    layers: list[nn.Module] = []
    _collect_decoder_layers(root, layers)
    return layers


def call_roots(module: nn.Module) -> list[nn.Module]:
    """The outermost modules below ``module`` that own parameters and have a ``forward``: containers are looked into."""
    roots = []
    for child in module.children():
        if isinstance(child, _CONTAINERS):
            roots += call_roots(child)
        elif next(child.parameters(), None) is not None:
            roots.append(child)
    return roots


def _collect_decoder_layers(module: nn.Module, layers: list[nn.Module]) -> None:
    for child in module.children():
        if not _has_moe(child):
            continue
        is_list = isinstance(child, (*_CONTAINERS, nn.Sequential))
        if is_list and not all(isinstance(item, _CONTAINERS) for item in child.children()):
            layers.extend(item for item in child.children() if next(item.parameters(), None) is not None)
        else:
            _collect_decoder_layers(child, layers)


def _has_moe(module: nn.Module) -> bool:
    return any(isinstance(child, MoELayer) for child in module.modules())


def _shard_experts(experts: GroupedExperts, how: Parallelism, precision: MixedPrecisionPolicy) -> None:
    ep_mesh = how.mesh.expert_parallel
    device = torch.device(ep_mesh.device_type, torch.cuda.current_device()) if ep_mesh.device_type == "cuda" else "cpu"
    num_local = experts.num_experts // ep_mesh.size()
    first = ep_mesh.get_local_rank() * num_local
    for name, parameter in list(experts.named_parameters(recurse=False)):
        mine = parameter.detach()[first : first + num_local]
        mine = mine.clone() if mine.is_meta else mine.to(device, copy=True)  # a view would keep all experts alive
        shard = DTensor.from_local(mine, ep_mesh, [Shard(0)], run_check=False)
        setattr(experts, name, nn.Parameter(shard, requires_grad=parameter.requires_grad))
    fully_shard(
        experts,
        mesh=how.mesh.expert_data_parallel,
        # the layer casts its own inputs, so that routing weights stay in float32
        mp_policy=MixedPrecisionPolicy(precision.param_dtype, precision.reduce_dtype, cast_forward_inputs=False),
        shard_placement_fn=lambda shard: _edp_placement(shard, how.mesh),
        reshard_after_forward=how.reshard_after_forward,
    )


def _edp_placement(weight: nn.Parameter, mesh: MoEMesh) -> Shard:
    """The dim that FSDP cuts expert weights on: not dim 0 where another will do, so that both shardings stay plain ones."""
    num_shards = mesh.expert_data_parallel.size()
    for dim in (1, 2):
        if weight.shape[dim] % num_shards == 0:
            return Shard(dim)
    if mesh.expert_parallel.size() == 1:
        return Shard(0)  # uneven shards are fine here
    raise ValueError(
        f"Expert weights of shape {tuple(weight.shape)} cannot be shared out evenly between {num_shards} expert-data-parallel"
        f" ranks: neither of the last two sizes is divisible by {num_shards}. Choose another `expert_parallel_size`: there are"
        f" {mesh.world.size()} ranks, and expert-data-parallel ranks are that number divided by it."
    )


def _reshard_if_no_backward_comes(root: nn.Module, *_: object) -> None:
    """After an evaluation's forward, too, every parameter is a DTensor again."""
    if not torch.is_grad_enabled() and isinstance(root, FSDPModule):
        root.reshard()


def _reduce_dtype(blocks: list[Block]) -> torch.dtype:
    """Gradients are reduced in float32, whatever dtype they were computed in (float64 stays float64)."""
    dtype = blocks[0].layer.experts.gate_up_proj.dtype
    return torch.float64 if dtype == torch.float64 else torch.float32
