"""One storage's way to the host and back."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_moe.offload.copies import CopyLane, HostBuffer, HostPool, Ticket, as_bytes


class Geometry(NamedTuple):
    """How a tensor lies in its storage."""

    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]

    @staticmethod
    def of(tensor: Tensor) -> Geometry:
        return Geometry(tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride())

    def on(self, memory: Tensor) -> Tensor:
        """The tensor, where its storage's bytes lie in another memory."""
        tensor = torch.empty(0, dtype=self.dtype, device=memory.device)
        return tensor.set_(memory.untyped_storage(), self.offset, self.shape, self.stride)


class Lanes(NamedTuple):
    """The two directions, and where the host keeps what is away."""

    out: CopyLane
    back: CopyLane
    pool: HostPool


class Parcel:
    """A storage that was saved for backward: a copy leaves at once, and comes back as often as it is read.

    The storage's own memory is held until :meth:`let_go`. Whoever saved the storage, or a view of it, has a
    :class:`Reader`; memory on the device is held for those that have yet to read, and the host's for all of them.

    Args:
        tensor: Any that lies in the storage.
        lanes: How it travels.
        number: How many were made before this one.

    """

    def __init__(self, tensor: Tensor, lanes: Lanes, number: int) -> None:
        storage = tensor.untyped_storage()
        self.num_bytes = storage.nbytes()
        self.number, self.unread = number, 0
        self._reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call] # no other gets its number meanwhile
        self._lanes = lanes
        self._source: Tensor | None = tensor.detach()
        self._version = tensor._version
        self._changed = False
        self._device = tensor.device
        self._loaded: tuple[Tensor, Ticket] | None = None
        self._buffer = lanes.pool.take(self.num_bytes)
        self.out = lanes.out.copy(self._host, as_bytes(storage), self._buffer.last)
        self._last = self.out

    @property
    def _host(self) -> Tensor:
        return self._buffer.memory[: self.num_bytes]

    def let_go(self) -> None:
        """Let the storage's own memory go; the caller has waited for :attr:`out`, or seen it done."""
        if self._source is not None:
            self._changed = self._source._version != self._version
            self._source = None

    def load(self) -> None:
        """Begin to bring it back, unless it is there or on its way."""
        if self._source is None and self._loaded is None:
            memory = torch.empty(self.num_bytes, dtype=torch.uint8, device=self._device)
            self._last = self._lanes.back.copy(memory, self._host, self.out)
            self._loaded = memory, self._last

    def read(self, first_time: bool) -> Tensor:
        """Its bytes on the device, in order for the current stream; the last of the first readers takes them along.

        Raises:
            RuntimeError: The storage was changed in place after it was saved, or was discarded and is not back yet.

        """
        if self._changed or (self._source is not None and self._source._version != self._version):
            raise RuntimeError(CHANGED)
        self.unread -= first_time
        if self._source is not None:
            return as_bytes(self._source.untyped_storage())
        self.load()
        assert self._loaded is not None
        memory, ticket = self._loaded
        ticket.wait()
        if self.unread == 0:
            self._loaded = None
        return memory

    def __del__(self) -> None:
        if getattr(self, "_last", None) is None:  # it was never made
            return
        if self._loaded is not None:  # nobody waited for it, so nobody else would
            self._loaded[1].finish()
        self._lanes.pool.give(HostBuffer(self._buffer.memory, self._last))


class Reader:
    """Stands for a saved tensor in autograd's graph."""

    def __init__(self, parcel: Parcel, tensor: Tensor) -> None:
        self.parcel, self._geometry, self._has_read = parcel, Geometry.of(tensor), False
        parcel.unread += 1

    def read(self) -> Tensor:
        """The tensor."""
        memory = self.parcel.read(first_time=not self._has_read)
        self._has_read = True
        return self._geometry.on(memory)


class Unmoved:
    """A storage that was saved for backward and could have been moved, for as long as somebody has yet to read it."""


class Stays:
    """Stands for a saved tensor that is not moved.

    Args:
        tensor: It.
        of: Its storage, where that could have been moved.

    """

    def __init__(self, tensor: Tensor, of: Unmoved | None = None) -> None:
        self._of = of
        self._alias = tensor.detach()  # the tensor itself may hold the node that is to hold it
        self._version = tensor._version

    def read(self) -> Tensor:
        """The tensor.

        Raises:
            RuntimeError: It was changed in place after it was saved, or was discarded and is not back yet.

        """
        if self._alias._version != self._version:
            raise RuntimeError(CHANGED)
        return self._alias


CHANGED = (
    "One of the tensors that backward needs has been modified by an inplace operation after forward saved it, or is an output"
    " that `discard_output()` has freed and that is read before it came back. Compute the new value out of place, or change a"
    " `clone()`; of a discarded output, give `register_recompute_hook` a tensor that lies downstream of all that saved it."
)
