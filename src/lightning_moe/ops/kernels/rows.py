"""Copying rows to several places and summing them back, one pass over memory each.

Legend: M source rows, J copies of a source row at most, R copied rows, X their width.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

TILE = 1024  # elements that a program holds: one 16-byte vector of bf16 for each thread of four warps


def gather_rows(source_MX: Tensor, copies_MJ: Tensor, out_RX: Tensor) -> None:
    """Read each source row once and write it to all its places.

    Args:
        source_MX: ``[M, X]``, elements of a row side by side, M and X at least 1.
        copies_MJ: int32 ``[M, J]``, the places of each row, ``-1`` for none; together they name every place.
        out_RX: ``[R, X]``, written, likewise.

    """
    _launch(_gather_kernel, source_MX, out_RX, copies_MJ)


def reduce_rows(copies_RX: Tensor, copies_MJ: Tensor, out_MX: Tensor) -> None:
    """Sum the copies of each source row in float32, in the order of J.

    Args:
        copies_RX: ``[R, X]``, elements of a row side by side.
        copies_MJ: int32 ``[M, J]``, where each source row's copies are, ``-1`` for none.
        out_MX: ``[M, X]``, written, likewise, M and X at least 1; rows without copies become zero.

    """
    _launch(_reduce_kernel, out_MX, copies_RX, copies_MJ)


def _launch(kernel: triton.JITFunction, rows_MX: Tensor, copies_RX: Tensor, copies_MJ: Tensor) -> None:
    """Cut ``[M, X]`` into tiles, as wide as the rows are, up to a limit."""
    num_rows, width = rows_MX.shape
    block_x = min(triton.next_power_of_2(width), TILE)
    block_m = min(triton.next_power_of_2(num_rows), TILE // block_x)
    kernel[(triton.cdiv(num_rows, block_m), triton.cdiv(width, block_x))](
        rows_MX,
        copies_RX,
        copies_MJ.contiguous(),
        num_rows,
        rows_MX.stride(0),
        copies_RX.stride(0),
        WIDTH=width,
        COPIES=copies_MJ.shape[1],
        BLOCK_M=block_m,
        BLOCK_X=block_x,
    )


@triton.jit
def _gather_kernel(
    source_ptr,
    copies_ptr,
    places_ptr,
    num_rows,
    source_stride,
    copies_stride,
    WIDTH: tl.constexpr,
    COPIES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_X: tl.constexpr,
):
    m, x = _tile(BLOCK_M, BLOCK_X)
    values = tl.load(
        source_ptr + m.to(tl.int64)[:, None] * source_stride + x, mask=(m < num_rows)[:, None] & (x < WIDTH)
    )
    for j in tl.static_range(COPIES):
        place = tl.load(places_ptr + m * COPIES + j, mask=m < num_rows, other=-1)[:, None]
        tl.store(copies_ptr + place.to(tl.int64) * copies_stride + x, values, mask=(place >= 0) & (x < WIDTH))


@triton.jit
def _reduce_kernel(
    out_ptr,
    copies_ptr,
    places_ptr,
    num_rows,
    out_stride,
    copies_stride,
    WIDTH: tl.constexpr,
    COPIES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_X: tl.constexpr,
):
    m, x = _tile(BLOCK_M, BLOCK_X)
    total = tl.zeros((BLOCK_M, BLOCK_X), tl.float32)
    for j in tl.static_range(COPIES):
        place = tl.load(places_ptr + m * COPIES + j, mask=m < num_rows, other=-1)[:, None]
        copy_ptr = copies_ptr + place.to(tl.int64) * copies_stride + x
        total += tl.load(copy_ptr, mask=(place >= 0) & (x < WIDTH), other=0.0).to(tl.float32)
    tl.store(
        out_ptr + m.to(tl.int64)[:, None] * out_stride + x,
        total.to(out_ptr.dtype.element_ty),
        mask=(m < num_rows)[:, None] & (x < WIDTH),
    )


@triton.jit
def _tile(BLOCK_M: tl.constexpr, BLOCK_X: tl.constexpr):
    """The rows ``[BLOCK_M]`` and columns ``[1, BLOCK_X]`` of this program."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    x = tl.program_id(1) * BLOCK_X + tl.arange(0, BLOCK_X)
    return m, x[None, :]
