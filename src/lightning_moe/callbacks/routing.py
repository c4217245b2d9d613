"""What callbacks that watch routing have in common: they hang on a model's MoE layers, and count where tokens go."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_moe._compat import LightningModule, Trainer, rank_zero_warn
from lightning_moe.callbacks.anywhere import Anywhere, unwrapped
from lightning_moe.layers import MoELayer, Routing, moe_layers
from lightning_moe.memory.steps import OptimizerSteps
from lightning_moe.metrics import TokensPerExpert
from lightning_moe.ops.local import this_rank


class RoutingCallback(Anywhere):
    """Watches the MoE layers of one model at a time. It knows torch alone, but for the hooks that attach and detach it.

    A subclass says what it does with a model, in :meth:`begin`, and with a routing, in :meth:`see`; it may say in :meth:`find`
    which layers it watches.
    """

    def __init__(self) -> None:
        self._model: nn.Module | None = None
        self._handles: list[RemovableHandle] = []
        self._optimizer_steps: OptimizerSteps | None = None  # of the model

    def find(self, model: nn.Module) -> Mapping[str, MoELayer]:
        """The layers to watch in a model, by name.

        Raises:
            ValueError: It has none.

        """
        return moe_layers(model)

    def begin(self, layers: Mapping[str, MoELayer]) -> None:
        """Take up a model: the layers that :meth:`find` found."""
        raise NotImplementedError

    def see(self, name: str, layer: MoELayer, routing: Routing) -> None:
        """Called once for each forward of a layer."""
        raise NotImplementedError

    def attach(self, model: nn.Module) -> None:
        """Watch a model from now on; the same model again changes nothing.

        Raises:
            ValueError: The model has no MoE layer to watch, or another one is being watched. That one still is.

        """
        model = unwrapped(model)
        if self._model is model:
            return
        layers = self.find(model)
        if self._model is not None:
            name = type(self).__name__
            raise ValueError(
                f"This `{name}` watches a `{type(self._model).__name__}` and cannot watch a `{type(model).__name__}` as well."
                f" End the first with `detach()`, or give each model its own, by `with {name}().watch(model):`."
            )
        self.begin(layers)
        self._optimizer_steps = OptimizerSteps()
        self._optimizer_steps.add_module(model)
        self._handles = [layer.register_routing_hook(partial(self._see, name)) for name, layer in layers.items()]
        self._model = model

    def detach(self) -> None:
        """Leave the model as it was. What was counted stays."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._model, self._optimizer_steps = [], None, None

    @contextmanager
    def watch(self, model: nn.Module) -> Iterator[Self]:
        """Watch a model for the time of a block: in a loop of one's own, or after ``fabric.setup_module``."""
        self.attach(model)
        try:
            yield self
        finally:
            self.detach()

    def _concerns(self, optimizer: Any) -> bool:
        """Whether an optimizer trains the model that is watched."""
        return self._optimizer_steps is not None and self._optimizer_steps.concern(optimizer)

    def _see(self, name: str, layer: MoELayer, routing: Routing, _: torch.Size) -> None:
        self.see(name, layer, routing)

    # The Trainer: every way in, and every way out. The strategy swaps a model's blocks after `setup`, so that is too early.
    # `fabric.call` gives no trainer.

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.attach(pl_module)

    @override
    def on_train_end(self, *_: Any) -> None:
        self.detach()

    @override
    def on_exception(self, *_: Any, **__: Any) -> None:
        self.detach()

    @override
    def teardown(self, *_: Any, **__: Any) -> None:
        self.detach()

    # Fabric

    def on_after_setup(self, fabric: Any, module: Any) -> None:
        """Attach to a model that was set up: ``fabric.setup`` calls it, and ``fabric.call("on_train_end")`` ends it.

        A model that has nothing to watch is passed over, with a warning as long as no other is watched.
        After ``fabric.setup_module``, which calls nothing: ``fabric.call("on_after_setup", fabric=fabric, module=model)``.
        """
        try:
            self.find(unwrapped(module))
        except ValueError as error:
            if self._model is None:
                rank_zero_warn(f"`{type(self).__name__}` watches nothing so far. {error}")
            return
        self.attach(module)


class LayerCounts:
    """How many tokens each expert of some layers got, on the device until somebody asks.

    Args:
        layers: By name.

    """

    def __init__(self, layers: Mapping[str, MoELayer]) -> None:
        names = defaultdict(list)
        for name, layer in layers.items():
            names[layer.experts.num_experts].append(name)
        self._names = dict(names)
        device = next(next(iter(layers.values())).experts.parameters()).device
        self._device = torch.device("cpu") if device.type == "meta" else device  # of the same kind on all ranks
        self._metrics = {
            num_experts: TokensPerExpert(num_experts, len(group)).to(self._device)
            for num_experts, group in names.items()
        }
        self._places = {name: (key, row) for key, group in names.items() for row, name in enumerate(group)}

    def add(self, name: str, ids_TK: Tensor) -> None:
        """Count a layer's batch."""
        key, row = self._places[name]
        if self._metrics[key].device != ids_TK.device:
            self._metrics[key].to(ids_TK.device)
        self._metrics[key].update(ids_TK, row)

    def over_ranks(self) -> dict[str, Tensor]:
        """By layer, ``[1 + E]`` int64 on the device: slots that go nowhere, then tokens of each expert, over all ranks.

        A collective call, whether or not this rank has counted anything; nothing waits for the device.
        """
        slots: dict[str, Tensor] = {}
        for key, metric in self._metrics.items():
            metric.to(self._device)  # not where the last batch was: a rank may have had none
            with metric.sync_context(dist_sync_fn=_sum_over_ranks):
                slots |= zip(self._names[key], metric.slots.view(-1, 1 + key).unbind(), strict=True)
        return {name: slots[name] for name in self._places}

    def reset(self, slots: Mapping[str, Tensor] | None = None) -> None:
        """Begin anew, or at counts over all ranks from :meth:`over_ranks`; a layer that these do not have begins at zero."""
        for key, metric in self._metrics.items():
            metric.reset()
            if slots and this_rank() == 0:  # the others' part is in it
                zero = torch.zeros(1 + key, dtype=torch.int64)
                rows = [slots.get(name, zero) for name in self._names[key]]
                metric.slots = torch.cat(rows).to(metric.slots)


def _sum_over_ranks(slots: Tensor, group: Any = None) -> list[Tensor]:
    """For torchmetrics, which would gather every rank's and add up."""
    is_left_behind = slots.device.type == "cpu" and "cpu:" not in dist.get_backend_config()  # the model moved since
    slots = slots.to("cuda") if is_left_behind else slots.clone()
    dist.all_reduce(slots, group=group)
    return [slots]
