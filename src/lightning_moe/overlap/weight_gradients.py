"""The gradient of one expert matrix, over all chunks of one call.

One product over all chunks' rows is the fastest way, and needs both operands of all chunks at once: what native expert
parallelism holds too. Where memory counts for more, and these are large beside the matrix, they wait only until they outgrow
a float32 sum of it; from then on each chunk is added to that. A product goes on summing where the last one ended, so it
changes no bit how many chunks one takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from lightning_moe.ops.grouped_mm import Groups, weight_gradient
from lightning_moe.ops.rows import accumulation_dtype
from lightning_moe.overlap.gradient_sums import GradientTarget


class ChunkGroups:
    """The rows of each chunk's experts, where all chunks lie in one tensor, one after the other.

    Args:
        chunks: Each chunk's, as if it were alone.

    Attributes:
        rows: Of each chunk.

    """

    def __init__(self, chunks: Sequence[Groups]) -> None:
        self.chunks = chunks
        self.rows = chunk_rows(chunk.num_rows for chunk in chunks)
        self._first: dict[int, Groups] = {}

    def first(self, count: int) -> Groups:
        """Those of the first chunks: ``count * e`` groups."""
        if count == 1:
            return self.chunks[0]
        if count not in self._first:  # both matrices of a call ask for it
            ends_Ce = torch.stack([chunk.ends_e for chunk in self.chunks[:count]])
            sizes_C = ends_Ce[:, -1]
            firsts_C = sizes_C.cumsum(0, dtype=ends_Ce.dtype) - sizes_C
            self._first[count] = Groups(self.rows[count - 1].stop, (ends_Ce + firsts_C.unsqueeze(1)).flatten())
        return self._first[count]


class WeightGradient:
    """Summed over chunks in float32 (float64), rounded once.

    Args:
        weight_eMN: The local experts' matrix.
        groups: The rows of each chunk's experts; both matrices of a call share it.
        target: The result's dtype, and what it is added to.
        rows_RN: The grouped GEMM's input, R rows of all chunks together, where that was kept.
        frugal: Whether memory counts for more than time.

    Attributes:
        result_eMN: What the target does not hold itself, once all chunks were added; before that, the sum so far, or ``None``.
        at_once: Whether a chunk is best added as soon as its operands are there, since memory comes back by it.

    """

    def __init__(
        self, weight_eMN: Tensor, groups: ChunkGroups, target: GradientTarget, rows_RN: Tensor | None, frugal: bool
    ) -> None:
        num_chunks = len(groups.chunks)
        self.result_eMN = None if target.held is None else target.held.total_eMN
        self.at_once = frugal and num_chunks > 1
        self._weight, self._groups, self._target, self._num_chunks = weight_eMN, groups, target, num_chunks
        self._total_dtype = accumulation_dtype(weight_eMN.dtype)
        self._num_together = self._few_chunks() if frugal else num_chunks
        self._grads_RM: Tensor | None = None
        self._rows_RN = rows_RN
        if self._num_together > 1:
            num_rows, (_, width_m, width_n) = groups.rows[self._num_together - 1].stop, weight_eMN.shape
            self._grads_RM = weight_eMN.new_empty(num_rows, width_m)
            self._rows_RN = weight_eMN.new_empty(num_rows, width_n) if rows_RN is None else rows_RN

    def operands(self, chunk: int) -> tuple[Tensor | None, Tensor | None]:
        """Where a chunk's gradient ``[R, M]`` and input ``[R, N]`` are to be written; ``None`` for anywhere."""
        if self._grads_RM is None or self._rows_RN is None or chunk >= self._num_together:
            return None, None
        rows = self._groups.rows[chunk]
        return self._grads_RM[rows], self._rows_RN[rows]

    def add(self, chunk: int, grad_RM: Tensor, rows_RN: Tensor) -> bool:
        """Take a chunk's operands, written to where :meth:`operands` said; chunks come in order.

        Returns:
            Whether they have been read; else they wait for the next chunk's.

        """
        if chunk + 1 < self._num_together:
            return False
        groups, last = self._groups.chunks[chunk], chunk + 1 == self._num_chunks
        if self._grads_RM is not None and self._rows_RN is not None and chunk + 1 == self._num_together:
            groups = self._groups.first(self._num_together)
            grad_RM, rows_RN = self._grads_RM, self._rows_RN[: groups.num_rows]
            self._grads_RM = self._rows_RN = None
        total_eMN, dtype = self.result_eMN, self._target.dtype if last else self._total_dtype
        if total_eMN is None or total_eMN.dtype != dtype:
            self.result_eMN = torch.empty(self._weight.shape, dtype=dtype, device=self._weight.device)
        assert self.result_eMN is not None
        weight_gradient(self.result_eMN, grad_RM, rows_RN, groups, total_eMN, self._target.scale if last else 1.0)
        if last:
            self.result_eMN = self._target.finish(self.result_eMN)
        return True

    def _few_chunks(self) -> int:
        """The first chunks whose operands outgrow a sum, with the one that makes them do so; or all.

        All of them too where they are no larger than two sums: then one costs a pass over more memory than it saves.
        """
        num_experts, width_m, width_n = self._weight.shape
        sum_bytes = num_experts * width_m * width_n * self._total_dtype.itemsize
        row_bytes = (width_m + width_n) * self._weight.element_size()
        if self._groups.rows[-1].stop * row_bytes <= 2 * sum_bytes:
            return self._num_chunks
        return next(i for i, rows in enumerate(self._groups.rows, 1) if rows.stop * row_bytes > sum_bytes)


def chunk_rows(num_rows: Iterable[int]) -> list[slice]:
    """The rows of each chunk where all lie in one tensor."""
    ends = list(accumulate(num_rows))
    return [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
