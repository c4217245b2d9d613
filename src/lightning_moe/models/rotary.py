"""Rotary position embeddings keep their frequencies in float32."""

from __future__ import annotations

import torch
from torch import nn


def keep_rotary_in_float32(model: nn.Module) -> None:
    """Undo what ``model.to(torch.bfloat16)`` does to Hugging Face's rotary frequencies.

    Transformers computes them in float32 even for a model whose dtype is bfloat16; a whole-model conversion, such as
    Lightning's ``bf16-true``, rounds them to three digits, which moves far positions by whole radians.
    """
    for owner in model.modules():
        initialize = getattr(owner, "_init_weights", None)
        if initialize is None:
            continue
        for module in owner.modules():
            frequencies = getattr(module, "inv_freq", None)
            if not isinstance(frequencies, torch.Tensor) or frequencies.dtype not in (torch.bfloat16, torch.float16):
                continue
            for name, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, name, buffer.float())
            if not frequencies.is_meta:
                initialize(module)
