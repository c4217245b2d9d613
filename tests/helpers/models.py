"""Small models and data for parity tests, and what plain transformers makes of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe import modeling_qwen3_moe

VOCABULARY = 32


def qwen3_moe(dtype: torch.dtype = torch.float64, seed: int = 7, **overrides: Any) -> Qwen3MoeForCausalLM:
    """A two-layer Qwen3-MoE: 8 experts, 3 a token; sizes keep bf16 and float32 grouped GEMMs aligned."""
    options = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "moe_intermediate_size": 24,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "initializer_range": 0.2,
        "max_position_embeddings": 64,
    }
    torch.manual_seed(seed)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**(options | overrides))).to(dtype)


class _Float64Torch:
    """``torch``, but whoever asks for float32 gets float64."""

    float = float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def computing_in(dtype: torch.dtype) -> Iterator[None]:
    """In float64, keep transformers from stepping down to float32 in its norms, softmaxes, router and loss."""
    float_method = torch.Tensor.float
    if dtype == torch.float64:
        modeling_qwen3_moe.torch = _Float64Torch()
        torch.Tensor.float = torch.Tensor.double
        torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        modeling_qwen3_moe.torch = torch
        torch.Tensor.float = float_method
        torch.set_default_dtype(torch.float32)


def batch(rank: int, batch_size: int = 3, length: int = 7, seed: int = 0) -> Tensor:
    """A rank's own tokens ``[batch_size, length]``; 21 of them divide by no number of chunks but 1, 3 and 7."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randint(VOCABULARY, (batch_size, length), generator=generator)


def upstream(rank: int, logits: Tensor) -> Tensor:
    """A random gradient for the logits."""
    generator = torch.Generator().manual_seed(99 + rank)
    return torch.randn(logits.shape, generator=generator, dtype=torch.float64).to(logits)


def loss_of(model: nn.Module, ids: Tensor, rank: int, **options: Any) -> Tensor:
    """The language-model loss plus a random projection of the logits, so that upstream gradients are random too."""
    out = model(input_ids=ids, labels=ids, use_cache=False, **options)
    return out.loss + (out.logits * upstream(rank, out.logits)).mean()


def full(tensor: Tensor) -> Tensor:
    """A whole tensor on the CPU from a shard; collective."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu()


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """``|a - e| / |e|`` in L2, in float64."""
    actual, expected = actual.double(), expected.double()
    scale = expected.norm().item()
    return (actual - expected).norm().item() / scale if scale else actual.norm().item()
