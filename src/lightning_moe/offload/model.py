"""A model that leaves the device between two phases of training, and comes back as it was.

What moves is memory, beneath the tensors: each storage is copied to the host and emptied, and later filled again. So every
parameter, gradient and optimizer state stays the object that it was, and so does what aliases it: the shards inside a DTensor,
FSDP's own views, tied weights. Nothing here knows who they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_moe.buffers import release_buffers
from lightning_moe.offload.copies import as_bytes
from lightning_moe.ops.local import local_part, sharded_parameters
from lightning_moe.overlap.gradient_sums import held_gradients


class ModelOffloader:
    """Moves models' parameters, gradients and optimizer state to the host, and back.

    Training after :meth:`reload` goes on to the bit as if nothing had happened, between micro-batches too: gradients that wait
    for the last of them move as well. While they are away, the models' forward, their state dicts and the optimizers' steps are
    errors, and reading a parameter directly reads memory that is not there: take what another engine needs before.

    Args:
        module: Set up, sharded and on its device.
        optimizers: Those that hold its parameters.

    Example::

        >>> model = nn.Linear(2, 2)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> offloader = ModelOffloader(model, [optimizer])
        >>> with offloader.offloaded():
        ...     model.weight.untyped_storage().nbytes()
        0
        >>> model(torch.zeros(2)).shape
        torch.Size([2])

    """

    def __init__(self, module: nn.Module, optimizers: Iterable[Optimizer] = ()) -> None:
        self._modules, self._optimizers = [module], list(optimizers)
        self._away: list[_Away] = []
        self._guards: list[Any] = []

    @property
    def is_offloaded(self) -> bool:
        """Whether the model is on the host."""
        return bool(self._guards)

    def add_module(self, module: nn.Module) -> None:
        """One more, if it is not known yet. While the others are away it stays: it leaves with them the next time."""
        if all(module is not known for known in self._modules):
            self._modules.append(module)

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """One more that holds the models' parameters, if it is not known yet."""
        if all(optimizer is not known for known in self._optimizers):
            self._optimizers.append(optimizer)

    @torch.no_grad()
    def offload(self) -> None:
        """Move everything to the host, and give back all that is held between calls. Collective; again, it does nothing.

        Gathered parameters are given up first. Between forward and backward of one step, saved activations stay.

        Raises:
            ValueError: A parameter is still on the meta device.

        """
        if self.is_offloaded:
            return
        for module in self._modules:
            _refuse_meta(module)
        release_buffers()
        for unit in self._units():
            unit.reshard()
        self._guards = _guards(self._modules, self._optimizers)
        devices = {local_part(parameter).device for parameter in self._parameters()}
        try:
            for storage in _storages(self._tensors(), devices):
                self._away.append(_Away.of(storage))
        except BaseException:
            self.reload()
            raise
        if any(gone.storage.device.type == "cuda" for gone in self._away):
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # for whoever else uses the device

    @torch.no_grad()
    def reload(self) -> None:
        """Bring everything back to where it was. Where nothing is away, it does nothing.

        Where it fails, for want of memory, say, nothing is lost: what is still away comes with the next call.
        """
        while self._away:
            self._away[-1].come_back()
            self._away.pop()
        for guard in self._guards:
            guard.remove()
        self._guards = []

    @contextmanager
    def offloaded(self) -> Iterator[None]:
        """Offload for the time of a ``with`` block."""
        self.offload()
        try:
            yield
        finally:
            self.reload()

    def _units(self) -> list[FSDPModule]:
        return [unit for module in self._modules for unit in module.modules() if isinstance(unit, FSDPModule)]

    def _parameters(self) -> Iterator[nn.Parameter]:
        return (parameter for module in self._modules for parameter in module.parameters())

    def _tensors(self) -> Iterator[Tensor]:
        for parameter in self._parameters():
            yield parameter
            if parameter.grad is not None:
                yield parameter.grad
        for sharded in sharded_parameters(self._units()):  # between micro-batches their gradients are not reduced yet
            gathered = getattr(sharded, "_unsharded_param", None)
            unreduced = (sharded.unsharded_accumulated_grad, None if gathered is None else gathered.grad)
            yield from (grad for grad in unreduced if grad is not None)
        yield from held_gradients(submodule for module in self._modules for submodule in module.modules())
        for optimizer in self._optimizers:
            for leaf in tree_leaves(list(optimizer.state.values())):
                if isinstance(leaf, Tensor):
                    yield leaf


class _Away(NamedTuple):
    """A storage that was emptied, and its bytes on the host."""

    storage: UntypedStorage
    host: Tensor

    @staticmethod
    def of(storage: UntypedStorage) -> _Away:
        is_cuda = storage.device.type == "cuda"
        host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=is_cuda)
        host.copy_(as_bytes(storage), non_blocking=is_cuda)
        storage.resize_(0)  # its memory is used again after the copy, which is on the same stream
        return _Away(storage, host)

    def come_back(self) -> None:
        self.storage.resize_(self.host.numel())
        as_bytes(self.storage).copy_(self.host, non_blocking=True)  # torch holds pinned memory until the copy is done


def _storages(tensors: Iterable[Tensor], devices: set[torch.device]) -> list[UntypedStorage]:
    """Those that the tensors use on some devices, each once, as far as they can be emptied."""
    found: dict[int, UntypedStorage] = {}
    for tensor in map(local_part, tensors):
        storage = tensor.untyped_storage()
        found.setdefault(storage._cdata, storage)
    return [s for s in found.values() if s.device in devices and s.nbytes() and s.resizable()]


def _guards(modules: Iterable[nn.Module], optimizers: Iterable[Optimizer]) -> list[Any]:
    """Hooks under which using the model is an error instead of a read of freed memory."""
    guards: list[Any] = []
    for submodule in {submodule: None for module in modules for submodule in module.modules()}:
        guards.append(submodule.register_forward_pre_hook(_refuse, prepend=True))
        guards.append(submodule.register_state_dict_pre_hook(_refuse))  # type: ignore[no-untyped-call]
    for optimizer in optimizers:
        guards.append(optimizer.register_step_pre_hook(_refuse))
        guards.append(optimizer.register_state_dict_pre_hook(_refuse))
    return guards


def _refuse(owner: Any, *_: Any) -> None:
    raise RuntimeError(f"`{type(owner).__name__}` cannot be used while the model is offloaded. Call `reload()` first.")


def _refuse_meta(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if parameter.is_meta:
            raise ValueError(
                f"`{name}` is still on the meta device, so there is no device to offload from. Set the model up first."
            )
