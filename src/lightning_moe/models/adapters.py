"""From a model to its :class:`~lightning_moe.layers.MoELayer` blocks."""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import nn

from lightning_moe.layers import MoELayer
from lightning_moe.models.layouts import Layout, whole
from lightning_moe.models.qwen3_moe import Qwen3MoELayer


@runtime_checkable
class Family(Protocol):
    """What an adapter knows of a Hugging Face family."""

    def from_hf(self, block: nn.Module) -> MoELayer:
        """Make a layer of a block, with the block's own parameters."""

    def layouts(self, name: str, shape: torch.Size) -> list[Layout]:
        """How files store a value of the layer: see :mod:`lightning_moe.models.layouts`."""


FAMILIES: dict[str, Family] = {
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock": Qwen3MoELayer,
}
"""Qualified name of a block's class -> its family. Names, so that no family is imported to be looked for."""


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
    blocks: list[Block] = []
    swaps: dict[str, nn.Module] = {}  # done once all blocks are known to be served
    seen: dict[nn.Module, tuple[str, nn.Module]] = {}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        known = _known_class(module)
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
        layer = FAMILIES[_qualified_name(known)].from_hf(module).train(module.training)
        swaps[name] = layer
        blocks.append(Block(name, type(module).__name__, layer))
    for name, swapped in swaps.items():
        model.set_submodule(name, swapped)
    return blocks


def stored_layouts(model: nn.Module) -> dict[str, list[Layout]]:
    """How Hugging Face's files store each value of a model, whether its blocks were swapped or not.

    Returns:
        Name in the model's state dict -> its layouts, the one to write first. A value that several modules share is there
        once, under its first name.

    """
    families: list[tuple[str, Family]] = []
    for name, module in model.named_modules():
        known = _known_class(module)
        if known is not None:
            families.append((f"{name}." if name else "", FAMILIES[_qualified_name(known)]))
        elif isinstance(module, MoELayer) and isinstance(module, Family):
            families.append((f"{name}." if name else "", module))
    persistent = model.state_dict(keep_vars=True).keys()
    values = [
        *model.named_parameters(),
        *((name, value) for name, value in model.named_buffers() if name in persistent),
    ]
    layouts: dict[str, list[Layout]] = {}
    for name, value in values:
        prefix, family = next((found for found in families if name.startswith(found[0])), ("", None))
        inner = name.removeprefix(prefix)
        stored = [whole(inner, value.shape)] if family is None else family.layouts(inner, value.shape)
        layouts[name] = [[part.below(prefix) for part in layout] for layout in stored]
    return layouts


def _known_class(module: nn.Module) -> type[nn.Module] | None:
    return next((cls for cls in type(module).__mro__ if _qualified_name(cls) in FAMILIES), None)


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
