"""Copying rows to several places and summing them back, one pass over memory each.

Legend: M source rows, J copies of a source row at most, R copied rows, X their width.
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl
from torch import Tensor

from lightning_moe.ops.kernels.launch import blocks, launch, power_of_2

TILE = 1024  # elements that a program holds: one 16-byte vector of bf16 for each thread of four warps


def gather_rows(source_MX: Tensor, copies_MJ: Tensor, out_RX: Tensor) -> None:
    """Read each source row once and write it to all its places.

    Args:
        source_MX: ``[M, X]``, elements of a row side by side, M and X at least 1.
        copies_MJ: int32 ``[M, J]``, contiguous, the places of each row, ``-1`` for none; together they name every place.
        out_RX: ``[R, X]``, written, likewise; the values are cast to its dtype.

    """
    (num_rows, width), copies = source_MX.shape, copies_MJ.shape[1]
    grid, block = _tiles(num_rows, width)
    constants = (source_MX.stride(0), out_RX.stride(0), width, copies, *block)
    launch(_gather_kernel, grid, (source_MX, copies_MJ, out_RX), (num_rows,), constants)


def reduce_rows(copies_RX: Tensor, copies_MJ: Tensor, out_MX: Tensor, num_summed: int) -> None:
    """Sum the copies of each source row in float32, in the order of J.

    Args:
        copies_RX: ``[R, X]``, elements of a row side by side, R and X at least 1.
        copies_MJ: int32 ``[M, J]``, contiguous, where each source row's copies are, ``-1`` for none.
        out_MX: ``[M, X]``, written, likewise; rows without copies become zero.
        num_summed: So many of the first rows are added to.

    """
    (num_rows, copies), width = copies_MJ.shape, copies_RX.shape[1]
    grid, block = _tiles(num_rows, width)
    constants = (copies_RX.stride(0), out_MX.stride(0), width, copies, *block)
    launch(_reduce_kernel, grid, (copies_RX, copies_MJ, out_MX), (num_rows, num_summed), constants)


def collect_values(values_R: Tensor, copies_MJ: Tensor, out_MJ: Tensor, num_summed: int) -> None:
    """Bring each copied row's number to the slot that the row was copied for.

    Args:
        values_R: ``[R]``, contiguous, R at least 1.
        copies_MJ: int32 ``[M, J]``, contiguous, the row of each slot, ``-1`` for none.
        out_MJ: ``[M, J]``, written, elements of a row side by side; zero in slots without a row.
        num_summed: So many of the first rows are added to.

    """
    num_slots, width = copies_MJ.numel(), copies_MJ.shape[1]
    grid, constants = (blocks(num_slots, TILE),), (out_MJ.stride(0), width, TILE)
    launch(_collect_kernel, grid, (values_R, copies_MJ, out_MJ), (num_slots, num_summed * width), constants)


@functools.cache
def _block(width: int) -> tuple[int, int]:
    """Rows and columns of a tile: as wide as the rows are, up to a limit."""
    columns = min(power_of_2(width), TILE)
    return TILE // columns, columns


def _tiles(num_rows: int, width: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """How many tiles there are, and their size."""
    block = _block(width)
    return (blocks(num_rows, block[0]), blocks(width, block[1])), block


@triton.jit(do_not_specialize=["num_rows"])
def _gather_kernel(
    source_ptr,
    places_ptr,
    copies_ptr,
    num_rows,
    SOURCE_STRIDE: tl.constexpr,
    COPIES_STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    COPIES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_X: tl.constexpr,
):
    m, x = _tile(BLOCK_M, BLOCK_X)
    values = tl.load(
        source_ptr + m.to(tl.int64)[:, None] * SOURCE_STRIDE + x, mask=(m < num_rows)[:, None] & (x < WIDTH)
    )
    for j in tl.static_range(COPIES):
        place = tl.load(places_ptr + m * COPIES + j, mask=m < num_rows, other=-1)[:, None]
        tl.store(copies_ptr + place.to(tl.int64) * COPIES_STRIDE + x, values, mask=(place >= 0) & (x < WIDTH))


@triton.jit(do_not_specialize=["num_rows", "num_summed"])
def _reduce_kernel(
    copies_ptr,
    places_ptr,
    out_ptr,
    num_rows,
    num_summed,
    COPIES_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    COPIES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_X: tl.constexpr,
):
    m, x = _tile(BLOCK_M, BLOCK_X)
    row_ptr = out_ptr + m.to(tl.int64)[:, None] * OUT_STRIDE + x
    inside = (m < num_rows)[:, None] & (x < WIDTH)
    total = tl.load(row_ptr, mask=inside & (m < num_summed)[:, None], other=0.0).to(tl.float32)
    for j in tl.static_range(COPIES):
        place = tl.load(places_ptr + m * COPIES + j, mask=m < num_rows, other=-1)[:, None]
        copy_ptr = copies_ptr + place.to(tl.int64) * COPIES_STRIDE + x
        total += tl.load(copy_ptr, mask=(place >= 0) & (x < WIDTH), other=0.0).to(tl.float32)
    tl.store(row_ptr, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_slots", "num_summed"])
def _collect_kernel(
    values_ptr,
    places_ptr,
    out_ptr,
    num_slots,
    num_summed,
    OUT_STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    slots = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    places = tl.load(places_ptr + slots, mask=slots < num_slots, other=-1)
    slot_ptr = out_ptr + (slots // WIDTH).to(tl.int64) * OUT_STRIDE + slots % WIDTH
    values = tl.load(slot_ptr, mask=slots < num_summed, other=0.0)
    values += tl.load(values_ptr + places, mask=places >= 0, other=0.0)
    tl.store(slot_ptr, values, mask=slots < num_slots)


@triton.jit
def _tile(BLOCK_M: tl.constexpr, BLOCK_X: tl.constexpr):
    """The rows ``[BLOCK_M]`` and columns ``[1, BLOCK_X]`` of this program."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    x = tl.program_id(1) * BLOCK_X + tl.arange(0, BLOCK_X)
    return m, x[None, :]
