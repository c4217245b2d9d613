"""Rows of several tensors side by side, so that one transfer moves them all.

A row of the bundle is a row of bytes: a token's hidden state, say, then its routing weights, then its experts' ids. Each begins
at a multiple of 16 bytes, where wide loads begin. Ids are narrow numbers, and travel as int32 where they came as int64.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

ALIGN = 16  # bytes


def row_bytes(like: Sequence[Tensor]) -> int:
    """The width of a bundle's row for tensors ``[..., X]``, in bytes."""
    return sum(map(_aligned_bytes, like))


def columns(bundle_NW: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The tensors in a bundle.

    Args:
        bundle_NW: uint8 ``[N, W]``, contiguous, W from :func:`row_bytes` for these tensors.
        like: Tensors ``[..., X]``, for their dtypes and widths.

    Returns:
        A view ``[N, X]`` of the bundle for each; int32 for int64.

    """
    starts = accumulate(map(_aligned_bytes, like), initial=0)
    views = []
    for start, tensor in zip(starts, like, strict=False):
        dtype = _dtype(tensor)
        views.append(bundle_NW.view(dtype).narrow(1, start // dtype.itemsize, tensor.shape[1]))
    return views


def empty(num_rows: int, width: int, device: torch.device) -> Tensor:
    """Memory for a bundle: uint8 ``[N, W]``."""
    return torch.empty(num_rows, width, dtype=torch.uint8, device=device)


def _aligned_bytes(tensor: Tensor) -> int:
    return -(-tensor.shape[1] * _dtype(tensor).itemsize // ALIGN) * ALIGN


def _dtype(tensor: Tensor) -> torch.dtype:
    """What a tensor travels as."""
    return torch.int32 if tensor.dtype == torch.int64 else tensor.dtype
