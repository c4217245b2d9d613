"""Seeing how tokens are shared out between experts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_moe._compat import LightningModule, Trainer
from lightning_moe.callbacks.heatmap import save_heatmap
from lightning_moe.callbacks.routing import LayerCounts, RoutingCallback
from lightning_moe.layers import MoELayer, Routing
from lightning_moe.metrics import dead_experts, load_entropy, load_imbalance


class ExpertLoadMonitor(RoutingCallback):
    """Logs how evenly tokens are shared out between experts, and draws it as a heatmap of layer x expert.

    Counts are summed over ranks and micro-batches since the last log; what backward runs again does not count twice. Forwards
    in training and in eval mode are counted apart. Logged, under ``train/expert_load/``, ``val/expert_load/`` and
    ``test/expert_load/``:

    ================== =====================================================================================
    imbalance          the busiest expert's tokens over the mean, from 1 to E; the mean over layers
    imbalance_max      the same, of the worst layer
    entropy            of the load, from 0 (all on one expert) to 1 (even); the mean over layers
    entropy_min        the same, of the worst layer
    dead_experts       experts without a token, of all layers
    dropped_tokens     slots of tokens that went to no expert, of all layers
    ================== =====================================================================================

    With the Trainer, ``callbacks=[ExpertLoadMonitor()]`` is all. It logs with the Trainer's other metrics, and after each
    validation and test, to every logger and to ``trainer.callback_metrics``; ``train.png`` (the training so far, drawn when an
    epoch ends), ``val.png`` and ``test.png`` go to ``expert_load`` in the first logger's folder.

    With Fabric, ``Fabric(callbacks=[ExpertLoadMonitor()])`` logs to Fabric's loggers by itself, after optimizer steps; after an
    evaluation call ``fabric.call("on_validation_end")``, and for the chart ``fabric.call("save_heatmap", path)``. In a
    loop of one's own, :meth:`compute` gives the numbers, inside ``with monitor.watch(model):``.

    A forward launches a few small kernels a layer. Ranks exchange counts, and the host waits for the device, only when it logs.

    Args:
        log_every_n_steps: Optimizer steps between two logs; ``None`` for the Trainer's own number, or 50 in Fabric.
        per_layer: Log ``imbalance``, ``entropy`` and ``dead_experts`` of each layer too, as ``<layer>/imbalance``.

    Raises:
        ValueError: ``log_every_n_steps`` is not positive.

    """

    def __init__(self, log_every_n_steps: int | None = None, per_layer: bool = False) -> None:
        super().__init__()
        if log_every_n_steps is not None and log_every_n_steps < 1:
            raise ValueError(f"Expected argument `log_every_n_steps` to be positive but got {log_every_n_steps}.")
        self.log_every_n_steps = log_every_n_steps
        self.per_layer = per_layer
        self._window: dict[bool, LayerCounts] = {}  # since the last log: True in training, False in eval mode
        self._logged: dict[bool, dict[str, Tensor]] = {True: {}, False: {}}  # all of the training; the last evaluation
        self._restored: dict[str, Tensor] | None = None  # a window that waits for its model
        self._steps = 0
        self._fabric: Any = None

    @override
    def begin(self, layers: Mapping[str, MoELayer]) -> None:
        self._window = {True: LayerCounts(layers), False: LayerCounts(layers)}
        self._window[True].reset(self._restored)
        self._restored = None
        self._logged[True] = {name: slots for name, slots in self._logged[True].items() if name in layers}

    @override
    def see(self, name: str, layer: MoELayer, routing: Routing) -> None:
        self._window[layer.training].add(name, routing.ids_TK)

    def compute(self, stage: str = "train") -> dict[str, float]:
        """What was counted since the last call, as numbers; the next call begins anew. All ranks call it.

        Args:
            stage: ``"train"``, or another name for what ran in eval mode.

        Returns:
            Numbers by name, the same on all ranks; none if nothing was counted.

        """
        training = stage == "train"
        slots = self._counted(training)
        if not slots:
            return {}
        self._window[training].reset()
        self._logged[training] = _added(self._logged[training], slots) if training else slots
        return {f"{stage}/expert_load/{name}": value for name, value in _numbers(slots, self.per_layer).items()}

    def save_heatmap(self, path: str | Path, stage: str = "train") -> None:
        """Draw each layer's and expert's tokens, over an even share, as a PNG. All ranks call it, and rank 0 writes it.

        Args:
            path: The file. Its folder is made.
            stage: ``"train"`` for all of the training so far; another name for the last evaluation that was logged.

        """
        training = stage == "train"
        slots = self._logged[training]
        if training:
            slots = _added(slots, self._counted(training))
        if slots:
            save_heatmap({name: layer[1:] for name, layer in slots.items()}, path, f"{stage}: tokens of each expert")

    def log_expert_load(self, stage: str = "train") -> None:
        """Log to Fabric's loggers what was counted; for ``fabric.call``."""
        if self._fabric is not None and (numbers := self.compute(stage)):
            self._fabric.log_dict(numbers, step=self._steps)

    @override
    def detach(self) -> None:
        super().detach()
        self._fabric = None

    @override
    def state_dict(self) -> dict[str, Any]:
        """The counts, over all ranks: all of them call it."""
        return {"logged": dict(self._logged[True]), "window": self._counted(True), "steps": self._steps}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._logged[True] = dict(state_dict["logged"])
        self._steps = state_dict["steps"]
        if self._model is None:  # strategies differ in whether this comes before training or after it has begun
            self._restored = state_dict["window"]
        else:
            self._window[True].reset(state_dict["window"])

    def _counted(self, training: bool) -> dict[str, Tensor]:
        """``[1 + E]`` int64 of each layer over all ranks since the last log, on the CPU. Here the host waits."""
        if not self._window:
            return {}
        slots = self._window[training].over_ranks()  # also where this rank has counted nothing: others may have
        on_host = torch.split(torch.cat(list(slots.values())).cpu(), [len(layer) for layer in slots.values()])
        return dict(zip(slots, on_host, strict=True)) if any(layer.any() for layer in on_host) else {}

    def _is_due(self, every: int, optimizer: Any) -> bool:
        """Count an optimizer's step, one for all that train the model; whether it is time to log."""
        is_new = self._optimizer_steps is not None and self._optimizer_steps.count(optimizer)
        self._steps += is_new
        return is_new and every > 0 and self._steps % every == 0

    # The Trainer; `fabric.call` gives no trainer

    @override
    def on_before_optimizer_step(
        self, trainer: Trainer | None = None, pl_module: Any = None, optimizer: Any = None
    ) -> None:
        if trainer is None:
            return
        every: int = self.log_every_n_steps or trainer.log_every_n_steps  # type: ignore[attr-defined]
        if self._is_due(every, optimizer):
            self._log(trainer, "train")

    @override
    def on_train_epoch_end(self, trainer: Trainer | None = None, *_: Any) -> None:
        if trainer is not None:
            self._draw(trainer, "train")

    @override
    def on_validation_start(self, trainer: Trainer | None = None, pl_module: LightningModule | None = None) -> None:
        self._begin_evaluation(pl_module)

    @override
    def on_validation_end(self, trainer: Trainer | None = None, *_: Any) -> None:
        self._end_evaluation(trainer, "val")

    @override
    def on_test_start(self, trainer: Trainer | None = None, pl_module: LightningModule | None = None) -> None:
        self._begin_evaluation(pl_module)

    @override
    def on_test_end(self, trainer: Trainer | None = None, *_: Any) -> None:
        self._end_evaluation(trainer, "test")

    def _begin_evaluation(self, pl_module: LightningModule | None) -> None:
        if pl_module is not None:
            self.attach(pl_module)
        if self._window:
            self._window[False].reset()

    def _end_evaluation(self, trainer: Trainer | None, stage: str) -> None:
        if trainer is None:
            self.log_expert_load(stage)
        elif not trainer.sanity_checking:
            self._log(trainer, stage)
            self._draw(trainer, stage)

    def _log(self, trainer: Trainer, stage: str) -> None:
        numbers = self.compute(stage)
        if not numbers:
            return
        for logger in trainer.loggers:
            logger.log_metrics(numbers, step=trainer.fit_loop.epoch_loop._batches_that_stepped)
        trainer.callback_metrics.update({name: torch.tensor(value) for name, value in numbers.items()})

    def _draw(self, trainer: Trainer, stage: str) -> None:
        if trainer.loggers and (folder := trainer.log_dir) is not None and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self.save_heatmap(Path(folder) / "expert_load" / f"{stage}.png", stage)

    # Fabric

    @override
    def on_after_setup(self, fabric: Any, module: Any) -> None:
        super().on_after_setup(fabric, module)
        self._fabric = fabric

    def on_after_optimizer_step(self, strategy: Any, optimizer: Any) -> None:
        """Fabric calls it."""
        if self._concerns(optimizer) and self._is_due(self.log_every_n_steps or 50, optimizer):
            self.log_expert_load()


def _added(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: sum(slots[name] for slots in (one, other) if name in slots) for name in {**one, **other}}  # type: ignore[misc]


def _numbers(slots: Mapping[str, Tensor], per_layer: bool) -> dict[str, float]:
    imbalance, entropy, dead = (
        {name: float(measure(layer[1:])) for name, layer in slots.items()}
        for measure in (load_imbalance, load_entropy, dead_experts)
    )
    numbers = {
        "imbalance": sum(imbalance.values()) / len(slots),
        "imbalance_max": max(imbalance.values()),
        "entropy": sum(entropy.values()) / len(slots),
        "entropy_min": min(entropy.values()),
        "dead_experts": sum(dead.values()),
        "dropped_tokens": float(sum(layer[0] for layer in slots.values())),
    }
    if per_layer:
        for what, values in (("imbalance", imbalance), ("entropy", entropy), ("dead_experts", dead)):
            numbers |= {f"{name}/{what}": value for name, value in values.items()}
    return numbers
