"""The Trainer flavour of :class:`~lightning_moe.ChunkedEPStrategy`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import _GeneratorContextManager
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_moe._compat import (
    PYTORCH_REGISTRY,
    PytorchModelParallelStrategy,
    PytorchPrecision,
    PytorchStrategy,
    StochasticWeightAveraging,
    Trainer,
    TrainerFn,
    optimizers_to_device,
    rank_zero_info,
)
from lightning_moe.buffers import release_buffers
from lightning_moe.checkpoint.load import keys_of, load_checkpoint
from lightning_moe.checkpoint.place import make_way, tolerate_removal
from lightning_moe.checkpoint.save import state_dicts, writing
from lightning_moe.parallel.gradients import clip_grad_norm_
from lightning_moe.parallel.units import roots_below
from lightning_moe.strategies.averaging import CURRENT, average_shards, find_average, wait_for_shards
from lightning_moe.strategies.core import ExpertParallel, drop_stale_parameters, is_parallelized, no_gradient_sync
from lightning_moe.strategies.failure import explain, forget
from lightning_moe.strategies.signals import Signals


class ChunkedEPStrategy(ExpertParallel, PytorchModelParallelStrategy):
    """:class:`lightning_moe.ChunkedEPStrategy` for the ``Trainer`` only: to subclass, or where the flavour is known."""

    @override
    def _init_framework(self, **options: Any) -> None:
        self._failed = False
        PytorchModelParallelStrategy.__init__(self, **options)

    @property
    @override
    def precision_plugin(self) -> PytorchPrecision:
        return super().precision_plugin

    @precision_plugin.setter
    @override
    def precision_plugin(self, precision_plugin: PytorchPrecision | None) -> None:
        if precision_plugin is not None:
            self._check_precision(precision_plugin.precision)
        self._precision_plugin = precision_plugin

    @override
    def setup_environment(self) -> None:
        assert self.lightning_module is not None
        PytorchStrategy.setup_environment(self)
        self._setup_distributed()
        forget()
        if self.lightning_module.trainer.state.fn == TrainerFn.FITTING:
            wait_for_shards(self.lightning_module.trainer)
        self._failed = False
        self._agree_on_arguments(self.precision_plugin.precision)
        if self._settings.expert_parallel_size != "auto":
            self._open_mesh(self.root_device.type, self.world_size, self.num_processes, [])
            self._publish_mesh()

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        assert self.model is not None
        _refuse(trainer)
        Signals.attach(trainer)
        self.accelerator.setup(trainer)
        if not is_parallelized(self.model):
            self.model = self.precision_plugin.convert_module(self.model)
        fresh = self._parallelize(
            self.model,
            roots_below(self.model),
            self.precision_plugin.precision,
            self.root_device,
            self.world_size,
            self.num_processes,
        )
        self._publish_mesh()
        if fresh:
            self.model_to_device()  # buffers and metrics that no sharded module holds
            rank_zero_info(str(self.report))
        self.barrier()

        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting:
            average_shards(trainer, self.model, self._state_of)
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if fitting:
            optimizers_to_device(self.optimizers, self.root_device)

    @override
    def setup_precision_plugin(self) -> None:
        # The Trainer clips through its precision plugin, which sees only the optimizer. The method is replaced on the
        # instance: the plugin's class name is a key of the checkpoint.
        self.precision_plugin.clip_grad_by_norm = self._clip_grad_by_norm  # type: ignore[method-assign]
        super().setup_precision_plugin()

    @override
    def block_backward_sync(self) -> _GeneratorContextManager[None]:
        assert self.model is not None
        return no_gradient_sync(self.model)

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        drop_stale_parameters()
        return result

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        path = Path(self.broadcast(filepath))
        if not self._save_distributed_checkpoint:
            self._saves.file(checkpoint, partial(self._save_file, path, storage_options))
            return
        if storage_options is not None:
            raise TypeError(f"`{type(self).__name__}` writes to a local path: `storage_options` is not supported.")
        sharded = {key: checkpoint.pop(key) for key in ("state_dict", CURRENT) if key in checkpoint}
        for i, state in enumerate(checkpoint.pop("optimizer_states", [])):
            sharded[f"optimizer_{i}"] = state
        self._saves.folder(path, sharded, checkpoint)

    def _state_of(self, module: nn.Module) -> dict[str, Any]:
        sharded, _ = state_dicts({"": module}, not self._save_distributed_checkpoint, {})
        state: dict[str, Any] = sharded[""]
        return state

    def _save_file(self, path: Path, storage_options: Any | None, checkpoint: dict[str, Any]) -> None:
        with make_way(path), writing(path):
            self.checkpoint_io.save_checkpoint(checkpoint, path, storage_options)

    @override
    def remove_checkpoint(self, filepath: str | Path) -> None:
        if self.is_global_zero:
            self._saves.then(partial(self._remove_checkpoint, filepath))

    def _remove_checkpoint(self, path: str | Path) -> None:
        with tolerate_removal(path):  # the other ranks would not hear of an error
            self.checkpoint_io.remove_checkpoint(path)

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        assert self.model is not None
        assert self.lightning_module is not None
        self.wait_for_save()
        path, weights_only = Path(self.broadcast(checkpoint_path)), self._resolve_weights_only(weights_only)
        average = find_average(self.lightning_module.trainer)
        modules = {"state_dict": self.model}
        if average is not None and CURRENT in keys_of(path, weights_only):
            modules = {"state_dict": average.module, CURRENT: self.model}
        optimizers = {f"optimizer_{i}": optimizer for i, optimizer in enumerate(self.optimizers)}
        rest = load_checkpoint(path, modules, optimizers, self.lightning_module.strict_loading, weights_only)
        if average is not None:  # its callback wants to load this itself
            rest |= {key: module.state_dict() for key, module in modules.items()}
        return rest

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._failed = True
        explain(exception)

    @override
    def teardown(self) -> None:
        try:
            self.wait_for_save()
            if not self._failed:  # else other ranks may be elsewhere, and would not take part
                release_buffers()
        finally:
            super().teardown()

    def _clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        clip_grad_norm_(self.precision_plugin.main_params(optimizer), clip_val)

    def _publish_mesh(self) -> None:
        """Let the strategy's and the LightningModule's ``device_mesh`` answer."""
        assert self._moe_mesh is not None
        assert self.lightning_module is not None
        self._device_mesh = self.lightning_module._device_mesh = self._moe_mesh.mesh


def _refuse(trainer: Trainer) -> None:
    """What cannot work with sharded weights is refused, with the reason."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, StochasticWeightAveraging):
            raise TypeError(
                f"`{type(callback).__name__}` averages whole weights, which no rank has under `ChunkedEPStrategy`."
                " Take `WeightAveraging`, which makes the same average, of shards."
            )
    if trainer._detect_anomaly:
        raise ValueError(
            "`Trainer(detect_anomaly=True)` does not work with sharded parameters (DTensor has no rule for its NaN check)."
            " Turn it off, or look for the NaN on one device with another strategy."
        )


PYTORCH_REGISTRY.register(
    "chunked_ep", ChunkedEPStrategy, description="Expert parallelism in overlapped chunks of tokens"
)
