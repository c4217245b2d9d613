"""Qwen3-MoE (``Qwen3MoeForCausalLM`` and its relatives in transformers >= 5)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_moe.layers import GroupedExperts, MoELayer, Routing
from lightning_moe.models.layouts import Layout, per_expert, whole


class Qwen3MoELayer(MoELayer):
    """A ``Qwen3MoeSparseMoeBlock`` as an :class:`MoELayer`.

    The router module is Hugging Face's own, under its name ``gate``: it records ``output_router_logits``, and the
    auxiliary loss is computed from them as ever. The experts keep their parameters and names.
    """

    def __init__(self, gate: nn.Module, experts: GroupedExperts) -> None:
        nn.Module.__init__(self)
        self.experts = experts  # in Hugging Face's order: optimizers' state dicts know parameters by position
        self.gate = gate
        self.shared_experts = None

    @classmethod
    def from_hf(cls, block: Any) -> Qwen3MoELayer:
        """Take over a block's modules and parameters."""
        experts = block.experts
        if getattr(experts, "gate_up_proj", None) is None or experts.gate_up_proj.dim() != 3:
            raise ValueError(
                f"`{type(block).__name__}` holds its experts in a layout that is not stacked (`gate_up_proj` of shape"
                " [E, 2F, H]). Upgrade with `pip install 'transformers>=5'`."
            )
        activation = type(experts.act_fn).__name__
        if activation not in ("SiLU", "SiLUActivation"):
            raise ValueError(
                f"`{type(block).__name__}` uses the activation `{activation}`, but the experts here compute SiLU."
                " Set `hidden_act='silu'` in the model's config."
            )
        return cls(block.gate, stacked_experts(experts))

    @staticmethod
    def layouts(name: str, shape: torch.Size) -> list[Layout]:
        """How files store a value of the layer: as one, but experts also, and in most files, each by itself."""
        if name == "experts.gate_up_proj":
            return [per_expert("experts", ["gate_proj", "up_proj"], shape), whole(name, shape)]
        if name == "experts.down_proj":
            return [per_expert("experts", ["down_proj"], shape), whole(name, shape)]
        return [whole(name, shape)]

    def route(self, tokens_TH: Tensor) -> Routing:
        return Routing(*self.gate(tokens_TH))


def stacked_experts(hf_experts: Any) -> GroupedExperts:
    """:class:`GroupedExperts` that holds the very parameters of Hugging Face's stacked experts (SiLU-GLU, no bias)."""
    num_experts, hidden_size, intermediate_size = hf_experts.down_proj.shape
    with torch.device("meta"):
        experts = GroupedExperts(
            num_experts, hidden_size, intermediate_size, init_std=hf_experts.config.initializer_range
        )
    experts.gate_up_proj, experts.down_proj = hf_experts.gate_up_proj, hf_experts.down_proj
    return experts
