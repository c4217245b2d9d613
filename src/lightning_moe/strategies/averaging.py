"""Lightning's ``WeightAveraging`` callbacks on shards: each rank averages what it holds, and no rank ever has a whole copy.

A callback copies the model in its ``setup``, before there are shards. Here it waits, and is given an average of the shards
once there are some; what it does with it stays its own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from typing_extensions import override

from lightning_moe._compat import LightningModule, Trainer, WeightAveraging
from lightning_moe.ops.local import local_part
from lightning_moe.parallel.apply import reshard

CURRENT = "current_model_state"
"""Where a callback's checkpoint has the weights in training; the averaged ones take their place."""

StateOf = Callable[[nn.Module], dict[str, Any]]


class ShardedAverage(AveragedModel):
    """An ``AveragedModel`` of values under names, and not of modules that could run.

    What is small of a step is lost in 16 bits: averages of such weights are float32.

    Args:
        model: Sharded. Its values now are the first average.
        state_of: Takes a module's state dict as checkpoints are to have it. Collective.
        device: Where the average is kept; by default where the model is.
        options: Of ``AveragedModel``.

    """

    def __init__(self, model: nn.Module, state_of: StateOf, device: Any = None, **options: Any) -> None:
        super().__init__(nn.Module(), **options)
        self.module = _tree(model, lambda value: _wide(value.clone()).to(device or value.device))
        self._state_of = state_of

    @torch.no_grad()
    @override
    def update_parameters(self, model: nn.Module) -> None:
        """Average in the model's values of now. Any function of elements will do: it sees plain tensors."""
        average = self.module
        self.module = _tree(average, local_part)
        try:
            super().update_parameters(_tree(model, lambda value: _wide(local_part(value))))
        finally:
            self.module = average

    @override
    def state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:  # type: ignore[override]
        """Under the names of ``AveragedModel``. Collective."""
        averages = {f"module.{name}": value for name, value in self._state_of(self.module).items()}
        return averages | {"n_averaged": self.n_averaged.clone()}


def wait_for_shards(trainer: Trainer) -> None:
    """Keep callbacks from copying the model before it is sharded."""
    for callback in _callbacks(trainer):
        callback.setup = _copy_nothing  # type: ignore[method-assign, assignment]


def average_shards(trainer: Trainer, module: nn.Module, state_of: StateOf) -> None:
    """Give callbacks the average of a model that is sharded; see :class:`ShardedAverage`.

    Raises:
        ValueError: There are several, whose averages a checkpoint could not tell apart.

    """
    callbacks = _callbacks(trainer)
    for callback in callbacks:
        vars(callback).pop("setup", None)  # a run under another strategy needs it again
    if len(callbacks) > 1:
        raise ValueError(
            f"A checkpoint holds one average, and there are {len(callbacks)} callbacks that make one:"
            f" {', '.join(f'`{type(callback).__name__}`' for callback in callbacks)}. Keep one of them."
        )
    for callback in callbacks:
        options = {"use_buffers": callback._use_buffers} | callback._kwargs
        callback._average_model = ShardedAverage(module, state_of, callback._device, **options)
        for name in ("on_validation_epoch_start", "on_train_end"):  # where it exchanges values
            hook = getattr(callback, name)
            if not isinstance(hook, partial):
                setattr(callback, name, partial(_on_shards, hook))


def find_average(trainer: Trainer) -> ShardedAverage | None:
    """The average of the run, if there is one."""
    averages = [callback._average_model for callback in _callbacks(trainer)]
    return next((average for average in averages if isinstance(average, ShardedAverage)), None)


def _callbacks(trainer: Trainer) -> list[WeightAveraging]:
    return [callback for callback in trainer.callbacks if isinstance(callback, WeightAveraging)]  # type: ignore[attr-defined]


def _copy_nothing(trainer: Trainer, module: LightningModule, stage: str) -> None:
    pass


def _wide(value: Tensor) -> Tensor:
    return value.float() if value.dtype in (torch.bfloat16, torch.float16) else value


def _on_shards(hook: Any, trainer: Trainer, module: LightningModule) -> None:
    """Between micro-batches a root is still gathered, and its shards are what counts."""
    reshard(module)
    hook(trainer, module)


def _tree(module: nn.Module, of: Callable[[Tensor], Tensor]) -> nn.Module:
    """The names and the order of a module's parameters and buffers, for other values: one that it has twice stays one."""
    values: dict[int, Tensor] = {}
    trees: dict[int, nn.Module] = {}

    def value_of(tensor: Tensor) -> Tensor:
        if id(tensor) not in values:
            value = of(tensor.detach())
            values[id(tensor)] = nn.Parameter(value, False) if isinstance(tensor, nn.Parameter) else value
        return values[id(tensor)]

    def build(module: nn.Module) -> nn.Module:
        if id(module) in trees:
            return trees[id(module)]
        tree = trees[id(module)] = nn.Module()
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            tree.register_parameter(name, value_of(parameter))  # type: ignore[arg-type]
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            tree.register_buffer(name, value_of(buffer), name not in module._non_persistent_buffers_set)
        for name, child in module._modules.items():
            if child is not None:
                tree.add_module(name, build(child))
        return tree

    return build(module)
