"""A grouped GEMM that multiplies each expert's rows with its matrix, all experts in one persistent launch.

The operands are read by the tensor memory accelerator and multiplied by the warpgroup instructions of Hopper GPUs. The
gated activation can be computed from a tile before it is written: what it is computed from need then not be written.

Legend: R rows sorted by expert; e experts; K the width that is summed over, N the one that is written; H the model's
width, F the experts' intermediate width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from lightning_moe.ops.kernels.descriptors import MANY, halves, is_hopper, num_multiprocessors, tiles, tiles_of_experts
from lightning_moe.ops.kernels.launch import blocks, launch, power_of_2

BLOCK_R, BLOCK_N, BLOCK_K = 128, 256, 64
GROUP = 8  # so many neighbouring blocks of rows run together, and share the matrix in the L2 cache
STAGES = 3  # blocks of K in flight: 48 KiB each, of 227 KiB, which also hold half a tile that is being written


def serves(rows_RK: Tensor, weight_eKN: Tensor) -> bool:
    """Whether the kernels take these: 16-bit floats, contiguous but for a transposed matrix, whole vectors, on Hopper."""
    return (
        rows_RK.dtype == weight_eKN.dtype
        and rows_RK.dtype in (torch.bfloat16, torch.float16)
        and rows_RK.numel() > 0
        and rows_RK.is_contiguous()
        and (weight_eKN.is_contiguous() or weight_eKN.mT.is_contiguous())
        and all(width % 16 == 0 for width in weight_eKN.shape[1:])
        and all(x.data_ptr() % 16 == 0 for x in (rows_RK, weight_eKN))
        and rows_RK.is_cuda
        and is_hopper(rows_RK.device)
    )


def grouped_mm_of_experts(rows_RK: Tensor, weight_eKN: Tensor, ends_e: Tensor, out_RN: Tensor) -> None:
    """Write each expert's rows times its matrix; rows after the last expert's are left as they are.

    Args:
        rows_RK: ``[R, K]``, 16-bit floats, contiguous, R at least 1.
        weight_eKN: ``[e, K, N]``, likewise; contiguous, or the transposed view of a contiguous tensor.
        ends_e: int32 ``[e]``, where the rows of each expert end.
        out_RN: ``[R, N]``, contiguous, written.

    """
    by_n = weight_eKN.is_contiguous()
    weight, block = (weight_eKN, [1, BLOCK_K, BLOCK_N]) if by_n else (weight_eKN.mT, [1, BLOCK_N, BLOCK_K])
    out = tiles_of_experts(out_RN, [BLOCK_R, BLOCK_N // 2])
    _multiply(rows_RK, tiles(weight, block), ends_e, None, None, out, out_RN.shape[1], by_n)


def gate_up_swiglu_of_experts(
    rows_RH: Tensor,
    gate_up_e2FH: Tensor,
    weights_R: Tensor,
    ends_e: Tensor,
    act_RF: Tensor,
    gate_up_R2F: Tensor | None,
) -> None:
    """Write ``silu(gate) * up * weight``, and ``gate`` and ``up`` where a buffer for them is given.

    The activation is computed from gate and up as they are rounded to be written, whether or not they are.

    Args:
        rows_RH: ``[R, H]``, 16-bit floats, contiguous, R at least 1.
        gate_up_e2FH: ``[e, 2F, H]``, likewise: of each expert, first the gate, then the up projection.
        weights_R: float32 ``[R]``, contiguous.
        ends_e: int32 ``[e]``, where the rows of each expert end.
        act_RF: ``[R, F]``, contiguous, written.
        gate_up_R2F: ``[R, 2F]``, contiguous, written, or ``None``.

    """
    num_experts, _, hidden = gate_up_e2FH.shape
    width = act_RF.shape[1]
    weight = tiles(gate_up_e2FH.view(num_experts, 2, width, hidden), [1, 2, BLOCK_N // 2, BLOCK_K])
    saved = None
    if gate_up_R2F is not None:
        saved = tiles_of_experts(gate_up_R2F.view(-1, 2, width), [BLOCK_R, 1, BLOCK_N // 2])
    out = tiles_of_experts(act_RF, [BLOCK_R, BLOCK_N // 2])
    _multiply(rows_RH, weight, ends_e, weights_R, saved, out, width, False)


def _multiply(
    rows_RK: Tensor,
    weight: TensorDescriptor,
    ends_e: Tensor,
    weights_R: Tensor | None,
    saved: TensorDescriptor | None,
    out: TensorDescriptor,
    width_n: int,
    by_n: bool,
) -> None:
    (num_rows, width_k), num_experts = rows_RK.shape, ends_e.shape[0]
    blocks_n = blocks(width_n, BLOCK_N if weights_R is None else BLOCK_N // 2)
    most_tiles = (num_rows // BLOCK_R + num_experts) * blocks_n
    grid = (min(most_tiles, num_multiprocessors(rows_RK.device)),)
    memory = (tiles(rows_RK, [BLOCK_R, BLOCK_K]), weight, ends_e, weights_R, saved, out)
    constants = (power_of_2(num_experts), blocks(width_k, BLOCK_K), blocks_n, by_n, BLOCK_R, BLOCK_N, BLOCK_K, GROUP)
    launch(_multiply_kernel, grid, memory, (num_experts,), constants, num_warps=8, num_stages=STAGES)


@triton.jit(do_not_specialize=["num_experts"])
def _multiply_kernel(
    rows,
    weight,
    ends_ptr,
    weights_ptr,
    saved,
    out,
    num_experts,
    EXPERTS: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCKS_N: tl.constexpr,
    BY_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Each program computes every ``num_programs``-th tile, in one loop over the blocks of K of all its tiles.

    One loop, and not one for each tile, so that the next tile's operands are fetched while this tile is written. A tile
    holds an expert's rows alone: those of the next expert that it reads are computed, but not written.

    With ``weights_ptr``, the left half of a tile is the gate and the right half the up projection of the same columns.
    """
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    experts = tl.arange(0, EXPERTS)
    ends = tl.load(ends_ptr + experts, mask=experts < num_experts, other=0)
    starts = tl.load(ends_ptr + experts - 1, mask=(experts < num_experts) & (experts > 0), other=0)
    row_blocks = tl.where(experts < num_experts, tl.cdiv(ends - starts, BLOCK_R), 0)
    num_tiles = tl.sum(row_blocks) * BLOCKS_N

    tile = program - num_programs
    step = STEPS - 1
    expert = 0
    first = 0  # of the expert's tiles
    start = 0
    end = tl.load(ends_ptr)
    row = 0
    n = 0
    product = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
    for _ in tl.range(tl.cdiv(num_tiles - program, num_programs) * STEPS):
        step += 1
        if step == STEPS:
            step = 0
            tile += num_programs
            after = first + tl.cdiv(end - start, BLOCK_R) * BLOCKS_N
            while tile >= after:
                first = after
                expert += 1
                start = end
                end = tl.load(ends_ptr + expert)
                after = first + tl.cdiv(end - start, BLOCK_R) * BLOCKS_N
            within = tile - first
            first_block = within // (GROUP * BLOCKS_N) * GROUP
            height = tl.minimum(tl.cdiv(end - start, BLOCK_R) - first_block, GROUP)
            within = within % (GROUP * BLOCKS_N)
            row = (first_block + within % height) * BLOCK_R
            n = within // height
        k = step * BLOCK_K
        rows_block = rows.load([start + row, k])
        if weights_ptr is not None:
            weight_block = weight.load([expert, 0, n * (BLOCK_N // 2), k]).reshape(BLOCK_N, BLOCK_K).T
        elif BY_N:
            weight_block = weight.load([expert, k, n * BLOCK_N]).reshape(BLOCK_K, BLOCK_N)
        else:
            weight_block = weight.load([expert, n * BLOCK_N, k]).reshape(BLOCK_N, BLOCK_K).T
        product = tl.dot(rows_block, weight_block, product)
        if step == STEPS - 1:
            size = end - start
            place = MANY - size + row
            HALF: tl.constexpr = BLOCK_N // 2
            left, right = halves(product.to(rows.dtype), BLOCK_R, BLOCK_N)
            if weights_ptr is None:
                out.store([MANY, end, place, n * BLOCK_N], left.reshape(1, 1, BLOCK_R, HALF))
                out.store([MANY, end, place, n * BLOCK_N + HALF], right.reshape(1, 1, BLOCK_R, HALF))
            else:
                r = row + tl.arange(0, BLOCK_R)
                weights = tl.load(weights_ptr + start + r, mask=r < size, other=0.0)[:, None]
                if saved is not None:
                    saved.store([MANY, end, place, 0, n * HALF], left.reshape(1, 1, BLOCK_R, 1, HALF))
                gate, up = left.to(tl.float32), right.to(tl.float32)
                act = gate * tl.sigmoid(gate) * up * weights
                if saved is not None:
                    saved.store([MANY, end, place, 1, n * HALF], right.reshape(1, 1, BLOCK_R, 1, HALF))
                out.store([MANY, end, place, n * HALF], act.to(out.dtype).reshape(1, 1, BLOCK_R, HALF))
            product = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
