"""A mixture-of-experts layer, from a token's point of view."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, MutableMapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_moe.layers.experts import GroupedExperts
from lightning_moe.layers.router import Routing, ScoreFunction
from lightning_moe.recompute.backward import in_backward

RoutingHook: TypeAlias = Callable[["MoELayer", Routing, torch.Size], object]
"""Called with the layer, its decision for T tokens, and the shape that these have in the batch, ``[B, S]`` say."""


class MoELayer(nn.Module):
    """Route each token to its experts, add up what they say, add the shared experts.

    It works as it stands on one process; a strategy shards its experts and leaves the rest to data parallelism.

    Args:
        router: A module from tokens ``[T, H]`` to a :class:`Routing` (or a tuple in that order).
        experts: The routed experts.
        shared_experts: A module from ``[T, H]`` to ``[T, H]`` that every token takes as well.

    Example::

        >>> import torch
        >>> from lightning_moe import GroupedExperts, MoELayer, SharedExperts, TopKRouter
        >>> layer = MoELayer(TopKRouter(16, num_experts=4, top_k=2), GroupedExperts(4, 16, 32), SharedExperts(16, 32))
        >>> layer(torch.randn(2, 5, 16)).shape
        torch.Size([2, 5, 16])

    """

    experts: GroupedExperts
    _routing_hooks: MutableMapping[int, RoutingHook] = OrderedDict()  # noqa: RUF012 - empty: a subclass may not call `__init__`

    def __init__(self, router: nn.Module, experts: GroupedExperts, shared_experts: nn.Module | None = None) -> None:
        super().__init__()
        num_routed = getattr(router, "num_experts", experts.num_experts)
        if num_routed != experts.num_experts:
            raise ValueError(
                f"The router chooses between {num_routed} experts, but there are {experts.num_experts}: give `router` and"
                " `experts` the same `num_experts`."
            )
        self.router = router
        self.experts = experts
        self.shared_experts = shared_experts

    def forward(self, hidden: Tensor) -> Tensor:
        """``[..., H]`` to ``[..., H]``, in the input's dtype."""
        tokens_TH = hidden.reshape(-1, hidden.shape[-1])
        routing = self.route(tokens_TH)
        self._show(routing, hidden.shape[:-1])
        shared: list[Tensor | None] = []
        out_TH: Tensor = self.experts(  # dispatch -> experts -> combine
            tokens_TH, routing.weights_TK, routing.ids_TK, meanwhile=lambda: shared.append(self.share(tokens_TH))
        )
        (shared_TH,) = shared
        if shared_TH is not None:
            out_TH = out_TH + shared_TH
        return out_TH.to(hidden.dtype).view_as(hidden)

    def route(self, tokens_TH: Tensor) -> Routing:
        """Decide on the whole local batch, once: chunks are slices of this, and no recompute repeats it."""
        return Routing(*self.router(tokens_TH))

    def register_routing_hook(self, hook: RoutingHook) -> RemovableHandle:
        """Have every decision shown, once a forward, in training and in evaluation, whatever is recomputed.

        Returns:
            A handle whose ``remove()`` ends it.

        """
        if "_routing_hooks" not in vars(self):
            self._routing_hooks = OrderedDict()
        handle = RemovableHandle(self._routing_hooks)
        self._routing_hooks[handle.id] = hook
        return handle

    def _show(self, routing: Routing, shape: torch.Size) -> None:
        if not in_backward():  # not run again in backward, by a checkpoint around the layer
            for hook in tuple(self._routing_hooks.values()):
                hook(self, routing, shape)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_routing_hooks"}  # copies are not watched

    @property
    def score_function(self) -> ScoreFunction:
        """What makes the router's scores of its logits."""
        return getattr(getattr(self, "router", None), "score_function", "softmax")

    @property
    def selection_bias(self) -> Tensor | None:
        """``[E]``, float32: what takes part in the selection of experts alone; ``None`` where the router has none."""
        return getattr(getattr(self, "router", None), "selection_bias", None)

    @property
    def has_shared_experts(self) -> bool:
        """Whether :meth:`share` gives anything."""
        return self.shared_experts is not None

    def share(self, tokens_TH: Tensor) -> Tensor | None:
        """The shared experts' part, ``None`` where the layer has none."""
        if self.shared_experts is None:
            return None
        shared_TH: Tensor = self.shared_experts(tokens_TH)
        return shared_TH
