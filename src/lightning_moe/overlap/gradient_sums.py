"""What becomes of the gradients of both expert matrices: handed to autograd, or held back until further ones have come.

Micro-batches whose gradients add up are summed in float32 and rounded once. FSDP2 does so for what it shards. Matrices that
are whole on their rank need no FSDP2, and their sum no pass over memory: it is the total that the next micro-batch's
chunks are added to.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_moe.ops.local import as_part_of
from lightning_moe.ops.rows import accumulation_dtype


class GradientTarget(NamedTuple):
    """How one matrix's gradient is to be written.

    Args:
        dtype: Of the result.
        scale: Factor on the sum, before it is rounded to that.
        total_eMN: What earlier calls left, to be added, float32 (float64), overwritten; ``None`` for nothing.

    """

    dtype: torch.dtype
    scale: float = 1.0
    total_eMN: Tensor | None = None


class GradientSums:
    """The sums of one layer's two matrices.

    Attributes:
        holds: Whether the gradients that a backward computes stay here, for a later one to add to.
        totals: ``[e, M, N]`` of each matrix, float32 (float64), not scaled yet; ``None`` where nothing is held.

    """

    def __init__(self) -> None:
        self.holds = False
        self.totals: list[Tensor | None] = [None, None]

    def target(self, matrix: int, dtype: torch.dtype, scale: float) -> GradientTarget:
        """Where a backward writes a matrix's gradient; what was held goes into it.

        Args:
            matrix: 0 or 1.
            dtype: Of the parameter.
            scale: Factor on its gradient.

        """
        total_eMN, self.totals[matrix] = self.totals[matrix], None
        if self.holds:
            return GradientTarget(accumulation_dtype(dtype), 1.0, total_eMN)
        return GradientTarget(dtype, scale, total_eMN)

    def hand_on(self, matrix: int, grad_eMN: Tensor | None) -> Tensor | None:
        """What autograd is to hear of a gradient that was written to :meth:`target`."""
        if not self.holds:
            return grad_eMN
        self.totals[matrix] = grad_eMN
        return None

    @torch.no_grad()
    def give_to(self, parameters: Iterable[nn.Parameter], scale: float) -> None:
        """Add what is still held to the parameters' gradients: no backward of the last micro-batch came by to take it."""
        if self.holds:
            return
        for matrix, parameter in enumerate(parameters):
            dtype, _, total_eMN = self.target(matrix, parameter.dtype, scale)
            if total_eMN is not None:
                grad = as_part_of((total_eMN * scale).to(dtype), parameter)
                parameter.grad = grad if parameter.grad is None else parameter.grad + grad


def held_gradients(modules: Iterable[nn.Module]) -> Iterator[Tensor]:
    """Sums that wait in some modules, not looking into those below."""
    for module in modules:
        sums = getattr(module, "gradient_sums", None)
        if isinstance(sums, GradientSums):
            yield from (total for total in sums.totals if total is not None)
