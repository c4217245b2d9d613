"""Counting the memory that tensors hold, without an allocator: on any device, and to the byte."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_moe.ops.local import local_part


class Storages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Knows every storage that an op made while it was on, and keeps none alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                reference = StorageWeakRef(local_part(leaf).untyped_storage())  # type: ignore[no-untyped-call]
                self.made[reference.cdata] = reference  # a weak reference keeps the number from being given away again
        return result

    def live_bytes(self) -> int:
        """Bytes that are held now, each storage once."""
        storages = (torch.UntypedStorage._new_with_weak_ptr(cdata) for cdata in self.made)
        return int(sum(storage.nbytes() for storage in storages if storage is not None))


def kept_bytes(forward: Callable[[], Tensor], *known: Any) -> int:
    """What a forward leaves in memory for its backward, besides its result and the tensors that are ``known`` to be there."""
    with Storages() as storages:
        result = forward()
    outside = [leaf for item in (*known, result) for leaf in tensors_of(item)]
    for storage in {local_part(leaf).untyped_storage()._cdata for leaf in outside}:
        storages.made.pop(storage, None)
    live: int = storages.live_bytes()
    return live


def tensors_of(item: Any) -> list[Tensor]:
    """Those of a module, or of a nest of anything."""
    if isinstance(item, nn.Module):
        return [*item.parameters(), *item.buffers()]
    return [leaf for leaf in tree_leaves(item) if isinstance(leaf, Tensor)]
