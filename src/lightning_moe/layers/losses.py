"""Losses on what routers decide, to be added to a model's own.

They are computed from what :func:`~lightning_moe.layers.record_routing` recorded, once on the whole local batch. They are plain
tensors: a mean over ranks, accumulation, precision and recompute treat them as the loss that they are added to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_moe.layers.record import RoutingRecord

Scope = Literal["batch", "sequence", "global"]


def load_balancing_loss(routing: Sequence[RoutingRecord], scope: Scope = "batch", mask: Tensor | None = None) -> Tensor:
    r"""The load-balancing auxiliary loss, the mean over layers. It is 1 where the load is even, and E / K at worst.

    .. math::

        L = \sum_{i=1}^{E} f_i P_i, \quad
        f_i = \frac{E}{K N} \sum_{t=1}^{N} 1(s_{i,t} \in \mathrm{TopK}_j\, s_{j,t}), \quad
        P_i = \frac{1}{N} \sum_{t=1}^{N} \frac{s_{i,t}}{\sum_j s_{j,t}}

    (Switch Transformer, equations 4 to 6, for K experts a token; with ``scope="sequence"`` the DeepSeek-V3 technical report's
    equations 17 to 20.) ``s`` are the router's scores, so a selection bias and groups of experts play no part. Hugging Face's
    ``load_balancing_loss_func`` is K times this for one layer; of several it multiplies the means of ``f`` and of ``P``.

    Args:
        routing: What was recorded.
        scope: The N tokens that are to be balanced: ``"batch"``, those of this rank's micro-batch; ``"sequence"``, those of
            each sequence, and the mean over these; ``"global"``, those of all ranks' micro-batches. ``"sequence"`` alone is
            the same however a batch is cut into micro-batches. With ``"global"`` a rank gets its own part of the loss: the
            mean over ranks is the loss.
        mask: ``[B, S]``, or any shape of as many tokens: zero for padding, which does not count.

    Returns:
        A scalar, float32 (float64 for float64 logits). ``"global"`` is a collective call with one all-reduce for all layers.

    Raises:
        ValueError: Nothing was recorded, the scope is unknown or asks for sequences where there are none, or the mask has
            another number of tokens; and, where gradients are wanted, a layer was in training mode but its forward ran without
            a graph.

    """
    if scope not in get_args(Scope):
        names = ", ".join(map(repr, get_args(Scope)))
        raise ValueError(f"Expected argument `scope` to be one of {names} but got {scope!r}.")
    _check(routing, mask)
    if scope == "sequence" and (flat := [record.name for record in routing if len(record.shape) != 2]):
        raise ValueError(
            f"`scope='sequence'` needs tokens [B, S, H], but `{flat[0]}` was called with another shape. Call the layer with"
            " sequences, or choose another scope."
        )
    layers = [_GroupSums(record, record.shape[0] if scope == "sequence" else 1, mask) for record in routing]
    world_size = 1
    if scope == "global" and dist.is_available() and dist.is_initialized():
        world_size = dist.get_world_size()
        mine = [torch.cat([layer.counts_GE[0], layer.tokens_G]) for layer in layers]
        packed = torch.cat(mine)
        dist.all_reduce(packed)
        for layer, total in zip(layers, torch.split(packed, [len(part) for part in mine]), strict=True):
            layer.counts_GE, layer.tokens_G = total[None, :-1], total[-1:]
    return torch.stack([layer.loss(world_size) for layer in layers]).mean()


def router_z_loss(routing: Sequence[RoutingRecord], mask: Tensor | None = None) -> Tensor:
    r"""The router z-loss, the mean over layers; it keeps logits small.

    .. math::

        L = \frac{1}{N} \sum_{t=1}^{N} \Big(\log \sum_{i=1}^{E} e^{x_{i,t}}\Big)^2

    (ST-MoE, equation 5.)

    Args:
        routing: What was recorded.
        mask: As in :func:`load_balancing_loss`.

    Returns:
        A scalar, float32 (float64 for float64 logits).

    Raises:
        ValueError: Nothing was recorded, or the mask has another number of tokens; and, where gradients are wanted, as above.

    """
    _check(routing, mask)
    losses = []
    for record in routing:
        record, kept_T = _masked(record, mask)
        logits_TE = record.routing.logits_TE
        squares_T = (logits_TE if logits_TE.dtype == torch.float64 else logits_TE.float()).logsumexp(-1).square()
        losses.append((squares_T * kept_T).sum() / kept_T.sum().clamp(min=1))
    return torch.stack(losses).mean()


class _GroupSums:
    """Counts and sums of scores over each group of N tokens: what the loss is made of."""

    def __init__(self, record: RoutingRecord, num_groups: int, mask: Tensor | None) -> None:
        record, kept_T = _masked(record, mask)
        scores_TE = record.scores()
        self.top_k, self.num_experts, self.num_groups = record.top_k, scores_TE.shape[1], max(num_groups, 1)
        ids_TK = scores_TE.detach().topk(self.top_k, dim=-1)[1]
        shape = self.num_groups, len(kept_T) // self.num_groups
        self.tokens_G = kept_T.view(shape).sum(1)
        self.sums_GE = (scores_TE * kept_T[:, None]).view(*shape, self.num_experts).sum(1)
        first_T = (torch.arange(self.num_groups, device=ids_TK.device) * self.num_experts).repeat_interleave(shape[1])
        counts = torch.zeros(self.num_groups * self.num_experts, dtype=torch.int64, device=ids_TK.device)
        counts.scatter_add_(0, (ids_TK + first_T[:, None]).flatten(), kept_T.repeat_interleave(self.top_k))
        self.counts_GE = counts.view(self.num_groups, self.num_experts)

    def loss(self, world_size: int) -> Tensor:
        tokens_G1 = self.tokens_G[:, None].clamp(min=1)
        counts_GE = self.counts_GE.to(self.sums_GE.dtype)  # a number times integers would have the default dtype
        load_GE = counts_GE * (self.num_experts / self.top_k) / tokens_G1
        return (load_GE * (self.sums_GE * world_size / tokens_G1)).sum() / self.num_groups


def _masked(record: RoutingRecord, mask: Tensor | None) -> tuple[RoutingRecord, Tensor]:
    """The record with logits 0 for a token that does not count, and ``[T]`` int64: 1 for one that does.

    What stands at padding may be NaN, and zero times that would be as well, in the loss and in every gradient.
    """
    logits_TE = record.routing.logits_TE
    if mask is None:
        return record, torch.ones(len(logits_TE), dtype=torch.int64, device=logits_TE.device)
    is_kept_T = mask.reshape(-1).to(logits_TE.device) != 0
    routing = record.routing._replace(logits_TE=torch.where(is_kept_T[:, None], logits_TE, 0))
    return record._replace(routing=routing), is_kept_T.long()


def _check(routing: Sequence[RoutingRecord], mask: Tensor | None) -> None:
    if not routing:
        raise ValueError(
            "Nothing was recorded. Run the forward inside `with record_routing(model) as routing:`, then compute the losses."
        )
    for record in routing:
        if record.in_training and torch.is_grad_enabled() and not record.routing.logits_TE.requires_grad:
            raise ValueError(
                f"`{record.name or 'MoELayer'}` was recorded in training mode, but without a graph: its router would learn"
                " nothing. Where the forward runs in `torch.utils.checkpoint`, pass `use_reentrant=False`; where no gradient"
                " is wanted, compute the loss under `torch.no_grad()` too."
            )
        if mask is not None and mask.numel() != record.shape.numel():
            raise ValueError(
                f"Expected argument `mask` to have as many tokens as the batch, {list(record.shape)}, but got one of shape"
                f" {list(mask.shape)}."
            )
