"""Metrics of a model's routing, in torchmetrics' manner: they add up over batches and over ranks.

All of them have one state, so a ``MetricCollection`` of several counts each batch once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_moe.metrics.functional import dead_experts, load_entropy, load_imbalance


class TokensPerExpert(Metric):
    """How many tokens each expert of each layer got, ``[L, E]`` int64: a token counts once for each of its K experts.

    Args:
        num_experts: E.
        num_layers: L. With 1, torchmetrics makes a scalar of what is one number a layer.
        kwargs: What every torchmetrics metric takes.

    Raises:
        ValueError: A number is not positive.

    Example::

        >>> import torch
        >>> from lightning_moe.metrics import TokensPerExpert
        >>> metric = TokensPerExpert(num_experts=4)
        >>> metric.update(torch.tensor([[0, 1], [0, 3], [0, -1]]))
        >>> metric.compute()
        tensor([[3, 1, 0, 1]])

    """

    is_differentiable = False
    higher_is_better: bool | None = None
    full_state_update = False
    slots: Tensor

    def __init__(self, num_experts: int, num_layers: int = 1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if num_experts < 1 or num_layers < 1:
            raise ValueError(
                "Expected arguments `num_experts` and `num_layers` to be positive integers but got"
                f" {num_experts} and {num_layers}."
            )
        self.num_experts, self.num_layers = num_experts, num_layers
        # of each layer, first the slots that go nowhere: an expert's id plus one is its place
        self.add_state("slots", torch.zeros(num_layers * (1 + num_experts), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, ids_TK: Tensor, layer: int = 0) -> None:
        """Count a batch of one layer. Nothing waits for the device.

        Args:
            ids_TK: ``[T, K]`` integer, the experts of T tokens; ``-1`` for a slot that goes nowhere.
            layer: Which of the L layers.

        Raises:
            ValueError: There is no such layer.

        """
        if not 0 <= layer < self.num_layers:
            raise ValueError(f"Expected argument `layer` to lie in 0..{self.num_layers - 1} but got {layer}.")
        places_M = ids_TK.flatten().long() + (1 + layer * (1 + self.num_experts))
        # into a new tensor: one that was made in inference mode could not be changed in training
        self.slots = self.slots.scatter_add(0, places_M, torch.ones_like(places_M))

    def compute(self) -> Tensor:
        """``[L, E]`` int64."""
        return self.counts()

    def counts(self) -> Tensor:
        """``[L, E]`` int64, tokens of each expert."""
        return self.slots.view(self.num_layers, -1)[:, 1:]


class LoadImbalance(TokensPerExpert):
    """The load of the busiest expert over the mean load, ``[L]``: from 1, even, to E, all on one. 0 where there is no token.

    See :func:`~lightning_moe.metrics.load_imbalance` for the formula, and :class:`TokensPerExpert` for the arguments.

    Example::

        >>> metric = LoadImbalance(num_experts=4, num_layers=2)
        >>> metric.update(torch.tensor([[0, 1], [0, 3]]), layer=0)
        >>> metric.update(torch.tensor([[0, 1], [2, 3]]), layer=1)
        >>> metric.compute()
        tensor([2., 1.])

    """

    higher_is_better = False

    def compute(self) -> Tensor:
        """``[L]`` float32."""
        return load_imbalance(self.counts())


class DeadExperts(TokensPerExpert):
    """The number of experts that got no token, ``[L]`` int64. See :class:`TokensPerExpert` for the arguments."""

    higher_is_better = False

    def compute(self) -> Tensor:
        """``[L]`` int64."""
        return dead_experts(self.counts())


class LoadEntropy(TokensPerExpert):
    """The entropy of the load over that of an even one, ``[L]``: from 0, all on one expert, to 1, even.

    See :func:`~lightning_moe.metrics.load_entropy` for the formula, and :class:`TokensPerExpert` for the arguments.
    """

    higher_is_better = True

    def compute(self) -> Tensor:
        """``[L]`` float32."""
        return load_entropy(self.counts())


class DroppedTokens(TokensPerExpert):
    """The number of slots that went to no expert (``-1``), ``[L]`` int64. See :class:`TokensPerExpert` for the arguments."""

    higher_is_better = False

    def compute(self) -> Tensor:
        """``[L]`` int64."""
        return self.slots.view(self.num_layers, -1)[:, 0]
