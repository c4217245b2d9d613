"""From a distributed tensor to the part of it that lies here."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, differentiable; a tensor that is not distributed is its own part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
