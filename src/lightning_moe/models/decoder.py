"""What a decoder layer consists of, under Hugging Face's names."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn


class DecoderParts(NamedTuple):
    """Four children of a pre-norm decoder layer, ``None`` where it has none of that name.

    ``h = x + self_attn(input_layernorm(x))``, then ``h + mlp(post_attention_layernorm(h))``: nobody but the attention reads
    what the first norm returns, and nobody but the MLP what the second does.
    """

    input_layernorm: nn.Module | None
    self_attn: nn.Module | None
    post_attention_layernorm: nn.Module | None
    mlp: nn.Module | None


def decoder_parts(layer: nn.Module) -> DecoderParts:
    """Find the four by name.

    A layer whose children have other names says so in an attribute::

        class Block(nn.Module):
            decoder_parts = {"post_attention_layernorm": "norm", "mlp": "moe"}

    Raises:
        ValueError: That attribute names what is no part, or no child.

    """
    names = getattr(layer, "decoder_parts", {})
    children = dict(layer.named_children())
    for part, child in names.items():
        if part not in DecoderParts._fields or child not in children:
            raise ValueError(
                f"`{type(layer).__name__}.decoder_parts` maps {part!r} to {child!r}. Expected keys among"
                f" {', '.join(map(repr, DecoderParts._fields))} and values among its children"
                f" {', '.join(map(repr, children))}."
            )
    return DecoderParts(*(children.get(names.get(part, part)) for part in DecoderParts._fields))


def train_without_cache(attention: nn.Module) -> None:
    """Keep attention that is run again in backward from writing to a cache of keys and values, which it would do twice.

    Hugging Face's models make such a cache in training too, unless they are called with ``use_cache=False``.
    """

    def drop(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        cache = kwargs.get("past_key_values")
        if cache is None or not module.training or not torch.is_grad_enabled():
            return args, kwargs
        if cache.get_seq_length():
            raise ValueError(
                "Attention that is recomputed in backward cannot be trained with `past_key_values` that hold something. Pass"
                " none, or leave `attention` out of the recompute policy."
            )
        return args, kwargs | {"past_key_values": None}

    attention.register_forward_pre_hook(drop, with_kwargs=True)
