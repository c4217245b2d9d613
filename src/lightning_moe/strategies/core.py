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

from lightning_moe.checkpoint.background import Saves
from lightning_moe.checkpoint.from_huggingface import load_due
from lightning_moe.checkpoint.ranks import on_all_ranks
from lightning_moe.dispatch.select import DispatcherName, check_dispatcher_name, select_dispatcher
from lightning_moe.models import Block
from lightning_moe.models.rotary import keep_rotary_in_float32
from lightning_moe.overlap.gradient_sums import GradientSum
from lightning_moe.parallel.apply import Parallelism, find_blocks, parallelize, reshard
from lightning_moe.parallel.checks import refuse_mixed_dtypes, refuse_sizes
from lightning_moe.parallel.materialize import materialize
from lightning_moe.parallel.mesh import MoEMesh, check_expert_parallel_size, resolve_expert_parallel_size
from lightning_moe.parallel.recompute import count_parts, refuse_recompute
from lightning_moe.parallel.units import decoder_layers, sharded_modules, unreplicated_experts
from lightning_moe.recompute import RecomputePolicy
from lightning_moe.strategies.agreement import agree, arguments, parameters, versions
from lightning_moe.strategies.environment import warn_about_environment
from lightning_moe.strategies.report import Report

PARAM_DTYPES: dict[str, torch.dtype | None] = {
    "32-true": None,
    "64-true": None,
    "bf16-true": None,
    "bf16-mixed": torch.bfloat16,
}
"""Lightning's precisions that are served -> the dtype that parameters are gathered and computed in (``None``: their own)."""


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
    precision: str
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
        recompute: str | list[str] | RecomputePolicy = "none",
        reshard_after_forward: bool = True,
        save_distributed_checkpoint: bool = True,
        save_asynchronously: bool = False,
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
            "save_asynchronously": save_asynchronously,
            "weights_only": weights_only,
            "process_group_backend": process_group_backend,
            "timeout": timeout,
        }
        self._settings = Settings(
            expert_parallel_size, num_chunks, dispatcher, RecomputePolicy.of(recompute), reshard_after_forward
        )
        self._weights_only = weights_only
        self._saves = Saves(save_asynchronously, timeout)
        self._meshes: dict[int, MoEMesh] = {}
        self._moe_mesh: MoEMesh | None = None  # of the model that was set up last
        self.report: Report | None = None
        self._init_framework(
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )

    def _init_framework(self, **options: Any) -> None:
        """Initialize Lightning's base class."""
        raise NotImplementedError

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Every rank has its own data."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}  # type: ignore[attr-defined]

    def wait_for_save(self) -> None:
        """Return once checkpoints that are being saved in the background are complete.

        Raises:
            Exception: One of them could not be saved.

        """
        self._saves.wait()

    def _resolve_weights_only(self, weights_only: bool | None) -> bool:
        """What the caller said, or else the strategy's own argument, or else the safe way."""
        return next((said for said in (weights_only, self._weights_only) if said is not None), True)

    def _check_precision(self, precision: str) -> None:
        if precision not in PARAM_DTYPES:
            raise ValueError(
                f"`{type(self).__name__}` does not support `precision={precision!r}`."
                f" Choose one of {', '.join(map(repr, PARAM_DTYPES))}."
            )

    def _agree_on_arguments(self, precision: str) -> None:
        """Raise a ``ValueError`` on every rank if ranks have different arguments or packages; collective over all ranks."""
        resolved = self._arguments | {"recompute": self._settings.recompute}
        agree(arguments(resolved, precision), versions())

    def _open_mesh(self, device_type: str, world_size: int, ranks_per_host: int, blocks: list[Block]) -> MoEMesh:
        """The mesh, built on first use: with ``"auto"`` its shape is known only once the model is."""
        counts = [block.layer.experts.num_experts for block in blocks]
        size = resolve_expert_parallel_size(self._settings.expert_parallel_size, world_size, ranks_per_host, counts)
        refuse_sizes(blocks, size, world_size)
        if size not in self._meshes:  # "auto" may find another size for another model
            self._meshes[size] = MoEMesh.build(device_type, world_size, size)
        self._moe_mesh = self._meshes[size]
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
        """Make a model expert-parallel, in place.

        What can be refused is refused before anything is sharded, on all ranks: digests of the model are all that is exchanged
        until then. A model that is refused may have its MoE blocks replaced already, by ones that give the same.

        Returns:
            Whether there was anything to do: a model that was set up before under the same settings stays as it is.

        """
        if (done := _DONE.get(module)) is not None:
            if (done.settings, done.precision) != (self._settings, precision):
                raise ValueError(
                    f"This model was already set up with {done.settings} and precision {done.precision!r}, and cannot be set up"
                    f" again with {self._settings} and precision {precision!r}. Build a new model, or use the same arguments."
                )
            self._moe_mesh, self.report = done.mesh, done.report
            return False
        agree(parameters(module))
        with on_all_ranks():
            self._check_precision(precision)
            blocks = find_blocks(module)
            refuse_mixed_dtypes(roots)
            refuse_recompute(roots, self._settings.recompute)
        mesh = self._open_mesh(device.type, world_size, ranks_per_host, blocks)
        timeout: timedelta | None = self._arguments["timeout"]
        dtype = PARAM_DTYPES[precision] or blocks[0].layer.experts.gate_up_proj.dtype
        choice = select_dispatcher(self._settings.dispatcher, mesh.expert_parallel_group, device, timeout, dtype)
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
        load_due(module)
        num_units, recomputed = sum(len(decoder_layers(root)) for root in roots), count_parts(roots, how.recompute)
        self.report = Report.of(blocks, how, num_units, recomputed, precision)
        warn_about_environment(mesh.expert_parallel_group, device)
        _refuse_save_pretrained(module)
        _DONE[module] = _Done(self._settings, precision, mesh, self.report)
        return True


def drop_stale_parameters() -> None:
    """After a step, what an earlier forward gathered of the parameters is out of date: give it back."""
    for module in list(_DONE):
        reshard(module)


def is_parallelized(module: nn.Module) -> bool:
    """Whether a strategy of this package has set the module up."""
    return module in _DONE


def _refuse_save_pretrained(model: nn.Module) -> None:
    """Hugging Face's method would write a folder with weights missing, on one rank alone."""

    def save_pretrained(*_: Any, **__: Any) -> None:
        raise RuntimeError(
            "`save_pretrained` cannot save a model whose weights are sharded. Call"
            " `lightning_moe.save_huggingface(model, path)` on all ranks instead: it writes what transformers'"
            " `from_pretrained` loads."
        )

    for module in model.modules():
        if hasattr(module, "save_pretrained"):
            module.save_pretrained = save_pretrained  # type: ignore[assignment]


@contextmanager
def no_gradient_sync(module: nn.Module, enabled: bool = True) -> Iterator[None]:
    """Accumulate gradients locally inside the context; they are reduced again after it, whatever happened in it.

    Until a backward outside of it, no parameter's ``grad`` has them, and ``zero_grad()`` does not drop them.
    """
    sharded = sharded_modules(module)
    sums = [held for experts in unreplicated_experts(module) for held in experts.gradient_sums or ()]
    _accumulate_locally(sharded, sums, enabled)
    try:
        yield
    finally:
        _accumulate_locally(sharded, sums, False)


def _accumulate_locally(sharded: list[FSDPModule], sums: list[GradientSum], locally: bool) -> None:
    for submodule in sharded:
        submodule.set_requires_gradient_sync(not locally, recurse=False)
    for held in sums:
        held.holds = locally


def refuse_optimizers(optimizers: list[Optimizer], module: nn.Module) -> None:
    """Raise a ``ValueError`` if an optimizer could not follow its parameters when the module is sharded."""
    known = {id(parameter) for parameter in module.parameters()}
    for optimizer in optimizers:
        if any(id(parameter) not in known for group in optimizer.param_groups for parameter in group["params"]):
            raise ValueError(
                f"The `{type(optimizer).__name__}` holds parameters that are not in the model it is set up with. Build it from"
                " that model's `parameters()`."
            )
        if optimizer.state and not is_parallelized(module):
            raise ValueError(
                f"The `{type(optimizer).__name__}` has made steps already, and its state cannot follow parameters into"
                " their shards. Set up model and optimizer before the first `step()`, and load state with `fabric.load`."
            )


def remap_optimizers(optimizers: list[Optimizer], old_names: dict[int, str], module: nn.Module) -> None:
    """Point optimizers that were built before sharding at the sharded parameters of the same names.

    Args:
        optimizers: Changed in place.
        old_names: ``id`` of each parameter before the set-up -> its name.
        module: The sharded module.

    """
    new = dict(module.named_parameters())
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [new[old_names[id(parameter)]] for parameter in group["params"]]
