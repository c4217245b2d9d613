"""The routed experts: all the matrices of one layer, stacked, wherever their rows come from."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lightning_moe.dispatch import Dispatcher, LocalDispatcher
from lightning_moe.dispatch.base import nothing
from lightning_moe.ops.rows import accumulation_dtype
from lightning_moe.overlap import chunked_experts
from lightning_moe.overlap.gradient_sums import GradientSum
from lightning_moe.overlap.kept import KEPT
from lightning_moe.recompute import RoutedMode


class GroupedExperts(nn.Module):
    """SwiGLU experts with stacked weights, in Hugging Face's layout and under its names.

    ``y = sum_k w_k down_k(silu(gate_k x) * up_k x)`` over the K experts of each token.

    On one process it computes every expert here. A strategy shards the two weights on dim 0 over the expert-parallel
    group and calls :meth:`distribute`; the same forward then serves tokens and experts of the whole group.

    Args:
        num_experts: E, over all ranks.
        hidden_size: H.
        intermediate_size: F.
        init_std: Standard deviation of the weights' normal initialization.

    Attributes:
        gate_up_proj: ``[E, 2F, H]``, the gate's F rows, then the up projection's.
        down_proj: ``[E, H, F]``.
        gradient_sums: Of both matrices, where gradients over micro-batches are summed here since FSDP2 has no part in it.

    """

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int, init_std: float = 0.02) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.init_std = init_std
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * intermediate_size, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size))
        self.gradient_sums: tuple[GradientSum, GradientSum] | None = None
        self.distribute(LocalDispatcher())
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.gate_up_proj, std=self.init_std)
        nn.init.normal_(self.down_proj, std=self.init_std)

    def distribute(
        self,
        dispatcher: Dispatcher,
        num_chunks: int = 1,
        mode: RoutedMode = "none",
        weight_grad_scale: float = 1.0,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        """Choose how tokens reach the experts.

        Args:
            dispatcher: Moves rows between the ranks that share the experts.
            num_chunks: With balanced routing, no more than this part of the rows is worked on at once; 1 is native expert
                parallelism.
            mode: What backward recomputes.
            weight_grad_scale: Factor on the weights' gradients. They hold the sum over the group's tokens; with a loss that
                is a mean over ranks, ``1 / dispatcher.size`` makes it the group's mean.
            compute_dtype: What both matrices are converted to in forward and backward; ``None`` for their own. Under autocast
                it is autocast's.

        """
        if not isinstance(num_chunks, int) or num_chunks < 1:
            raise ValueError(f"Expected argument `num_chunks` to be an integer of at least 1 but got {num_chunks!r}.")
        if self.num_experts % dispatcher.size:
            raise ValueError(f"{self.num_experts} experts cannot be shared out evenly between {dispatcher.size} ranks.")
        self.dispatcher = dispatcher
        self.num_chunks = num_chunks
        self.mode: RoutedMode = mode
        self.weight_grad_scale = weight_grad_scale
        self.compute_dtype = compute_dtype

    @property
    def kept_names(self) -> tuple[str, ...]:
        """What is kept for backward and has a name: see :data:`lightning_moe.overlap.kept.KEPT`."""
        return KEPT[self.mode]

    def hand_over_gradients(self) -> None:
        """Add what was held of earlier micro-batches to the matrices' gradients; nothing while gradients are being held."""
        for held, parameter in zip(self.gradient_sums or (), (self.gate_up_proj, self.down_proj), strict=False):
            held.give_to(parameter, self.weight_grad_scale)

    def forward(
        self, tokens_TH: Tensor, weights_TK: Tensor, ids_TK: Tensor, meanwhile: Callable[[], None] = nothing
    ) -> Tensor:
        """The weighted sum of each token's experts.

        Args:
            tokens_TH: ``[T, H]``, local tokens.
            weights_TK: ``[T, K]``, routing weights.
            ids_TK: ``[T, K]`` integer, each token's experts, without repetition; ``-1`` for none.
            meanwhile: Is called once, before the host waits for the other ranks' counts: what it launches keeps the device
                busy until the experts can begin.

        Returns:
            ``[T, H]``, in the dtype that the experts compute in.

        Raises:
            ValueError: The three do not have as many tokens, or ids and weights as many slots.

        """
        if tokens_TH.dim() != 2 or ids_TK.shape != weights_TK.shape or ids_TK.shape[0] != tokens_TH.shape[0]:
            raise ValueError(
                "Expected tokens [T, H] with `weights_TK` and `ids_TK` [T, K], but got"
                f" {list(tokens_TH.shape)}, {list(weights_TK.shape)} and {list(ids_TK.shape)}."
            )
        dtype = self.compute_dtype or self.gate_up_proj.dtype
        if torch.is_autocast_enabled(tokens_TH.device.type) and dtype != torch.float64:
            dtype = torch.get_autocast_dtype(tokens_TH.device.type)
        weights_TK = weights_TK.to(accumulation_dtype(dtype))
        plans = self.dispatcher.plan(ids_TK, weights_TK.detach(), self.num_experts, self.num_chunks, meanwhile)
        return chunked_experts(
            tokens_TH.to(dtype),
            weights_TK,
            self.gate_up_proj,
            self.down_proj,
            self.dispatcher,
            plans,
            self.mode,
            self.weight_grad_scale,
            self.gradient_sums,
        )

    def extra_repr(self) -> str:
        num_experts, hidden_size, intermediate_size = self.down_proj.shape
        return (
            f"num_experts={num_experts}, hidden_size={hidden_size}, intermediate_size={intermediate_size},"
            f" num_chunks={self.num_chunks}, mode={self.mode}"
        )
