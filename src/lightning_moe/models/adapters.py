"""From a model to its :class:`~lightning_moe.layers.MoELayer` blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import nn

from lightning_moe.layers import MoELayer
from lightning_moe.models.qwen3_moe import Qwen3MoELayer

FAMILIES: dict[str, Callable[[nn.Module], MoELayer]] = {
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock": Qwen3MoELayer.from_hf,
}
"""Qualified name of a block's class -> what makes a layer of it. Names, so that no family is imported to be looked for."""


class Block(NamedTuple):
    """A mixture-of-experts block: where it is, what it was, and the layer that it is now."""

    name: str
    kind: str
    layer: MoELayer


def swap_blocks(model: nn.Module) -> list[Block]:
    """Replace every block that an adapter knows by an :class:`MoELayer`, in place.

    Parameters stay the same objects under the same names, so optimizers, state dicts and checkpoints do not notice.
    Layers of this package stay as they are; so does a model that was swapped before.

    Args:
        model: Any module. ``model`` itself cannot be a block to swap, since nobody holds it that could be handed the layer.

    Returns:
        All MoE layers of the model, in order.

    Raises:
        ValueError: A block's layout is one that its adapter does not serve.

    """
    blocks = []
    layers: dict[nn.Module, MoELayer] = {}  # a block may be held under several names
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if isinstance(module, MoELayer):
            if module not in layers:
                blocks.append(Block(name, type(module).__name__, module))
                layers[module] = module
            continue
        adapt = next((FAMILIES[key] for key in map(_qualified_name, type(module).__mro__) if key in FAMILIES), None)
        if adapt is None:
            continue
        if not name:
            raise ValueError(
                f"The model is itself a `{type(module).__name__}`, which cannot be replaced in place. Wrap it in a module."
            )
        if module not in layers:
            layers[module] = adapt(module).train(module.training)
            blocks.append(Block(name, type(module).__name__, layers[module]))
        model.set_submodule(name, layers[module])
    return blocks


def _qualified_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
