"""Offloading as callbacks of the Trainer and of Fabric; the engines are in :mod:`lightning_moe.offload`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_moe._compat import LightningModule, Trainer, rank_zero_warn
from lightning_moe.callbacks.anywhere import Anywhere, unwrapped
from lightning_moe.offload import ActivationOffloader, ModelOffloader
from lightning_moe.offload.copies import empty_host_cache
from lightning_moe.offload.selection import NothingToOffloadError


class _Offload(Anywhere):
    """How both callbacks end, whatever happens."""

    def detach(self) -> None:
        """Leave nothing behind."""
        raise NotImplementedError

    @override
    def on_exception(self, *_: Any, **__: Any) -> None:
        # `teardown` is not called then; and where the device fails or is full, the other callbacks and the strategy come first
        with suppress(RuntimeError):
            self.detach()

    @override
    def teardown(self, *_: Any, **__: Any) -> None:
        self.detach()


class ActivationOffload(_Offload):
    """Keeps in pinned host memory what a model's layers save for backward: copied out and fetched back beside the compute.

    For any strategy. Gradients are the same to the bit. With the Trainer it works from the beginning of a fit to its end; with
    Fabric, from ``fabric.setup(model, ...)`` on, for every model that is set up and has such layers; after
    ``fabric.setup_module(model)``, call :meth:`attach`.

    On a CPU the same copies are made, which saves nothing.

    Args:
        modules: The layers, by names as in ``named_modules()`` in which ``*`` stands for one part: ``"model.layers.*"``, say.
            See :class:`~lightning_moe.offload.ActivationOffloader`, also for tensors inside the routed experts. By default
            the items of the model's module lists.
        min_bytes: Smaller tensors stay.
        prefetch: How many layers ahead of backward their tensors return. Each takes one layer's memory.
        fraction: The part of the bytes that is moved: less than 1 where the link is too slow for all of them.

    Raises:
        ValueError: A number is out of its range; and, as the fit begins, where a name fits no module. With Fabric that is a
            warning: another model may have it.

    Example::

        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(accelerator="cpu", logger=False, callbacks=[ActivationOffload("model.layers.*", fraction=0.5)])

    """

    def __init__(
        self,
        modules: str | Sequence[str] | None = None,
        min_bytes: int = 1 << 20,
        prefetch: int = 1,
        fraction: float = 1.0,
    ) -> None:
        self.offloader = ActivationOffloader(modules, min_bytes, prefetch, fraction)

    def attach(self, model: nn.Module) -> None:
        """Begin with one more model, which may be wrapped by Fabric. The same model again changes nothing."""
        self.offloader.attach(unwrapped(model))
        if not any(parameter.is_cuda for parameter in model.parameters()):
            rank_zero_warn(
                f"`{type(self).__name__}` saves no memory on a CPU: what it copies is in host memory already."
            )

    @override
    def detach(self) -> None:
        """End: no hook, stream or host memory is left."""
        self.offloader.detach()

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.attach(pl_module)

    @override
    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.detach()

    def on_after_setup(self, fabric: Any, module: nn.Module) -> None:
        """Is called by Fabric."""
        try:
            self.attach(module)
        except NothingToOffloadError as error:  # a critic beside the policy that is meant, say
            rank_zero_warn(f"`{type(self).__name__}` passes a model over: {error}")


class ModelOffload(_Offload):
    """Moves models, their gradients and the optimizers' state to the host between phases, and back.

    At hooks of your choice, or by calling :meth:`offload` and :meth:`reload` on every process. Training goes on to the bit as
    if nothing had happened. For any strategy; see :class:`~lightning_moe.offload.ModelOffloader`.

    In between nothing may use the model: where it leaves for the time of validation, as below, another engine has to do what
    ``validation_step`` is for, since calling the model there is an error.

    With the Trainer it knows the model and the optimizers. With Fabric it knows a model from
    ``fabric.setup(model, ...)`` on, and an optimizer from its first step on; :meth:`attach` tells it earlier. There the hooks
    are the names that ``fabric.call`` is given.

    Args:
        offload_at: Hooks at which the model leaves, such as ``"on_validation_start"``.
        reload_at: Hooks at which it returns.

    Raises:
        ValueError: A hook is this callback's own, or the same in both; and, as the Trainer sets up, where the Trainer has
            none of that name.

    Example::

        >>> callback = ModelOffload("on_validation_start", "on_validation_end")

    """

    def __init__(self, offload_at: str | Sequence[str] = (), reload_at: str | Sequence[str] = ()) -> None:
        leave, come_back = ([at] if isinstance(at, str) else list(at) for at in (offload_at, reload_at))
        own = set(vars(ModelOffload)) | set(vars(_Offload)) | (set(leave) & set(come_back))
        for hook in (*leave, *come_back):
            if hook in own:
                raise ValueError(f"`{type(self).__name__}` cannot offload or reload at {hook!r}: choose another hook.")
        self._hooks = [*leave, *come_back]
        self._offloader: ModelOffloader | None = None
        for hook in leave:
            setattr(self, hook, self._on_leave)
        for hook in come_back:
            setattr(self, hook, self._on_come_back)

    def attach(self, model: nn.Module, optimizers: Sequence[Optimizer] = ()) -> None:
        """Say what else is to be moved. Models and optimizers may be wrapped by Fabric; known ones change nothing."""
        if self._offloader is None:
            self._offloader = ModelOffloader(unwrapped(model))
        self._offloader.add_module(unwrapped(model))
        for optimizer in optimizers:
            self._offloader.add_optimizer(getattr(optimizer, "optimizer", optimizer))

    @override
    def detach(self) -> None:
        """Bring back what is away, and forget all models.

        Where that fails, they are not forgotten: the host has what is still away, and :meth:`reload` may be called again.
        """
        if self._offloader is not None:
            self._offloader.reload()
            self._offloader = None
            empty_host_cache()

    def offload(self) -> None:
        """Move everything to the host; see :meth:`~lightning_moe.offload.ModelOffloader.offload`. Collective."""
        self._attached().offload()

    def reload(self) -> None:
        """Bring everything back."""
        self._attached().reload()

    def _attached(self) -> ModelOffloader:
        if self._offloader is None:
            raise RuntimeError(
                f"`{type(self).__name__}` knows no model yet: it does from `on_fit_start` of the Trainer on, after"
                " `fabric.setup(model, optimizer)`, or after `attach(model, optimizers)`."
            )
        return self._offloader

    def _on_leave(self, *args: Any, **_: Any) -> None:
        if self._offloader is None and args and isinstance(args[0], Trainer):  # no fit, but an evaluation alone
            self.attach(args[1])
        self.offload()

    def _on_come_back(self, *_: Any, **__: Any) -> None:
        if self._offloader is not None:
            self.reload()

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        for hook in self._hooks:
            if not hook.startswith("on_") or not hasattr(Anywhere, hook):
                raise ValueError(f"`{type(self).__name__}` is to act at {hook!r}, but the Trainer has no such hook.")

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._offloader is not None:  # a run before this one may have ended with something still away
            self._offloader.reload()
        self.attach(pl_module, trainer.optimizers)

    def on_after_setup(self, fabric: Any, module: nn.Module) -> None:
        """Is called by Fabric."""
        if next(module.parameters(), None) is not None:
            self.attach(module)

    def on_after_optimizer_step(self, strategy: Any, optimizer: Optimizer) -> None:
        """Is called by Fabric."""
        if self._offloader is not None:
            self._offloader.add_optimizer(optimizer)
