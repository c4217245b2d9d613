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
        ValueError: A block was changed by somebody, is shared by two modules, or has a layout that its adapter does not serve.

    """
    blocks = []
    seen: dict[nn.Module, tuple[str, nn.Module]] = {}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        known = next((cls for cls in type(module).__mro__ if _qualified_name(cls) in FAMILIES), None)
        if known is None and not isinstance(module, MoELayer):
            continue
        parent = model.get_submodule(name.rpartition(".")[0])
        if module in seen:
            first, first_parent = seen[module]
            if parent is first_parent:
                continue  # one parent under two names: a decoder layer that is used twice
            raise ValueError(
                f"The MoE block `{first}` is shared: it is `{name}` too. Give each of the two modules a block of its own, or"
                " share the whole decoder layer."
            )
        seen[module] = name, parent
        if known is None:
            blocks.append(Block(name, type(module).__name__, module))
            continue
        if not name:
            raise ValueError(
                f"The model is itself a `{type(module).__name__}`, which cannot be replaced in place. Wrap it in a module."
            )
        refuse_changed(name, module, known)
        layer = FAMILIES[_qualified_name(known)](module).train(module.training)
        model.set_submodule(name, layer)
        blocks.append(Block(name, type(module).__name__, layer))
    return blocks


def refuse_changed(name: str, block: nn.Module, known: type[nn.Module]) -> None:
    """Raise a ``ValueError`` if the block does more than its family's block: a swap would silently drop that."""
    changes = []
    if type(block).forward is not known.forward or "forward" in vars(block):
        changes.append("its `forward` is another one")
    hooks = (block._forward_hooks, block._forward_pre_hooks, block._backward_hooks, block._backward_pre_hooks)
    if any(hooks):
        changes.append("it has hooks")
    children = {child for child, _ in block.named_children()} - {"gate", "experts"}
    own = {key for key, _ in (*block.named_parameters(recurse=False), *block.named_buffers(recurse=False))}
    if children or own:
        changes.append(f"it holds {', '.join(map(repr, sorted(children | own)))}")
    if changes:
        raise ValueError(
            f"The MoE block `{name}` (`{type(block).__name__}`) is not as Hugging Face made it: {'; '.join(changes)}. Write"
            " your block as a `lightning_moe.MoELayer`, or add hooks after the set-up."
        )


def _qualified_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
