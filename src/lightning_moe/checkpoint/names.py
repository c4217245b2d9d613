"""Names of values as checkpoints have them: wrappers leave no trace."""

from __future__ import annotations

from torch import nn

from lightning_moe.models import stored_layouts
from lightning_moe.models.layouts import Layout

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")  # of `torch.compile` and of activation checkpointing


def plain_name(name: str) -> str:
    """A name in a module without what torch's wrappers of submodules add to it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def plain_layouts(model: nn.Module) -> dict[str, list[Layout]]:
    """How Hugging Face's files store each value of a model; see :func:`~lightning_moe.models.stored_layouts`."""
    return {
        name: [[part._replace(name=plain_name(part.name)) for part in layout] for layout in layouts]
        for name, layouts in stored_layouts(model).items()
    }
