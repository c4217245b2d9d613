"""Saved activations that wait for their backward in host memory.

A module's call saves tensors for backward. Here a copy of each leaves for the host on a stream of its own, and the device's
memory is free again as soon as the copy has left; in backward it returns on another stream, ahead of its use. How far ahead,
and how much may still be leaving, is measured in calls: with ``prefetch=1`` never more than one call of the largest layer
is on the device beyond what is being read or written at the moment.

Nothing is learnt from one step for the next: what is saved, in which order and size, is seen as it happens.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from operator import itemgetter
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_moe.offload.copies import CopyLane, HostPool
from lightning_moe.offload.parcel import Lanes, Parcel, Reader, Stays, Unmoved
from lightning_moe.offload.selection import NothingToOffloadError, Target, find_targets
from lightning_moe.ops.local import local_part
from lightning_moe.overlap.kept import kept_name
from lightning_moe.recompute.backward import in_backward
from lightning_moe.recompute.discard import is_discardable


class ActivationOffloader:
    """Offloads what calls of models' modules save for backward, between :meth:`attach` and :meth:`detach`.

    Moved are whole storages, each once, whoever saved it or views of it. What would free nothing stays: parameters, buffers,
    leaves, memory shared between processes, tensors of a subclass such as a DTensor, and outputs that a recompute policy
    discards. A call inside somebody else's hooks for saved tensors, a checkpoint's, say, is left alone.

    Args:
        modules: Names as in ``named_modules()``; ``*`` stands for one part of a name. Their calls are what ``prefetch`` counts,
            so name layers, not the whole model. Behind routed experts, one more part names a tensor that these keep:
            ``"layers.*.mlp.experts.rows"``, ``".gate_up"`` or ``".act"``; see :data:`lightning_moe.overlap.kept.KEPT`. ``None``
            is the items of the model's module lists.
        min_bytes: Smaller storages stay.
        prefetch: How many calls ahead of backward they return; 0 for not before they are read. As many may be on their way out.
        fraction: The part of the bytes that is moved, spread evenly; the others stay.

    Raises:
        ValueError: A number is out of its range.

    Example::

        >>> model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        >>> offloader = ActivationOffloader(["1"], min_bytes=0)
        >>> with offloader.attached(model):
        ...     model(torch.randn(4, 8)).sum().backward()
        >>> offloader.moved_bytes
        128

    """

    def __init__(
        self,
        modules: str | Sequence[str] | None = None,
        min_bytes: int = 1 << 20,
        prefetch: int = 1,
        fraction: float = 1.0,
    ) -> None:
        for name, number in (("min_bytes", min_bytes), ("prefetch", prefetch)):
            if not isinstance(number, int) or isinstance(number, bool) or number < 0:
                raise ValueError(f"Expected argument `{name}` to be an integer of at least 0 but got {number!r}.")
        if not isinstance(fraction, (int, float)) or not 0 <= fraction <= 1:
            raise ValueError(f"Expected argument `fraction` to be a number from 0 to 1 but got {fraction!r}.")
        self.modules = [modules] if isinstance(modules, str) else modules
        self.min_bytes, self.prefetch, self.fraction = min_bytes, prefetch, fraction
        self.moved_bytes = 0
        """Bytes that have left for the host so far, by all calls."""
        self.enabled = True
        """Where it is ``False``, calls pass as if nothing were attached, and host memory is kept for later ones."""
        self._attached: list[_Attached] = []

    def attach(self, model: nn.Module) -> None:
        """Watch a model's modules, beside those of models that are attached already. The same model again changes nothing.

        Args:
            model: On its device, sharded and wrapped already: hooks that gather parameters come first.

        Raises:
            ValueError: A name fits no module or names what is recomputed, or the model is on no device yet.

        """
        if all(attached.model is not model for attached in self._attached):
            self._attached.append(_Attached(model, self))

    def detach(self, model: nn.Module | None = None) -> None:
        """Leave no hook and no stream behind, and no host memory once the last graph is gone, which may still be backwarded.

        After an interrupt in a forward too.

        Args:
            model: The one that is left alone from now on; ``None`` is all.

        """
        leaving = [attached for attached in self._attached if model is None or attached.model is model]
        self._attached = [attached for attached in self._attached if attached not in leaving]
        with ExitStack() as stack:  # all of them, whatever fails
            for attached in leaving:
                stack.callback(attached.close)

    @contextmanager
    def attached(self, model: nn.Module) -> Iterator[None]:
        """Attach for the time of a ``with`` block."""
        self.attach(model)
        try:
            yield
        finally:
            self.detach(model)


class _Attached:
    """One model, and what is hung on it."""

    def __init__(self, model: nn.Module, offloader: ActivationOffloader) -> None:
        targets = find_targets(model, offloader.modules)
        self.model, self.traffic = model, _Traffic(_device_of(model), offloader)
        self._scopes = [_Scope(target, self.traffic) for target in targets]
        self._handles: list[Any] = []
        for target, scope in zip(targets, self._scopes, strict=True):
            self._handles.append(target.module.register_forward_pre_hook(scope.enter))
            self._handles.append(target.module.register_forward_hook(scope.leave, always_call=True))

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        for scope in reversed(self._scopes):
            scope.close()
        self.traffic.close()


class _Scope:
    """Opens hooks for saved tensors around a module's calls."""

    def __init__(self, target: Target, traffic: _Traffic) -> None:
        self._traffic, self._kept = traffic, target.kept
        # the dicts stay, whatever FSDP puts in them
        self._held = [held for m in target.module.modules() for held in (m._parameters, m._buffers) if held]
        self._open: list[tuple[_Call, saved_tensors_hooks] | None] = []

    def enter(self, *_: Any) -> None:
        if not self._traffic.offloader.enabled or _is_left_alone():
            self._open.append(None)
            return
        call = _Call(self)
        hooks = saved_tensors_hooks(partial(self._traffic.pack, call), self._traffic.unpack)
        hooks.__enter__()
        self._open.append((call, hooks))

    def leave(self, *_: Any) -> None:
        entered = self._open.pop() if self._open else None  # an earlier hook may have failed
        if entered is not None:
            call, hooks = entered
            hooks.__exit__()
            self._traffic.largest_call = max(self._traffic.largest_call, call.num_bytes)
            self._traffic.let_go()

    def close(self) -> None:
        """Leave what is still open, newest first: after a ``KeyboardInterrupt`` torch calls not even ``always_call`` hooks."""
        while self._open:
            if (entered := self._open.pop()) is not None:
                entered[1].__exit__()

    def wants(self, tensor: Tensor) -> bool:
        return self._kept is None or kept_name(tensor) in self._kept

    @torch.no_grad()
    def owns(self, storage: UntypedStorage) -> bool:
        """Whether it is a parameter's or a buffer's."""
        tensors = (tensor for held in self._held for tensor in held.values() if tensor is not None)
        return any(local_part(tensor).untyped_storage()._cdata == storage._cdata for tensor in tensors)


def _is_left_alone() -> bool:
    """Whether somebody else decides what is saved here, or a backward is running, which reads what it saves at once."""
    others = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return others is not None or in_backward()


class _Call:
    """One call of a module, and the bytes of it that are moved."""

    def __init__(self, scope: _Scope) -> None:
        self.scope, self.num_bytes = scope, 0


class _Traffic:
    """What is under way, and the rules for it."""

    def __init__(self, device: torch.device, offloader: ActivationOffloader) -> None:
        self._device, self.offloader = device, offloader
        self._lanes = Lanes(CopyLane(device), CopyLane(device), HostPool(pinned=device.type == "cuda"))
        self._known: WeakValueDictionary[tuple[int, int], Parcel | Unmoved] = WeakValueDictionary()
        self._sent: list[tuple[int, weakref.ref[Parcel]]] = []  # by number; some are dead
        self._count = 0
        self._leaving: deque[Parcel] = deque()
        self._leaving_bytes = 0
        self.largest_call = self._seen_bytes = self._moved_bytes = 0

    def pack(self, call: _Call, tensor: Tensor) -> Reader | Stays:
        if not self._is_movable(call.scope, tensor):
            return Stays(tensor)
        key = (tensor.untyped_storage()._cdata, tensor._version)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._send(call, tensor)
        return Reader(known, tensor) if isinstance(known, Parcel) else Stays(tensor, known)

    def unpack(self, saved: Reader | Stays) -> Tensor:
        if isinstance(saved, Stays):
            return saved.read()
        while self._leaving and self._leaving[-1].unread == 0:  # read before it had left
            self._let_go_of(self._leaving.pop())
        saved.parcel.load()
        self._prefetch(saved.parcel)
        return saved.read()

    def close(self) -> None:
        """Wait until nothing leaves any more."""
        try:
            for parcel in self._leaving:
                parcel.out.finish()
                parcel.let_go()
        finally:
            self._leaving.clear()

    def _is_movable(self, scope: _Scope, tensor: Tensor) -> bool:
        if type(tensor) is not Tensor or tensor.device != self._device or tensor.layout != torch.strided:
            return False
        if (tensor.is_leaf and tensor.requires_grad) or tensor.is_conj() or tensor.is_neg() or not scope.wants(tensor):
            return False
        storage = tensor.untyped_storage()
        if storage.nbytes() < max(self.offloader.min_bytes, 1) or (not tensor.is_cuda and storage.is_shared()):
            return False
        return not is_discardable(tensor) and not scope.owns(storage)

    def _send(self, call: _Call, tensor: Tensor) -> Parcel | Unmoved:
        self.let_go()
        if not self._known:  # all that was saved before is gone: count anew
            self.largest_call = self._seen_bytes = self._moved_bytes = 0
        num_bytes = tensor.untyped_storage().nbytes()
        self._seen_bytes += num_bytes
        if self._moved_bytes + num_bytes > self.offloader.fraction * self._seen_bytes:
            return Unmoved()
        self._moved_bytes += num_bytes
        self.offloader.moved_bytes += num_bytes
        call.num_bytes += num_bytes
        parcel = Parcel(tensor, self._lanes, self._count)
        if len(self._sent) > 2 * len(self._known):  # which has all that live: the more are dead
            self._sent = [(number, sent) for number, sent in self._sent if sent() is not None]
        self._sent.append((self._count, weakref.ref(parcel)))
        self._count += 1
        self._leaving.append(parcel)
        self._leaving_bytes += num_bytes
        self.let_go(max(self.offloader.prefetch, 1) * max(self.largest_call, call.num_bytes))
        return parcel

    def let_go(self, limit: float = float("inf")) -> None:
        """Free the memory of what has left; where more than ``limit`` bytes are leaving, let compute wait for the oldest."""
        while self._leaving and (self._leaving[0].out.done() or self._leaving_bytes > limit):
            self._let_go_of(self._leaving.popleft())

    def _let_go_of(self, parcel: Parcel) -> None:
        self._leaving_bytes -= parcel.num_bytes
        parcel.out.wait()
        parcel.let_go()

    def _prefetch(self, parcel: Parcel) -> None:
        """Have the parcels that were made before this one come back: as many bytes as ``prefetch`` calls have."""
        room = self.offloader.prefetch * self.largest_call
        for index in reversed(range(bisect_left(self._sent, parcel.number, key=itemgetter(0)))):
            earlier = self._sent[index][1]()
            if earlier is not None and earlier.unread > 0:
                room -= earlier.num_bytes
                if room < 0:
                    return
                earlier.load()


def _device_of(model: nn.Module) -> torch.device:
    parameter = next(model.parameters(), None)
    if parameter is None or parameter.is_meta:
        what = "has no parameters" if parameter is None else "is still on the meta device"
        raise (NothingToOffloadError if parameter is None else ValueError)(
            f"`{type(model).__name__}` {what}, so there is no device to offload from. Attach the model once it has been"
            " allocated: after `fabric.setup(model)`, say."
        )
    return local_part(parameter).device
