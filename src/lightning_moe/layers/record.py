"""What the routers of a model decided in a forward, and who watches it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_moe.layers.moe import MoELayer
from lightning_moe.layers.router import Routing, ScoreFunction, router_scores


class RoutingRecord(NamedTuple):
    """One layer's decision in one forward.

    Args:
        name: The layer's name in the model.
        routing: Of T tokens; logits and weights with their graph.
        shape: Of the tokens in the batch: ``[B, S]`` for B sequences of S tokens, ``T = B S``.
        score_function: What makes the router's scores of its logits.
        in_training: Whether the router was to learn from it: in training mode, with parameters that are trained.

    """

    name: str
    routing: Routing
    shape: torch.Size
    score_function: ScoreFunction
    in_training: bool = False

    @property
    def top_k(self) -> int:
        """K."""
        return self.routing.ids_TK.shape[1]

    def scores(self) -> Tensor:
        """``[T, E]``, float32: the router's scores, scaled to sum to one where they do not."""
        scores_TE = router_scores(self.routing.logits_TE, self.score_function)
        if self.score_function == "softmax":
            return scores_TE
        return scores_TE / (scores_TE.sum(-1, keepdim=True) + 1e-20)


def moe_layers(model: nn.Module) -> dict[str, MoELayer]:
    """The MoE layers of a model, by name, in order.

    Raises:
        ValueError: It has none.

    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, MoELayer)}
    if not layers:
        raise ValueError(
            f"`{type(model).__name__}` has no MoE layer to watch. Layers are `lightning_moe.MoELayer`s, and what"
            " `ChunkedEPStrategy` makes of a Hugging Face model's blocks when it sets the model up; under another strategy,"
            " call `lightning_moe.models.swap_blocks(model)` first."
        )
    return layers


@contextmanager
def record_routing(model: nn.Module) -> Iterator[list[RoutingRecord]]:
    """Record what the routers decide in the forwards that run inside.

    The records hold the logits with their graph, so drop them with the loss: a local variable of ``training_step`` is right.

    Args:
        model: Any module with MoE layers in it: a ``LightningModule``, what ``fabric.setup`` returned, a single layer.

    Yields:
        A list that fills up, a record for each layer and forward.

    Raises:
        ValueError: The model has no MoE layer.

    Example::

        >>> from lightning_moe import GroupedExperts, MoELayer, TopKRouter, load_balancing_loss
        >>> layer = MoELayer(TopKRouter(16, num_experts=4, top_k=2), GroupedExperts(4, 16, 32))
        >>> with record_routing(layer) as routing:
        ...     out = layer(torch.randn(2, 5, 16))
        >>> loss = out.square().mean() + 0.01 * load_balancing_loss(routing)
        >>> loss.backward()

    """
    records: list[RoutingRecord] = []

    def watch(name: str, layer: MoELayer) -> torch.utils.hooks.RemovableHandle:
        return layer.register_routing_hook(
            lambda layer, routing, shape: records.append(
                RoutingRecord(name, routing, shape, layer.score_function, _is_in_training(layer))
            )
        )

    handles = [watch(name, layer) for name, layer in moe_layers(model).items()]
    try:
        yield records
    finally:
        for handle in handles:
            handle.remove()


def _is_in_training(layer: MoELayer) -> bool:
    """See :class:`RoutingRecord`. A router goes by several names, or is the layer itself."""
    return layer.training and any(
        parameter.requires_grad
        for name, parameter in layer.named_parameters()
        if not name.startswith(("experts.", "shared_experts."))
    )
