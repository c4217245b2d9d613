"""The gradient of one expert matrix, over all chunks of one call: one product at the end, or a running total.

One product over all chunks' rows is the faster way, and needs both operands of all chunks at once: what native expert
parallelism holds too. A running total needs only one chunk's operands, and a float32 matrix of the weight's size instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from lightning_moe.ops.grouped_mm import Groups, weight_gradient
from lightning_moe.ops.rows import accumulation_dtype


@dataclass(frozen=True)
class ChunkGroups:
    """The rows of each chunk's experts, where all chunks lie in one tensor, one after the other.

    Args:
        chunks: Each chunk's, as if it were alone.

    """

    chunks: Sequence[Groups]

    @cached_property
    def rows(self) -> list[slice]:
        """Of each chunk."""
        return chunk_rows(chunk.num_rows for chunk in self.chunks)

    @cached_property
    def together(self) -> Groups:
        """All of them: ``C * e`` groups."""
        ends_Ce = torch.stack([chunk.ends_e for chunk in self.chunks])
        sizes_C = ends_Ce[:, -1]
        firsts_C = sizes_C.cumsum(0, dtype=ends_Ce.dtype) - sizes_C
        return Groups(self.rows[-1].stop, (ends_Ce + firsts_C.unsqueeze(1)).flatten())


class WeightGradient:
    """Summed over chunks in float32 (float64), rounded once.

    Args:
        weight_eMN: The local experts' matrix.
        groups: The rows of each chunk's experts; both matrices of a call share it.
        scale: Factor on the sum, applied before it is rounded.
        rows_RN: The grouped GEMM's input, R rows of all chunks together, where that was kept.
        frugal: Whether memory counts for more than speed. Then a running total is taken if it is the smaller one.

    """

    def __init__(
        self, weight_eMN: Tensor, groups: ChunkGroups, scale: float, rows_RN: Tensor | None, frugal: bool
    ) -> None:
        self.result_eMN: Tensor | None = None
        self._weight, self._groups, self._scale = weight_eMN, groups, scale
        (num_experts, width_m, width_n), num_rows = weight_eMN.shape, groups.rows[-1].stop
        self._dtype = accumulation_dtype(weight_eMN.dtype)
        total = num_experts * width_m * width_n * self._dtype.itemsize
        operands = num_rows * (width_m + width_n) * weight_eMN.element_size()
        self._grads_RM: Tensor | None = None
        self._rows_RN = rows_RN
        if len(groups.chunks) > 1 and not (frugal and total < operands):
            self._grads_RM = weight_eMN.new_empty(num_rows, width_m)
            self._rows_RN = weight_eMN.new_empty(num_rows, width_n) if rows_RN is None else rows_RN

    @property
    def running(self) -> bool:
        """Whether a chunk's operands are read when they are added, and are not needed after that."""
        return len(self._groups.chunks) > 1 and self._grads_RM is None

    def operands(self, chunk: int) -> tuple[Tensor | None, Tensor | None]:
        """Where a chunk's gradient ``[R, M]`` and input ``[R, N]`` are to be written; ``None`` for anywhere."""
        rows = self._groups.rows[chunk]
        grads_RM, rows_RN = self._grads_RM, self._rows_RN
        return None if grads_RM is None else grads_RM[rows], None if rows_RN is None else rows_RN[rows]

    def add(self, chunk: int, grad_RM: Tensor, rows_RN: Tensor) -> None:
        """Take a chunk's operands, written to where :meth:`operands` said; chunks come in order."""
        last = chunk == len(self._groups.chunks) - 1
        if self._grads_RM is None:
            dtype = self._weight.dtype if last else self._dtype
            out_eMN = self.result_eMN
            if out_eMN is None or out_eMN.dtype != dtype:
                out_eMN = torch.empty(self._weight.shape, dtype=dtype, device=self._weight.device)
            scale = self._scale if last else 1.0
            weight_gradient(out_eMN, grad_RM, rows_RN, self._groups.chunks[chunk], self.result_eMN, scale)
            self.result_eMN = out_eMN
        elif last:
            assert self._rows_RN is not None
            self.result_eMN = torch.empty(self._weight.shape, dtype=self._weight.dtype, device=self._weight.device)
            weight_gradient(self.result_eMN, self._grads_RM, self._rows_RN, self._groups.together, scale=self._scale)
            self._grads_RM = self._rows_RN = None


def chunk_rows(num_rows: Iterable[int]) -> list[slice]:
    """The rows of each chunk where all lie in one tensor."""
    ends = list(accumulate(num_rows))
    return [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
