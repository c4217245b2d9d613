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

from lightning_moe.ops.kernels.descriptors import MANY, halves, is_hopper, num_multiprocessors, tiles, tiles_of_experts
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

    Args:
        out_eMN: ``[e, M, N]``, written; may be the total itself.
        grad_RM: ``[R, M]``, 16-bit floats, R at least 1.
        rows_RN: ``[R, N]``, likewise.
        ends_Ce: int32 ``[C * e]``, where the rows of each chunk's experts end.
        total_eMN: ``[e, M, N]`` float32, or ``None`` for zero.
        scale: A factor.

    """
    num_experts, width_m, width_n = out_eMN.shape
    add_in_place = total_eMN is not None and total_eMN.data_ptr() == out_eMN.data_ptr() and scale == 1.0
    num_tiles = num_experts * blocks(width_m, BLOCK_M) * blocks(width_n, BLOCK_N)
    num_programs = min(num_tiles, num_multiprocessors(out_eMN.device))
    # 227 KiB of shared memory hold 48 KiB for each row block in flight, 32 KiB for a quarter of a tile that is written, and as
    # much again where a quarter of the total is read
    num_stages = 3 if total_eMN is not None and not add_in_place else 4
    launch(
        _weight_gradient_kernel,
        (num_programs,),
        (
            tiles(out_eMN, [1, BLOCK_M, BLOCK_N // 4]),
            tiles_of_experts(grad_RM, [BLOCK_R, BLOCK_M]),
            tiles_of_experts(rows_RN, [BLOCK_R, BLOCK_N]),
            ends_Ce,
            None if add_in_place else total_eMN,
        ),
        (scale, num_experts),
        (
            width_m,
            width_n,
            ends_Ce.shape[0] // num_experts,
            power_of_2(num_experts),
            max(power_of_2(blocks(num_tiles, num_programs)), MIN_ROUNDS),
            add_in_place,
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
def _load_total(
    total_ptr,
    expert,
    m,
    n,
    WIDTH_M: tl.constexpr,
    WIDTH_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    ms, ns = m + tl.arange(0, BLOCK_M)[:, None], n + tl.arange(0, BLOCK_N)[None, :]
    line = expert.to(tl.int64) * WIDTH_M + ms
    return tl.load(total_ptr + line * WIDTH_N + ns, mask=(ms < WIDTH_M) & (ns < WIDTH_N), other=0.0)


@triton.jit
def _quarters(tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A tile's columns in four parts, from left to right."""
    left, right = halves(tile, ROWS, COLUMNS)
    return halves(left, ROWS, COLUMNS // 2) + halves(right, ROWS, COLUMNS // 2)


@triton.jit(do_not_specialize=["num_experts"])
def _weight_gradient_kernel(
    out,
    grad,
    rows,
    ends_ptr,
    total_ptr,
    scale,
    num_experts,
    WIDTH_M: tl.constexpr,
    WIDTH_N: tl.constexpr,
    CHUNKS: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROUNDS: tl.constexpr,
    ADD_IN_PLACE: tl.constexpr,
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
    blocks_m, blocks_n = tl.cdiv(WIDTH_M, BLOCK_M), tl.cdiv(WIDTH_N, BLOCK_N)
    tiles_of_expert = blocks_m * blocks_n

    experts = tl.arange(0, EXPERTS)
    steps = tl.zeros((EXPERTS,), tl.int32)  # of a tile of each expert
    for chunk in tl.static_range(CHUNKS):
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
    chunk = CHUNKS - 1
    expert = 0
    m = 0
    n = 0
    end = 0
    size = 0
    row = 0
    tile = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for _ in tl.range(num_steps):
        row += BLOCK_R
        if row >= size:
            chunk += 1
            if chunk == CHUNKS:
                chunk = 0
                round += 1
                index = round * num_programs + _turn(round, program, num_programs)
                expert = (tl.sum(tl.where(experts == index // tiles_of_expert, by_size, 0)) % EXPERTS).to(tl.int32)
                within = index % tiles_of_expert
                first_m = within // (GROUP * blocks_n) * GROUP
                height = tl.minimum(blocks_m - first_m, GROUP)
                within = within % (GROUP * blocks_n)
                m = (first_m + within % height) * BLOCK_M
                n = within // height * BLOCK_N
            group = chunk * num_experts + expert
            end = tl.load(ends_ptr + group)
            size = end - tl.load(ends_ptr + group - 1, mask=group > 0, other=0)
            row = 0
        grad_block = _load_rows(grad, end, size, row, m, BLOCK_R, BLOCK_M)
        rows_block = _load_rows(rows, end, size, row, n, BLOCK_R, BLOCK_N)
        tile = tl.dot(grad_block.T, rows_block, tile)
        if (row + BLOCK_R >= size) & (chunk == CHUNKS - 1):
            WIDTH: tl.constexpr = BLOCK_N // 4
            parts = _quarters(tile, BLOCK_M, BLOCK_N)
            for i in tl.static_range(4):
                part, column = parts[i], n + i * WIDTH
                if ADD_IN_PLACE:
                    out.atomic_add([expert, m, column], part.reshape(1, BLOCK_M, WIDTH))
                else:
                    if total_ptr is not None:
                        part += _load_total(total_ptr, expert, m, column, WIDTH_M, WIDTH_N, BLOCK_M, WIDTH)
                    out.store([expert, m, column], (part * scale).to(out.dtype).reshape(1, BLOCK_M, WIDTH))
            tile = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)


@triton.jit
def _turn(round, program, num_programs):
    """A program's place in a round of tiles: forth in even rounds, back in odd ones."""
    return tl.where(round % 2 == 0, program, num_programs - 1 - program)
