"""A grouped GEMM that sums over each expert's rows, all experts in one persistent launch.

The operands are read by the tensor memory accelerator and multiplied by the warpgroup instructions of Hopper GPUs.

Legend: R rows, C chunks of them, one after the other, each sorted by expert; e experts; M and N the sides of an expert's
matrix.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_moe.ops.kernels.descriptors import (
    MANY,
    halves,
    is_hopper,
    joined,
    num_multiprocessors,
    tiles,
    tiles_of_experts,
)
from lightning_moe.ops.kernels.launch import blocks, launch, power_of_2

BLOCK_M, BLOCK_N, BLOCK_R = 128, 256, 64
GROUP = 16  # so many neighbouring blocks of M run together, and share the rows in the L2 cache
MIN_ROUNDS = 64  # tiles of a program that its schedule has room for; a power of two, rarely exceeded


def serves(out_eMN: Tensor, grad_RM: Tensor, rows_RN: Tensor, total_eMN: Tensor | None) -> bool:
    """Whether the kernel takes these: contiguous, in whole vectors, rows in 16-bit floats, on a Hopper GPU."""
    return (
        grad_RM.dtype == rows_RN.dtype != torch.float32
        and all(
            x.is_contiguous() and x.shape[-1] % 16 == 0 and x.data_ptr() % 16 == 0 for x in (out_eMN, grad_RM, rows_RN)
        )
        and (total_eMN is None or (total_eMN.is_contiguous() and total_eMN.dtype == torch.float32))
        and is_hopper(out_eMN.device)
    )


def weight_gradient_of_experts(
    out_eMN: Tensor, grad_RM: Tensor, rows_RN: Tensor, ends_Ce: Tensor, total_eMN: Tensor | None, scale: float
) -> None:
    """Write ``(total + grad^T rows) * scale`` for each expert.

    The sum goes on from the total, row block by row block, so how many chunks one call takes does not matter to a single bit.

    Args:
        out_eMN: ``[e, M, N]``, written; may be the total itself.
        grad_RM: ``[R, M]``, 16-bit floats, R at least 1.
        rows_RN: ``[R, N]``, likewise.
        ends_Ce: int32 ``[C * e]``, where the rows of each chunk's experts end.
        total_eMN: ``[e, M, N]`` float32, or ``None`` for zero.
        scale: A factor.

    """
    num_experts, width_m, width_n = out_eMN.shape
    num_tiles = num_experts * blocks(width_m, BLOCK_M) * blocks(width_n, BLOCK_N)
    num_programs = min(num_tiles, num_multiprocessors(out_eMN.device))
    # 227 KiB of shared memory hold 48 KiB for each row block in flight, 64 KiB through which a total gets to where the product
    # is summed, and the part of a tile that is being written: 32 columns in float32 beside a total, 64 otherwise
    num_stages, num_parts = 4, 4
    if total_eMN is not None:
        num_stages, num_parts = 3, 8 if out_eMN.dtype == torch.float32 else 4
    launch(
        _weight_gradient_kernel,
        (num_programs,),
        (
            tiles(out_eMN, [1, BLOCK_M, BLOCK_N // num_parts]),
            tiles_of_experts(grad_RM, [BLOCK_R, BLOCK_M]),
            tiles_of_experts(rows_RN, [BLOCK_R, BLOCK_N]),
            ends_Ce,
            total_eMN,
        ),
        # the number of chunks is no constant: it changes with what routing sends, and a step would wait for the compiler
        (scale, num_experts, ends_Ce.shape[0] // num_experts),
        (
            width_m,
            width_n,
            power_of_2(num_experts),
            max(power_of_2(blocks(num_tiles, num_programs)), MIN_ROUNDS),
            num_parts,
            BLOCK_M,
            BLOCK_N,
            BLOCK_R,
            GROUP,
        ),
        num_warps=8,
        num_stages=num_stages,
    )


@triton.jit
def _load_rows(rows, end, size, row, column, BLOCK_R: tl.constexpr, WIDTH: tl.constexpr):
    """Rows ``row`` and following of an expert's, ``[BLOCK_R, WIDTH]``; zero after its last."""
    return rows.load([MANY, end, MANY - size + row, column]).reshape(BLOCK_R, WIDTH)


@triton.jit
def _place(
    index,
    by_size,
    WIDTH_M: tl.constexpr,
    WIDTH_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
):
    """The expert, first row and first column of a tile."""
    blocks_m, blocks_n = tl.cdiv(WIDTH_M, BLOCK_M), tl.cdiv(WIDTH_N, BLOCK_N)
    turn, within = index // (blocks_m * blocks_n), index % (blocks_m * blocks_n)
    turns = tl.arange(0, by_size.shape[0])
    expert = (tl.sum(tl.where(turns == turn, by_size, 0)) % by_size.shape[0]).to(tl.int32)
    first_m = within // (GROUP * blocks_n) * GROUP
    height = tl.minimum(blocks_m - first_m, GROUP)
    within = within % (GROUP * blocks_n)
    return expert, (first_m + within % height) * BLOCK_M, within // height * BLOCK_N


@triton.jit
def _load_total(
    total_ptr,
    index,
    num_tiles,
    by_size,
    WIDTH_M: tl.constexpr,
    WIDTH_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
):
    """What a tile's sum goes on from, ``[BLOCK_M, BLOCK_N]``: zero without a total, and after the last tile."""
    if total_ptr is None:
        tile = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    else:
        expert, m, n = _place(index, by_size, WIDTH_M, WIDTH_N, BLOCK_M, BLOCK_N, GROUP)
        WIDTH: tl.constexpr = BLOCK_N // 4
        ms, ns = m + tl.arange(0, BLOCK_M)[:, None], n + tl.arange(0, WIDTH)[None, :]
        line_ptr = total_ptr + (expert.to(tl.int64) * WIDTH_M + ms) * WIDTH_N
        there = (index < num_tiles) & (ms < WIDTH_M)
        # in quarters: loaded as one, a tile takes twice the shared memory to get to the threads that sum it
        first = tl.load(line_ptr + ns, mask=there & (ns < WIDTH_N), other=0.0)
        second = tl.load(line_ptr + ns + WIDTH, mask=there & (ns + WIDTH < WIDTH_N), other=0.0)
        third = tl.load(line_ptr + ns + 2 * WIDTH, mask=there & (ns + 2 * WIDTH < WIDTH_N), other=0.0)
        fourth = tl.load(line_ptr + ns + 3 * WIDTH, mask=there & (ns + 3 * WIDTH < WIDTH_N), other=0.0)
        left, right = joined(first, second, BLOCK_M, WIDTH), joined(third, fourth, BLOCK_M, WIDTH)
        tile = joined(left, right, BLOCK_M, 2 * WIDTH)
    return tile


@triton.jit
def _parts(tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr):
    """A tile's columns in four or eight parts, from left to right."""
    left, right = halves(tile, ROWS, COLUMNS)
    parts = halves(left, ROWS, COLUMNS // 2) + halves(right, ROWS, COLUMNS // 2)
    if PARTS == 8:
        WIDTH: tl.constexpr = COLUMNS // 4
        first, second, third, fourth = parts
        parts = halves(first, ROWS, WIDTH) + halves(second, ROWS, WIDTH)
        parts += halves(third, ROWS, WIDTH) + halves(fourth, ROWS, WIDTH)
    return parts


@triton.jit(do_not_specialize=["num_experts", "num_chunks"])
def _weight_gradient_kernel(
    out,
    grad,
    rows,
    ends_ptr,
    total_ptr,
    scale,
    num_experts,
    num_chunks,
    WIDTH_M: tl.constexpr,
    WIDTH_N: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROUNDS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Each program computes a fixed list of tiles, one after the other, in one loop over the row blocks of all of them.

    One loop, and not one for each tile, so that the next tile's rows are fetched while this tile is written. Experts
    take turns from the largest to the smallest, and the programs take tiles in alternating order, so that all programs
    finish at about the same time, however uneven the experts are.
    """
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    tiles_of_expert = tl.cdiv(WIDTH_M, BLOCK_M) * tl.cdiv(WIDTH_N, BLOCK_N)

    experts = tl.arange(0, EXPERTS)
    steps = tl.zeros((EXPERTS,), tl.int32)  # of a tile of each expert
    for chunk in range(num_chunks):
        groups = chunk * num_experts + experts
        ends = tl.load(ends_ptr + groups, mask=experts < num_experts, other=0)
        starts = tl.load(ends_ptr + groups - 1, mask=(experts < num_experts) & (groups > 0), other=0)
        steps += tl.maximum(tl.cdiv(ends - starts, BLOCK_R), 1)  # no rows take a step too: the tile must be written
    steps = tl.where(experts < num_experts, steps, 0)
    by_size = tl.sort(steps.to(tl.int64) * EXPERTS + experts, descending=True)

    rounds = tl.arange(0, ROUNDS)
    turns = (rounds * num_programs + _turn(rounds, program, num_programs)) // tiles_of_expert
    steps_of_turns = tl.gather(by_size, tl.minimum(turns, EXPERTS - 1), 0) // EXPERTS
    num_steps = tl.sum(tl.where(turns < num_experts, steps_of_turns, 0)).to(tl.int32)

    round = -1
    chunk = num_chunks - 1
    expert = 0
    m = 0
    n = 0
    end = 0
    size = 0
    row = 0
    num_tiles = num_experts * tiles_of_expert
    tile = _load_total(total_ptr, program, num_tiles, by_size, WIDTH_M, WIDTH_N, BLOCK_M, BLOCK_N, GROUP)
    for _ in tl.range(num_steps):
        row += BLOCK_R
        if row >= size:
            chunk += 1
            if chunk == num_chunks:
                chunk = 0
                round += 1
                index = round * num_programs + _turn(round, program, num_programs)
                expert, m, n = _place(index, by_size, WIDTH_M, WIDTH_N, BLOCK_M, BLOCK_N, GROUP)
            group = chunk * num_experts + expert
            end = tl.load(ends_ptr + group)
            size = end - tl.load(ends_ptr + group - 1, mask=group > 0, other=0)
            row = 0
        grad_block = _load_rows(grad, end, size, row, m, BLOCK_R, BLOCK_M)
        rows_block = _load_rows(rows, end, size, row, n, BLOCK_R, BLOCK_N)
        tile = tl.dot(grad_block.T, rows_block, tile)
        if (row + BLOCK_R >= size) & (chunk == num_chunks - 1):
            parts = _parts(tile, BLOCK_M, BLOCK_N, PARTS)
            for i in tl.static_range(PARTS):
                part, column = parts[i], n + i * (BLOCK_N // PARTS)
                out.store([expert, m, column], (part * scale).to(out.dtype).reshape(1, BLOCK_M, BLOCK_N // PARTS))
            # the head of the loop finds the next tile anew, since it runs ahead to fetch that one's rows
            index = (round + 1) * num_programs + _turn(round + 1, program, num_programs)
            tile = _load_total(total_ptr, index, num_tiles, by_size, WIDTH_M, WIDTH_N, BLOCK_M, BLOCK_N, GROUP)


@triton.jit
def _turn(round, program, num_programs):
    """A program's place in a round of tiles: forth in even rounds, back in odd ones."""
    return tl.where(round % 2 == 0, program, num_programs - 1 - program)
