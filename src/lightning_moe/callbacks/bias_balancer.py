"""Balancing the experts' load by a bias of the selection, without an auxiliary loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from lightning_moe.callbacks.routing import LayerCounts, RoutingCallback
from lightning_moe.layers import MoELayer, Routing


class RouterBiasBalancer(RoutingCallback):
    r"""Auxiliary-loss-free load balancing: after a step, an expert with too many tokens is made a little less eligible.

    .. math::

        b_i \leftarrow b_i + \gamma \, \mathrm{sign}\Big(\frac{1}{E} \sum_j c_j - c_i\Big)

    (DeepSeek-V3 technical report, section 2.1.2.) ``c`` are the tokens of each expert since the last step, over all ranks and
    micro-batches; ``b`` is the router's ``selection_bias``, which takes part in the choice of experts and not in their weights.
    Forwards in eval mode do not count, and optimizers that train other models move nothing.

    ``Trainer(callbacks=[RouterBiasBalancer()])`` and ``Fabric(callbacks=[RouterBiasBalancer()])`` are enough, under any
    strategy. In a loop of one's own, call :meth:`update` after each optimizer step, inside ``with balancer.watch(model):``.
    The bias is a buffer of the model, so a checkpoint of the model has all there is to keep.

    Args:
        update_speed: :math:`\gamma`. The report trains with 0.001, and with 0 towards the end; it may be set at any time.

    Raises:
        ValueError: The speed is negative.

    """

    def __init__(self, update_speed: float = 1e-3) -> None:
        super().__init__()
        if update_speed < 0:
            raise ValueError(f"Expected argument `update_speed` not to be negative but got {update_speed}.")
        self.update_speed = update_speed

    @override
    def find(self, model: nn.Module) -> Mapping[str, MoELayer]:
        layers = {name: layer for name, layer in super().find(model).items() if layer.selection_bias is not None}
        if not layers:
            raise ValueError(
                f"`{type(self).__name__}` found no router with a `selection_bias`. Build routers with"
                " `TopKRouter(..., selection_bias=True)`, or remove the callback."
            )
        return layers

    @override
    def begin(self, layers: Mapping[str, MoELayer]) -> None:
        self._layers = layers
        self._counts = LayerCounts(self._layers)

    @override
    def see(self, name: str, layer: MoELayer, routing: Routing) -> None:
        if layer.training:
            self._counts.add(name, routing.ids_TK)

    @torch.no_grad()
    def update(self) -> None:
        """Move the biases by what was counted since the last call. All ranks call it; nothing waits for the device."""
        if self._model is None:
            return
        for name, slots in self._counts.over_ranks().items():
            counts_E, bias_E = slots[1:], self._layers[name].selection_bias
            assert bias_E is not None
            below_E = (counts_E.sum() - len(counts_E) * counts_E).sign()  # in integers: no rounding decides
            bias_E.add_(below_E.to(bias_E), alpha=self.update_speed)
        self._counts.reset()

    @override
    def on_before_optimizer_step(self, *_: Any) -> None:
        self.update()

    def on_after_optimizer_step(self, strategy: Any, optimizer: Any) -> None:
        """Fabric calls it."""
        if self._concerns(optimizer):
            self.update()
