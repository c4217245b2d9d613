"""The Fabric flavour of :class:`~lightning_moe.ChunkedEPStrategy`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import _LRScheduler
from typing_extensions import override

from lightning_moe._compat import (
    FABRIC_REGISTRY,
    BackwardSyncControl,
    FabricModelParallelStrategy,
    FabricPrecision,
    FabricStrategy,
    LightningModule,
    rank_zero_info,
)
from lightning_moe.checkpoint.load import load_checkpoint, load_weights
from lightning_moe.checkpoint.save import save_file, state_dicts
from lightning_moe.parallel.gradients import clip_grad_norm_
from lightning_moe.parallel.units import roots_below
from lightning_moe.strategies.core import (
    ExpertParallel,
    drop_stale_parameters,
    no_gradient_sync,
    refuse_optimizers,
    remap_optimizers,
)
from lightning_moe.strategies.failure import explain_uncaught, forget


class ChunkedEPStrategy(ExpertParallel, FabricModelParallelStrategy):
    """:class:`lightning_moe.ChunkedEPStrategy` for ``Fabric`` only: to subclass, or where the flavour is known."""

    @override
    def _init_framework(self, **options: Any) -> None:
        FabricModelParallelStrategy.__init__(self, parallelize_fn=lambda module, _: module, **options)
        self._backward_sync_control = _SyncControl()

    @property
    @override
    def precision(self) -> FabricPrecision:
        return super().precision

    @precision.setter
    @override
    def precision(self, precision: FabricPrecision | None) -> None:
        if precision is not None:
            self._check_precision(precision.precision)
        self._precision = precision

    @override
    def setup_environment(self) -> None:
        FabricStrategy.setup_environment(self)
        self._setup_distributed()
        forget()
        explain_uncaught()
        self._agree_on_arguments(self.precision.precision)
        if self._settings.expert_parallel_size != "auto":
            self._device_mesh = self._open_mesh(self.root_device.type, self.world_size, self.num_processes, []).mesh

    @override
    def setup_module(self, module: nn.Module) -> nn.Module:
        is_lightning = isinstance(module, LightningModule)
        roots = roots_below(module) if is_lightning else [module]
        fresh = self._parallelize(
            module, roots, self.precision.precision, self.root_device, self.world_size, self.num_processes
        )
        assert self._moe_mesh is not None
        self._device_mesh = self._moe_mesh.mesh
        if fresh:
            module.to(self.root_device)  # buffers that no sharded module holds
            rank_zero_info(str(self.report))
        return module

    @override
    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: _LRScheduler | None = None
    ) -> tuple[nn.Module, list[Optimizer], _LRScheduler | None]:
        refuse_optimizers(optimizers, module)
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        module = self.setup_module(module)
        remap_optimizers(optimizers, names, module)
        return module, [self.setup_optimizer(optimizer) for optimizer in optimizers], scheduler

    @override
    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        result = super().optimizer_step(optimizer, **kwargs)
        drop_stale_parameters()
        return result

    @override
    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float | int,
        norm_type: float | int = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        self.precision.unscale_gradients(optimizer)
        parameters = self.precision.main_params(optimizer)
        return clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)

    @override
    def save_checkpoint(
        self,
        path: str | Path,
        state: dict[str, nn.Module | Optimizer | Any],
        storage_options: Any | None = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        if storage_options is not None:
            raise TypeError(f"`{type(self).__name__}` writes to a local path: `storage_options` is not supported.")
        path = Path(self.broadcast(path))
        sharded, rest = state_dicts(state, whole=not self._save_distributed_checkpoint, keep=filter or {})
        if self._save_distributed_checkpoint:
            self._saves.folder(path, sharded, rest)
        else:
            self._saves.file(sharded | rest, partial(save_file, path))

    @override
    def load_checkpoint(
        self,
        path: str | Path,
        state: nn.Module | Optimizer | dict[str, nn.Module | Optimizer | Any] | None = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        if not state or isinstance(state, Optimizer):
            raise ValueError(
                "What is loaded needs a model to go into: pass it as `fabric.load(path, {'model': model, ...})`, or to"
                " `fabric.load_raw(path, model)`."
            )
        self.wait_for_save()
        weights_only = self._resolve_weights_only(weights_only)
        path = Path(self.broadcast(path))
        if isinstance(state, nn.Module):
            load_weights(path, state, strict, weights_only)
            return {}
        modules = {key: value for key, value in state.items() if isinstance(value, nn.Module)}
        optimizers = {key: value for key, value in state.items() if isinstance(value, Optimizer)}
        wanted = state.keys() - modules.keys() - optimizers.keys()
        rest = load_checkpoint(path, modules, optimizers, strict, weights_only, wanted)
        for key in wanted & rest.keys():
            value = rest.pop(key)
            if hasattr(state[key], "load_state_dict"):
                state[key].load_state_dict(value)
            else:
                state[key] = value
        return rest


class _SyncControl(BackwardSyncControl):
    @override
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return no_gradient_sync(module, enabled)


FABRIC_REGISTRY.register(
    "chunked_ep", ChunkedEPStrategy, description="Expert parallelism in overlapped chunks of tokens"
)
