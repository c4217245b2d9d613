"""A mixture-of-experts layer, from a token's point of view."""

from __future__ import annotations

from torch import Tensor, nn

from lightning_moe.layers.experts import GroupedExperts
from lightning_moe.layers.router import Routing


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
