"""Gradients of expert matrices over several micro-batches, summed in float32 and rounded once.

FSDP2 does so for what it shards. Matrices that one rank alone holds need no FSDP2, and their sum no pass over memory: it is
the total that the next micro-batch's chunks are added to.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_moe.ops.local import as_part_of
from lightning_moe.ops.rows import accumulation_dtype


class GradientSum:
    """What one matrix's gradients of earlier micro-batches sum to.

    An error in a backward leaves it as it was, or with a part of that backward's gradient. Hooks on a parameter's accumulated
    gradient run in a backward whose gradient is held as well, and find the ``grad`` of before.

    Attributes:
        holds: Whether what a backward computes stays here, for a later one to add to.
        total_eMN: ``[e, M, N]``, float32 (float64), not scaled yet; ``None`` where nothing is held.

    """

    def __init__(self) -> None:
        self.holds = False
        self.total_eMN: Tensor | None = None

    @torch.no_grad()
    def give_to(self, parameter: nn.Parameter, scale: float) -> None:
        """Add what is held to a parameter's gradient, as autograd would: where no backward has come by to take it.

        Args:
            parameter: The matrix, ``[e, M, N]`` or a DTensor with such a part.
            scale: Factor on its gradient.

        """
        if self.holds or self.total_eMN is None:
            return
        grad = as_part_of(self.total_eMN.mul_(scale).to(parameter.dtype), parameter)
        self.total_eMN = None
        if parameter.grad is None:
            parameter.grad = grad
        else:
            parameter.grad.add_(grad)
        for hook in (parameter._post_accumulate_grad_hooks or {}).values():
            hook(parameter)


class GradientTarget(NamedTuple):
    """How a backward writes one matrix's gradient.

    Args:
        dtype: Of the result.
        scale: Factor on the sum, before it is rounded to that.
        held: What it is added to, and what takes it where it holds; ``None`` for neither.

    """

    dtype: torch.dtype
    scale: float = 1.0
    held: GradientSum | None = None

    @staticmethod
    def of(dtype: torch.dtype, scale: float, held: GradientSum | None) -> GradientTarget:
        """That of a parameter, whose factor waits for the last micro-batch."""
        if held is not None and held.holds:
            return GradientTarget(accumulation_dtype(dtype), 1.0, held)
        return GradientTarget(dtype, scale, held)

    def finish(self, result_eMN: Tensor) -> Tensor | None:
        """Take the finished gradient, which holds the total; returns what autograd is to hear of it."""
        if self.held is None:
            return result_eMN
        self.held.total_eMN = result_eMN if self.held.holds else None
        return None if self.held.holds else result_eMN


def held_gradients(modules: Iterable[nn.Module]) -> Iterator[Tensor]:
    """What is held for the experts among some modules, not looking into those below."""
    for module in modules:
        for held in getattr(module, "gradient_sums", None) or ():
            if held.total_eMN is not None:
                yield held.total_eMN
