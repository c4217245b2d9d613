"""One total norm over gradients that live on different meshes, and clipping by it.

``torch.nn.utils.clip_grad_norm_`` cannot stack norms across meshes. Here the gradients of one layout (mesh and placements)
are summed locally first, then one scalar a layout is all-reduced over each axis that shards it: as many collectives as
layouts, whatever the number of parameters, and the same on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_moe.ops.local import local_part


@torch.no_grad()
def total_grad_norm(parameters: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
    """The norm of all gradients as one vector: dense shards counted once, experts once per EP and EDP shard.

    Collective: every rank calls it with the same parameters.

    Args:
        parameters: Parameters whose ``grad`` is taken; one without a gradient counts as zero.
        norm_type: The p of the norm; ``inf`` for the largest absolute value.

    Returns:
        A scalar tensor, float32 (float64 where a parameter is), the same on every rank.

    """
    by_layout: dict[object, list[Tensor]] = {}
    for parameter in [parameters] if isinstance(parameters, Tensor) else parameters:
        by_layout.setdefault(_layout(parameter), []).append(parameter)
    totals = [_layout_total(members, norm_type) for members in by_layout.values()]
    if not totals:
        return torch.tensor(0.0)
    total = torch.stack(totals)
    return total.max() if norm_type == float("inf") else total.sum().pow(1.0 / norm_type)


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale all gradients by one factor so that their total norm is at most ``max_norm``.

    The factor is ``min(1, max_norm / (norm + 1e-6))``, as in ``torch.nn.utils.clip_grad_norm_``. Collective.

    Args:
        parameters: Parameters whose ``grad`` is scaled in place.
        max_norm: The largest norm allowed.
        norm_type: See :func:`total_grad_norm`.
        error_if_nonfinite: Raise if the norm is NaN or infinite.

    Returns:
        The norm before clipping.

    Raises:
        RuntimeError: The norm is not finite and ``error_if_nonfinite`` is set.

    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    norm = total_grad_norm(parameters, norm_type)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(
            f"The total norm of order {norm_type} of the gradients is {norm.item()}, so they cannot be clipped."
            " Pass `error_if_nonfinite=False` to clip all the same."
        )
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            local_part(parameter.grad).mul_(factor.to(parameter.grad.dtype))
    return norm


def _layout(tensor: Tensor) -> object:
    if isinstance(tensor, DTensor):
        return tensor.device_mesh, tensor.placements
    return None


def _layout_total(members: list[Tensor], norm_type: float) -> Tensor:
    """The sum of ``|g|^p`` (the largest ``|g|`` for inf) over parameters of one layout, on all their ranks."""
    first = members[0]
    dtype = torch.float64 if any(member.dtype == torch.float64 for member in members) else torch.float32
    gradients = [local_part(member.grad) for member in members if member.grad is not None]
    norms = [torch.linalg.vector_norm(gradient, norm_type, dtype=dtype) for gradient in gradients if gradient.numel()]
    norms.append(
        torch.zeros((), dtype=dtype, device=local_part(first).device)
    )  # a rank may hold nothing of this layout
    is_inf = norm_type == float("inf")
    total = torch.stack(norms).max() if is_inf else torch.stack(norms).pow(norm_type).sum()
    if isinstance(first, DTensor):
        for axis, placement in enumerate(first.placements):
            if not placement.is_replicate():
                group = first.device_mesh.get_group(axis)
                if is_inf:
                    largest = torch.stack([total.nan_to_num(nan=0.0, posinf=torch.inf), total.isnan().to(dtype)])
                    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)  # MAX alone may lose a NaN
                    total = torch.where(largest[1] > 0, torch.nan, largest[0])
                else:
                    dist.all_reduce(total, group=group)
    return total
