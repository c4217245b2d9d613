"""Whose the bytes are: storages counted once, by who holds them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_moe.buffers import held_bytes
from lightning_moe.ops.local import local_part

OUTSIDE = "communication"
"""What communication holds lies beside the caching allocator: symmetric memory, DeepEP's buffers."""
CATEGORIES = ("parameters", "gradients", "optimizer_state", "expert_activations", "arena", "rest", OUTSIDE)
TEMPORARY = "temporary"
"""What a phase had at its peak beyond what it held at either end."""


class Owners:
    """Modules, their optimizers, and what the routed experts keep for backward; it keeps none of them alive.

    Args:
        device: Only what lies there is counted.

    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._modules: list[weakref.ref[nn.Module]] = []
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._kept: list[StorageWeakRef] = []

    def add_module(self, module: nn.Module) -> None:
        """Count its parameters, buffers and gradients."""
        self._modules.append(weakref.ref(module))

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Count its state."""
        self._optimizers.add(optimizer)

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors as the experts' activations, for as long as somebody else holds their storages."""
        # a weak reference keeps the storage's number from being given away again
        self._kept += [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]  # type: ignore[no-untyped-call]

    def forget_freed(self) -> None:
        """Drop what has been freed of the activations."""
        self._kept = [reference for reference in self._kept if not reference.expired()]  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def held(self, used: int) -> dict[str, int]:
        """Bytes by category; all but :data:`OUTSIDE` sum to ``used``.

        ``parameters`` includes buffers and what FSDP2 has gathered, ``gradients`` also those that it has not reduced yet.
        """
        modules = [module for reference in self._modules if (module := reference()) is not None]
        parameters = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
        unreduced = []
        for parameter in (parameter for module in modules for parameter in _sharded_parameters(module)):
            gathered = getattr(parameter, "_unsharded_param", None)
            parameters += [parameter.sharded_param] if gathered is None else [parameter.sharded_param, gathered]
            unreduced.append(parameter.unsharded_accumulated_grad)
        states = [state for optimizer in self._optimizers for state in optimizer.state.values()]
        buffers, seen = held_bytes(), set[int]()
        held = {
            "parameters": self._count(parameters, seen),
            "gradients": self._count([*(p.grad for p in parameters if p.is_leaf), *unreduced], seen),
            "optimizer_state": self._count([leaf for state in states for leaf in _leaves(state)], seen),
            "expert_activations": self._count_kept(seen),
            "arena": buffers.get("arena", 0),
        }
        return held | {"rest": used - sum(held.values()), OUTSIDE: buffers.get(OUTSIDE, 0)}

    def _count(self, tensors: Iterable[Tensor | None], seen: set[int]) -> int:
        total = 0
        for tensor in tensors:
            if tensor is None or tensor.device != self._device:
                continue
            storage = local_part(tensor).untyped_storage()
            if storage._cdata not in seen:
                seen.add(storage._cdata)
                total += storage.nbytes()
        return total

    def _count_kept(self, seen: set[int]) -> int:
        total = 0
        for cdata in {reference.cdata for reference in self._kept} - seen:
            storage = torch.UntypedStorage._new_with_weak_ptr(cdata)
            if storage is not None and storage.device == self._device:
                total += storage.nbytes()
        return total


def _sharded_parameters(module: nn.Module) -> Iterator[Any]:
    """What FSDP2 knows of each parameter: beside the one that the module shows there may be a gathered and a sharded one."""
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            state: Any = unit._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.11 has one at most
            for group in [state._fsdp_param_group] if groups is None else groups:
                yield from [] if group is None else group.fsdp_params


def _leaves(state: Any) -> list[Tensor]:
    values = state.values() if isinstance(state, dict) else [state]
    found = [value for value in values if isinstance(value, Tensor)]
    nested = [value for value in values if isinstance(value, (list, tuple, dict))]
    return found + [leaf for leaf in tree_leaves(nested) if isinstance(leaf, Tensor)]
