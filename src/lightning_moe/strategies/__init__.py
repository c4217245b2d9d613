"""One strategy for ``Trainer`` and ``Fabric``.

Both frameworks want an instance of their own ``Strategy`` class, and the two classes share no base. So the public
:class:`ChunkedEPStrategy` is a recipe that both accept: it stores its arguments, and when a framework hands it a precision
plugin (each assigns its own attribute, once, before anything else is asked of the strategy), it becomes that framework's
flavour. From then on it *is* a plain Trainer or Fabric strategy.
"""

from __future__ import annotations

from abc import ABCMeta
from typing import Any, NoReturn

from lightning_moe._compat import FabricParallelStrategy, PytorchParallelStrategy
from lightning_moe.strategies import fabric, pytorch
from lightning_moe.strategies.core import ExpertParallel

__all__ = ["ChunkedEPStrategy"]


class _EitherFlavour(ABCMeta):
    def __instancecheck__(cls, instance: Any) -> bool:  # isinstance only; issubclass stays strict
        flavours = (fabric.ChunkedEPStrategy, pytorch.ChunkedEPStrategy)
        return super().__instancecheck__(instance) or isinstance(instance, flavours)


def _not_attached(self: Any, *_: Any, **__: Any) -> NoReturn:
    raise RuntimeError(
        "This `ChunkedEPStrategy` is not attached yet. Pass it to `Trainer(strategy=...)` or `Fabric(strategy=...)`."
    )


class ChunkedEPStrategy(ExpertParallel, PytorchParallelStrategy, FabricParallelStrategy, metaclass=_EitherFlavour):  # type: ignore[misc]
    """Expert parallelism for mixture-of-experts models, with its communication hidden behind compute, chunk by chunk.

    The strategy finds the MoE blocks of the model, shards their experts over groups of processes, trains all other
    parameters with FSDP2 over all processes, and gives every process its own data.

    Args:
        expert_parallel_size: Processes that share one set of experts. ``"auto"`` is the largest number that divides the
            processes and the number of experts and stays on one host.
        num_chunks: With balanced routing, at most this part (one half, one third, ...) of an MoE layer's rows is worked on at
            once, while the next rows are dispatched and the last ones combined. 1 is expert parallelism without overlap.
        dispatcher: What moves the tokens: ``"local"`` (one process holds all experts), ``"nvlink"`` (copies between GPUs of one
            host), ``"deep_ep"`` (DeepEP between them, in bfloat16), ``"all_to_all"`` (gloo or NCCL), or ``"auto"``, the first
            of these that fits; ``"deep_ep"``, which was slower than ``"nvlink"`` wherever it ran, only where it is named.
        recompute: What backward computes again instead of keeping it: ``"none"``, ``"selective"``, ``"full"``, a list of names
            such as ``["norm", "moe_act"]``, or a ``RecomputePolicy``.
        reshard_after_forward: Free a layer's gathered parameters after its forward, and gather them again in backward. Experts
            that one process alone holds are not gathered.
        save_distributed_checkpoint: Save a folder with one file for each process (``True``) or a single file.
        save_asynchronously: Copy what is saved to the CPU and write it beside training. The next save or load, and the end of
            the Trainer's run, wait for it; ``wait_for_save()`` does so at any time.
        weights_only: ``False`` lets a checkpoint hold objects that only pickle restores, where the caller does not say. Loading
            them may run any code: only from files that you trust.
        process_group_backend: Backend of ``torch.distributed``; by default the one that fits the device.
        timeout: How long a process waits for the others before it gives up.

    """

    def _init_framework(self, **_: Any) -> None:
        PytorchParallelStrategy.__init__(self)
        FabricParallelStrategy.__init__(self)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        raise TypeError(
            "Subclass `lightning_moe.strategies.pytorch.ChunkedEPStrategy` or `.fabric.ChunkedEPStrategy` instead: this class"
            " becomes one of them, and would lose what a subclass overrides."
        )

    @property
    def precision(self) -> Any:
        return self._precision

    @precision.setter
    def precision(self, precision: Any) -> None:
        if precision is None:
            self._precision = None
        else:
            self._check_precision(precision.precision)
            self._become(fabric.ChunkedEPStrategy)
            self.precision = precision

    @property
    def precision_plugin(self) -> Any:
        return self._precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Any) -> None:
        if precision_plugin is None:
            self._precision_plugin = None
        else:
            self._check_precision(precision_plugin.precision)
            self._become(pytorch.ChunkedEPStrategy)
            self.precision_plugin = precision_plugin

    def _become(self, flavour: type[ExpertParallel]) -> None:
        arguments, accelerator = self._arguments, self._accelerator
        self.__dict__.clear()
        self.__class__ = flavour  # type: ignore[assignment]
        flavour.__init__(self, **arguments)
        if accelerator is not None:
            self.accelerator = accelerator

    # Both connectors assign a precision plugin before they configure the launcher: if that changes, it is said at once.
    _configure_launcher = _not_attached
    root_device = is_global_zero = property(_not_attached)
    model_to_device = module_to_device = reduce = all_reduce = barrier = broadcast = all_gather = _not_attached
