"""What the strategy does in both frameworks: arguments, mesh, parallelization, gradient sync. It knows torch, not Lightning."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.constants import default_pg_timeout
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from lightning_moe.dispatch.select import DispatcherName, check_dispatcher_name, select_dispatcher
from lightning_moe.models.rotary import keep_rotary_in_float32
from lightning_moe.parallel.apply import Parallelism, call_roots, decoder_layers, find_blocks, parallelize
from lightning_moe.parallel.materialize import materialize
from lightning_moe.parallel.mesh import MoEMesh, check_expert_parallel_size, resolve_expert_parallel_size
from lightning_moe.recompute import RecomputePolicy
from lightning_moe.strategies.report import Report

PARAM_DTYPES: dict[str, torch.dtype | None] = {
    "32-true": None,
    "64-true": None,
    "bf16-true": None,
    "bf16-mixed": torch.bfloat16,
}
"""Lightning's precisions that are served -> the dtype that sharded parameters are gathered in (``None``: their own)."""


@dataclass(frozen=True)
class Settings:
    """The arguments that decide how a model is run; see :class:`ExpertParallel`."""

    expert_parallel_size: int | Literal["auto"]
    num_chunks: int
    dispatcher: DispatcherName
    recompute: RecomputePolicy
    reshard_after_forward: bool

    def __post_init__(self) -> None:
        check_expert_parallel_size(self.expert_parallel_size)
        check_dispatcher_name(self.dispatcher)
        if not isinstance(self.num_chunks, int) or isinstance(self.num_chunks, bool) or self.num_chunks < 1:
            raise ValueError(
                f"Expected argument `num_chunks` to be an integer of at least 1 but got {self.num_chunks!r}."
                " 1 is expert parallelism without overlap, 2 a good start."
            )


@dataclass(frozen=True)
class _Done:
    """What was done with a model: enough to recognize it when it is set up again."""

    settings: Settings
    mesh: MoEMesh
    report: Report


# Set-up runs again for every fit, validate, test and predict, and maybe under another Trainer: it must find its own work.
_DONE: WeakKeyDictionary[nn.Module, _Done] = WeakKeyDictionary()


class ExpertParallel:
    """The first base of the public strategy and of both of its flavours; it holds their one signature.

    It is listed first in all three so that an unbound strategy may become either flavour: CPython assigns ``__class__``
    only between classes whose instances have the same layout.
    """

    def __init__(
        self,
        expert_parallel_size: int | Literal["auto"] = "auto",
        num_chunks: int = 2,
        dispatcher: DispatcherName = "auto",
        recompute: str | RecomputePolicy = "none",
        reshard_after_forward: bool = True,
        save_distributed_checkpoint: bool = True,
        weights_only: bool | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        self._arguments: dict[str, Any] = {
            "expert_parallel_size": expert_parallel_size,
            "num_chunks": num_chunks,
            "dispatcher": dispatcher,
            "recompute": recompute,
            "reshard_after_forward": reshard_after_forward,
            "save_distributed_checkpoint": save_distributed_checkpoint,
            "weights_only": weights_only,
            "process_group_backend": process_group_backend,
            "timeout": timeout,
        }
        self._settings = Settings(
            expert_parallel_size, num_chunks, dispatcher, RecomputePolicy.of(recompute), reshard_after_forward
        )
        self._weights_only = weights_only
        self._moe_mesh: MoEMesh | None = None
        self.report: Report | None = None
        self._init_framework(
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )

    def _init_framework(self, **options: Any) -> None:
        """Initialize Lightning's base class."""
        raise NotImplementedError

    def _check_precision(self, precision: str) -> None:
        if precision not in PARAM_DTYPES:
            raise ValueError(
                f"`{type(self).__name__}` does not support `precision={precision!r}`."
                f" Choose one of {', '.join(map(repr, PARAM_DTYPES))}."
            )

    def _open_mesh(self, device_type: str, world_size: int, ranks_per_host: int, expert_counts: list[int]) -> MoEMesh:
        """The mesh, built on first use: with ``"auto"`` its shape is known only once the model is."""
        size = resolve_expert_parallel_size(
            self._settings.expert_parallel_size, world_size, ranks_per_host, expert_counts
        )
        if self._moe_mesh is None:
            self._moe_mesh = MoEMesh.build(device_type, world_size, size)
        return self._moe_mesh

    def _parallelize(
        self,
        module: nn.Module,
        roots: list[nn.Module],
        precision: str,
        device: torch.device,
        world_size: int,
        ranks_per_host: int,
    ) -> bool:
        """Make a model expert-parallel, in place. Everything that can be refused is refused before the first collective.

        Returns:
            Whether there was anything to do: a model that was set up before under the same settings stays as it is.

        """
        if (done := _DONE.get(module)) is not None:
            if done.settings != self._settings:
                raise ValueError(
                    f"This `{type(module).__name__}` was already set up with {done.settings}, and cannot be set up again with"
                    f" {self._settings}. Build a new model, or use the same arguments."
                )
            self._moe_mesh, self.report = done.mesh, done.report
            return False
        self._check_precision(precision)
        blocks = find_blocks(module)
        expert_counts = [block.layer.experts.num_experts for block in blocks]
        mesh = self._open_mesh(device.type, world_size, ranks_per_host, expert_counts)
        choice = select_dispatcher(self._settings.dispatcher, mesh.expert_parallel_group, device)
        how = Parallelism(
            mesh,
            choice,
            self._settings.num_chunks,
            self._settings.recompute,
            PARAM_DTYPES[precision],
            self._settings.reshard_after_forward,
        )
        keep_rotary_in_float32(module)
        parallelize(roots, blocks, how)
        materialize(module, device)
        self.report = Report.of(blocks, how, sum(len(decoder_layers(root)) for root in roots), precision)
        _DONE[module] = _Done(self._settings, mesh, self.report)
        return True


def is_parallelized(module: nn.Module) -> bool:
    """Whether a strategy of this package has set the module up."""
    return module in _DONE


def roots_below(module: nn.Module) -> list[nn.Module]:
    """The roots of a module whose own ``forward`` is not what runs, such as a ``LightningModule``.

    Raises:
        TypeError: It owns parameters itself, which no root would hold.

    """
    own = [name for name, _ in module.named_parameters(recurse=False)]
    if own:
        raise TypeError(
            f"`{type(module).__name__}` owns the parameters {', '.join(map(repr, own))} directly. Its submodules are sharded,"
            " and it is not: move these parameters into a submodule."
        )
    return call_roots(module)


@contextmanager
def no_gradient_sync(module: nn.Module, enabled: bool = True) -> Iterator[None]:
    """Accumulate gradients locally inside the context; they are reduced again after it, whatever happened in it."""
    sharded = [submodule for submodule in module.modules() if isinstance(submodule, FSDPModule)]
    for submodule in sharded:
        submodule.set_requires_gradient_sync(not enabled, recurse=False)
    try:
        yield
    finally:
        for submodule in sharded:
            submodule.set_requires_gradient_sync(True, recurse=False)


def remap_optimizers(optimizers: list[Optimizer], old_names: dict[int, str], module: nn.Module) -> None:
    """Point optimizers that were built before sharding at the sharded parameters of the same names.

    Args:
        optimizers: Changed in place.
        old_names: ``id`` of each parameter before sharding -> its name.
        module: The sharded module.

    Raises:
        ValueError: An optimizer has state already, or holds a parameter that is not of this module.

    """
    new = dict(module.named_parameters())
    current = {id(parameter) for parameter in new.values()}
    for optimizer in optimizers:
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if all(id(parameter) in current for parameter in held):
            continue  # built after sharding
        if optimizer.state:
            raise ValueError(
                f"The `{type(optimizer).__name__}` has state for parameters that have just been sharded. Set up the model and"
                " the optimizer before the first `step()`, and load optimizer state afterwards, with `fabric.load`."
            )
        if any(id(parameter) not in old_names for parameter in held):
            raise ValueError(
                f"The `{type(optimizer).__name__}` holds parameters that are not in the model it is set up"
                " with. Build it from that model's `parameters()`, or set up the model first with"
                " `fabric.setup_module(model)`, then build the optimizer, then `fabric.setup_optimizers(optimizer)`."
            )
        for group in optimizer.param_groups:
            group["params"] = [new[old_names[id(parameter)]] for parameter in group["params"]]
