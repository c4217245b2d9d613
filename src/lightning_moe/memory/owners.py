"""Whose the bytes are: storages counted once, by who holds them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_moe.buffers import held_bytes
from lightning_moe.ops.local import local_part, sharded_parameters
from lightning_moe.overlap.gradient_sums import held_gradients

Referent = TypeVar("Referent")

OUTSIDE = "communication"
"""What communication holds lies beside the caching allocator: symmetric memory, DeepEP's buffers."""
CATEGORIES = ("parameters", "gradients", "optimizer_state", "expert_activations", "rest", OUTSIDE)
TEMPORARY = "temporary"
"""What a phase had at its peak beyond what it held at either end."""


class Owners:
    """Modules, their optimizers, and what the routed experts keep for backward; it keeps none of them alive.

    Args:
        device: Only what lies there is counted.

    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._modules: list[weakref.ref[nn.Module]] = []  # all that hold tensors themselves: walking a model takes long
        self._units: list[weakref.ref[FSDPModule]] = []
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._kept: list[StorageWeakRef] = []

    def add_module(self, module: nn.Module) -> None:
        """Count its parameters, buffers and gradients, those of the modules that it has now."""
        self._modules += [weakref.ref(child) for child in module.modules() if child._parameters or child._buffers]
        self._units += [weakref.ref(child) for child in module.modules() if isinstance(child, FSDPModule)]

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

        ``parameters`` includes buffers and what FSDP2 has gathered, ``gradients`` also those of micro-batches before the last.
        """
        parameters: list[Tensor | None] = []
        for module in _alive(self._modules):
            parameters += [*module._parameters.values(), *module._buffers.values()]
        unreduced = list(held_gradients(_alive(self._modules)))
        for parameter in sharded_parameters(_alive(self._units)):
            parameters += [parameter.sharded_param, getattr(parameter, "_unsharded_param", None)]
            unreduced.append(parameter.unsharded_accumulated_grad)
        grads = [parameter.grad for parameter in parameters if parameter is not None and parameter.is_leaf]
        states = [state for optimizer in self._optimizers for state in optimizer.state.values()]
        seen = set[int]()
        held = {
            "parameters": self._count(parameters, seen),
            "gradients": self._count([*grads, *unreduced], seen),
            "optimizer_state": self._count([leaf for state in states for leaf in _leaves(state)], seen),
            "expert_activations": self._count_kept(seen),
        }
        return held | {"rest": used - sum(held.values()), OUTSIDE: held_bytes().get(OUTSIDE, 0)}

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


def _alive(references: Iterable[weakref.ref[Referent]]) -> Iterator[Referent]:
    return (referent for reference in references if (referent := reference()) is not None)


def _leaves(state: Any) -> list[Tensor]:
    values = state.values() if isinstance(state, dict) else [state]
    found = [value for value in values if isinstance(value, Tensor)]
    if len(found) < len(values):
        nested = [value for value in values if isinstance(value, (list, tuple, dict))]
        found += [leaf for leaf in tree_leaves(nested) if isinstance(leaf, Tensor)]
    return found
