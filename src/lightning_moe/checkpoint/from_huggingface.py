"""Hugging Face's weights into a model, each rank its own shards."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from lightning_moe._compat import unwrap_objects
from lightning_moe.checkpoint.messages import class_name, listed, quoted
from lightning_moe.checkpoint.names import plain_layouts, plain_name
from lightning_moe.checkpoint.ranks import on_all_ranks
from lightning_moe.checkpoint.safetensors import Tensors
from lightning_moe.checkpoint.shards import region
from lightning_moe.models.layouts import Layout
from lightning_moe.ops.local import local_part


@dataclass(frozen=True)
class _Due:
    """What is to be loaded into a model on the meta device once it is sharded. Until then it keeps the model from running.

    A hook before the model's forward, so that copies of the model have it too.
    """

    path: Path
    strict: bool

    def __call__(self, model: nn.Module, _: object) -> None:
        raise RuntimeError(
            f"The weights in {self.path} are still due: the `{class_name(model)}` was on the meta device when"
            " `load_huggingface` was called, and only `ChunkedEPStrategy` loads them later, when it sets the model up. Train"
            " with it, or call `load_huggingface` again once the model is on another device."
        )


def load_huggingface(model: nn.Module, path: str | os.PathLike[str], strict: bool = True) -> None:
    """Load weights in Hugging Face's format into a model, in place.

    They are read from safetensors files tensor by tensor, and of each tensor only the part that this rank holds: its own
    experts, and its shards of everything else. Experts may be stored each by itself or stacked. Values are converted to the
    dtype of the model.

    Args:
        model: A Hugging Face model, or one with the same names. Before the strategy sets it up it is loaded whole, after
            that shard by shard. On the meta device it is loaded when the strategy has sharded it, and cannot run before.
        path: A folder as transformers' ``save_pretrained`` writes it, or a single safetensors file. To be called on all ranks
            with the same path.
        strict: The files must have all values of the model, and no others.

    Raises:
        FileNotFoundError: There are no weights at the path.
        ValueError: A file is damaged, or does not fit the model. The model was not changed.
        ImportError: The package safetensors is not installed.

    """
    model = unwrap_objects(model)
    path = Path(path)
    with on_all_ranks(), Tensors(path) as tensors:
        layouts = _choose(model, path, tensors, strict)
        values = model.state_dict(keep_vars=True)
        if any(values[name].is_meta for name in layouts):
            _forget_due(model)
            model.register_forward_pre_hook(_Due(path, strict))
            return
    with on_all_ranks(), Tensors(path) as tensors, torch.no_grad():
        for name, layout in layouts.items():
            _fill(values[name], layout, tensors)
    _forget_due(model)


def load_due(root: nn.Module) -> None:
    """Load what :func:`load_huggingface` was asked to load into models that were on the meta device. Collective.

    Args:
        root: The model, or a module that holds it.

    """
    for module in root.modules():
        for due in _find_due(module).values():
            load_huggingface(module, due.path, due.strict)


def _find_due(module: nn.Module) -> dict[int, _Due]:
    return {key: hook for key, hook in module._forward_pre_hooks.items() if isinstance(hook, _Due)}


def _forget_due(module: nn.Module) -> None:
    for key in _find_due(module):
        del module._forward_pre_hooks[key]


def _fill(value: Tensor, layout: Layout, tensors: Tensors) -> None:
    held, local = region(value), local_part(value.detach())
    for part in layout:
        tensors.copy_part(part, local, held)


def _choose(model: nn.Module, path: Path, tensors: Tensors, strict: bool) -> dict[str, Layout]:
    """For each value of the model the layout that the files have it in."""
    there = tensors.names()
    chosen: dict[str, Layout] = {}
    missing: list[str] = []
    for name, layouts in plain_layouts(model).items():
        most = max(layouts, key=lambda layout: sum(part.name in there for part in layout) / len(layout))
        absent = [part.name for part in most if part.name not in there]
        if absent:
            missing += absent
        else:
            chosen[name] = most
    wrong = [
        f"`{part.name}` has shape {list(tensors.shape(part.name))} instead of {list(part.shape)}"
        for layout in chosen.values()
        for part in layout
        if tensors.shape(part.name) != part.shape
    ]
    wrong += [
        f"`{part.name}` is quantized ({tensors.kind(part.name)}), which is not served"
        for layout in chosen.values()
        for part in layout
        if tensors.kind(part.name) not in ("F64", "F32", "F16", "BF16", "I64", "I32", "BOOL")
    ]
    if not chosen:
        wrong.append("none of its values is there")
    if strict:
        known = {part.name for layout in chosen.values() for part in layout} | set(map(plain_name, model.state_dict()))
        ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
        unexpected = [name for name in there - known if not any(re.search(pattern, name) for pattern in ignored)]
        wrong += [f"they lack {listed(quoted(missing))}"] * bool(missing)
        wrong += [f"they have {listed(quoted(unexpected))}, which it has not"] * bool(unexpected)
    if wrong:
        raise ValueError(f"The weights in {path} do not fit the `{class_name(model)}`: {listed(wrong)}.")
    return chosen
