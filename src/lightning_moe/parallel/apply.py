"""A model in, an expert-parallel model out."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_leaves

from lightning_moe.dispatch import Choice
from lightning_moe.layers import GroupedExperts, MoELayer
from lightning_moe.models import FAMILIES, Block, swap_blocks
from lightning_moe.overlap.gradient_sums import GradientSum
from lightning_moe.parallel.checks import edp_dim, refuse_wrapped
from lightning_moe.parallel.mesh import MoEMesh
from lightning_moe.parallel.recompute import recompute_in_backward
from lightning_moe.parallel.units import decoder_layers, sharded_modules, unreplicated_experts
from lightning_moe.recompute import RecomputePolicy


@dataclass(frozen=True)
class Parallelism:
    """How a model is run.

    Args:
        mesh: The ranks.
        dispatcher: What moves tokens between them.
        num_chunks: Chunks of the local tokens in each MoE layer.
        recompute: What backward recomputes.
        param_dtype: The dtype that parameters are all-gathered and computed in; ``None`` for their own. Experts that are not
            gathered are converted to it in each forward and backward.
        reshard_after_forward: Free a layer's gathered parameters after its forward and gather them again in backward.

    """

    mesh: MoEMesh
    dispatcher: Choice
    num_chunks: int
    recompute: RecomputePolicy
    param_dtype: torch.dtype | None
    reshard_after_forward: bool


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


def parallelize(roots: Iterable[nn.Module], blocks: list[Block], how: Parallelism) -> None:
    """Shard a model in place.

    Experts go on dim 0 over the expert-parallel ranks, then with FSDP2 over the ranks that hold the same experts, if several
    do. Everything else goes with FSDP2 over the world, one unit a decoder layer, then one for each root. Every parameter ends
    as a DTensor.

    Args:
        roots: The modules whose ``forward`` is called from outside; together they hold all parameters.
        blocks: The MoE layers in them, from :func:`find_blocks`.
        how: The parallelism.

    """
    roots = list(roots)
    precision = MixedPrecisionPolicy(param_dtype=how.param_dtype, reduce_dtype=_reduce_dtype(blocks))
    for experts in (block.layer.experts for block in blocks):
        # The loss is the mean over the world, so a gradient is the world's sum divided by its size. An expert's gradient
        # arrives as the sum over its expert-parallel peers' tokens, and FSDP averages it over the expert-data-parallel ranks,
        # if there are several.
        scale = 1.0 / how.dispatcher.dispatcher.size
        experts.distribute(how.dispatcher.dispatcher, how.num_chunks, how.recompute.routed, scale, how.param_dtype)
        _shard_experts(experts, how, precision)
    alone = {
        parameter for root in roots for experts in unreplicated_experts(root) for parameter in experts.parameters()
    }
    shard = partial(fully_shard, mesh=how.mesh.world, mp_policy=precision, ignored_params=alone)
    for root in roots:
        for unit in decoder_layers(root):
            shard(unit, reshard_after_forward=how.reshard_after_forward)
    for root in roots:
        if not isinstance(root, FSDPModule):
            # the root is needed again at once in backward: resharding it would only gather it twice
            shard(root, reshard_after_forward=False)
        for unit in decoder_layers(root) or [root]:
            _gather_for_router_losses(unit)
        root.register_forward_hook(_reshard_if_no_backward_comes)
        root.register_forward_hook(partial(_hand_over_after_backward, unreplicated_experts(root)))
        _leave_inference_mode(root)
    recompute_in_backward(roots, how.recompute)


def _shard_experts(experts: GroupedExperts, how: Parallelism, precision: MixedPrecisionPolicy) -> None:
    ep_mesh = how.mesh.expert_parallel
    device = torch.device(ep_mesh.device_type, torch.cuda.current_device()) if ep_mesh.device_type == "cuda" else "cpu"
    num_shards = how.mesh.expert_data_parallel.size()
    num_local = experts.num_experts // ep_mesh.size()
    first = ep_mesh.get_local_rank() * num_local
    for name, parameter in list(experts.named_parameters(recurse=False)):
        mine = parameter.detach()[first : first + num_local]
        mine = mine.clone() if mine.is_meta else mine.to(device, copy=True)  # a view would keep all experts alive
        shard = DTensor.from_local(mine, ep_mesh, [Shard(0)], run_check=False)
        setattr(experts, name, nn.Parameter(shard, requires_grad=parameter.requires_grad))
    if num_shards == 1:  # gathering and reducing on one rank would copy all weights and gradients for nothing
        experts.gradient_sums = GradientSum(), GradientSum()
        return
    fully_shard(
        experts,
        mesh=how.mesh.expert_data_parallel,
        # the layer casts its own inputs, so that routing weights stay in float32
        mp_policy=MixedPrecisionPolicy(precision.param_dtype, precision.reduce_dtype, cast_forward_inputs=False),
        shard_placement_fn=lambda weight: Shard(edp_dim(weight.shape, num_shards)),
        reshard_after_forward=how.reshard_after_forward,
    )


def _gather_for_router_losses(unit: nn.Module) -> None:
    """Let the backward of a loss on routers' logits alone gather a unit's parameters; FSDP2 looks at its outputs only."""
    state = fully_shard.state(unit)  # type: ignore[attr-defined]
    for module in unit.modules():
        if isinstance(module, MoELayer):
            module.register_routing_hook(lambda _, routing, __: state._register_pre_backward_hook(routing.logits_TE))


def _reshard_if_no_backward_comes(root: nn.Module, *_: object) -> None:
    if not torch.is_grad_enabled():
        reshard(root)


def _hand_over_after_backward(experts: list[GroupedExperts], _module: nn.Module, _args: object, output: object) -> None:
    """Have experts that a backward did not reach hand over what they hold of earlier micro-batches, at that backward's end."""

    def hand_over() -> None:
        for one in experts:
            one.hand_over_gradients()

    def at_the_end(_: object) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(hand_over)

    for leaf in tree_leaves(output) if experts else ():
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            leaf.register_hook(at_the_end)  # type: ignore[no-untyped-call]


def _leave_inference_mode(root: nn.Module) -> None:
    """Run the root's forward under ``no_grad`` where it is called in inference mode.

    FSDP2 allocates what it gathers into once, in the first forward; an inference tensor could never be trained with.
    """
    entered: list[ExitStack] = []

    def before(*_: object) -> None:
        stack = ExitStack()
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
        entered.append(stack)

    def after(*_: object) -> None:
        entered.pop().close()

    root.register_forward_pre_hook(before, prepend=True)
    root.register_forward_hook(after, always_call=True)


def reshard(module: nn.Module) -> None:
    """Give gathered parameters back: every parameter of the module is a DTensor again, and the next forward gathers anew.

    To be called where no backward is due: after an evaluation, and after a step, since copies gathered before it are stale.
    """
    for submodule in sharded_modules(module):
        submodule.reshard()


def _reduce_dtype(blocks: list[Block]) -> torch.dtype:
    """Gradients are reduced in float32, whatever dtype they were computed in (float64 stays float64)."""
    dtype = blocks[0].layer.experts.gate_up_proj.dtype
    return torch.float64 if dtype == torch.float64 else torch.float32
