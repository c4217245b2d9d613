"""Finding the places of rows: count each block's keys, scan the counts, put every key where it belongs.

Counting sorts, stable and deterministic: within a key, the order is kept. The counts of all blocks lie key by key, so their
running sum is at once the end of each key and the start of each block within it.

Legend: T tokens, K experts a token, C chunks, P ranks, J of them peers, E experts, e of them here, N received rows, R rows
sorted by expert.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_moe.ops.kernels.launch import blocks, launch, power_of_2

TOKENS = 128  # of a program
SLOTS = 128  # of a program; it compares each of them with each other


def count_ids(ids_TK: Tensor, num_local: int, counts_C2P: Tensor) -> None:
    """See :func:`lightning_moe.ops.routing.count_needs`.

    Args:
        ids_TK: int32 or int64 ``[T, K]``, not empty.
        num_local: e, the experts on each rank.
        counts_C2P: int32 or int64 ``[C, 2, P]``, contiguous, added to.

    """
    (num_tokens, top_k), (num_chunks, _, num_ranks) = ids_TK.shape, counts_C2P.shape
    grid = (blocks(blocks(num_tokens, num_chunks), TOKENS), num_chunks)
    constants = (num_chunks, top_k, num_ranks, power_of_2(num_ranks + 1), TOKENS)
    launch(_count_ids, grid, (ids_TK.contiguous(), counts_C2P), (num_tokens, num_local), constants)


def place_copies_of_ids(ids_TK: Tensor, num_local: int, rank: int, num_chunks: int, copies_TJ: Tensor) -> None:
    """See :func:`lightning_moe.ops.routing.place_copies`.

    Args:
        ids_TK: int32 or int64 ``[T, K]``, not empty.
        num_local: e, the experts on each rank.
        rank: This one.
        num_chunks: C.
        copies_TJ: int32 ``[T, P - 1]``, P at least 2, written.

    """
    (num_tokens, top_k), num_peers = ids_TK.shape, copies_TJ.shape[1]
    ids_TK = ids_TK.contiguous()
    num_blocks = blocks(blocks(num_tokens, num_chunks), TOKENS)
    counts_CJB = torch.empty(num_chunks, num_peers, num_blocks, dtype=torch.int32, device=ids_TK.device)
    grid, numbers = (num_blocks, num_chunks), (num_tokens, num_local, num_blocks, rank)
    constants = (num_chunks, top_k, num_peers, power_of_2(num_peers + 1), TOKENS)
    launch(_count_copies, grid, (ids_TK, counts_CJB), numbers, constants)
    ends_CJB = counts_CJB.view(num_chunks, -1).cumsum(1, dtype=torch.int32)
    launch(_place_copies, grid, (ids_TK, counts_CJB, ends_CJB, copies_TJ), numbers, constants)


def sort_slots(
    ids_NK: Tensor, weights_NK: Tensor, first_expert: int, copies_NK: Tensor, ends_e: Tensor, weights_R: Tensor
) -> None:
    """See :func:`lightning_moe.ops.routing.sort_by_expert`.

    Args:
        ids_NK: int32 or int64 ``[N, K]``, elements of a row side by side, not empty.
        weights_NK: float32 ``[N, K]``, likewise.
        first_expert: Of this rank.
        copies_NK: int32 ``[N, K]``, contiguous, written.
        ends_e: int32 ``[e]``, written.
        weights_R: float32 ``[R]``, written.

    """
    num_slots, num_local = copies_NK.numel(), ends_e.shape[0]
    num_blocks = blocks(num_slots, SLOTS)
    counts_eB = torch.empty(num_local, num_blocks, dtype=torch.int32, device=ids_NK.device)
    numbers = (num_slots, num_blocks, first_expert, num_local)
    constants = (copies_NK.shape[1], ids_NK.stride(0), SLOTS)
    bins = power_of_2(num_local + 1)
    launch(_count_slots, (num_blocks,), (ids_NK, counts_eB), numbers, (bins, *constants))
    ends_eB = counts_eB.view(-1).cumsum(0, dtype=torch.int32)
    memory = (ids_NK, weights_NK, counts_eB, ends_eB, copies_NK, ends_e, weights_R)
    launch(_place_slots, (num_blocks,), memory, numbers, (bins, weights_NK.stride(0), *constants))


@triton.jit
def _chunk_start(chunk, num_tokens, CHUNKS: tl.constexpr):
    """The first token of a chunk: as ``chunk_slices`` cuts."""
    return ((num_tokens.to(tl.int64) * chunk + CHUNKS - 1) // CHUNKS).to(tl.int32)


@triton.jit
def _slots_of_ranks(ids_ptr, tokens, stop, num_local, ranks, TOP_K: tl.constexpr):
    """How many slots of each token of a block name an expert of each of some ranks, ``[BLOCK, RANKS]``."""
    slots = tl.zeros_like(tokens)[:, None] + tl.zeros_like(ranks)[None, :]
    for k in tl.static_range(TOP_K):
        ids = tl.load(ids_ptr + tokens.to(tl.int64) * TOP_K + k, mask=tokens < stop, other=-1)
        slots += ((ids >= 0)[:, None] & ((ids // num_local)[:, None] == ranks[None, :])).to(tl.int32)
    return slots


@triton.jit
def _tokens_of_block(num_tokens, CHUNKS: tl.constexpr, BLOCK: tl.constexpr):
    """The tokens of this program, and where those of its chunk end."""
    chunk = tl.program_id(1)
    start = _chunk_start(chunk, num_tokens, CHUNKS)
    return start + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), _chunk_start(chunk + 1, num_tokens, CHUNKS)


@triton.jit(do_not_specialize=["num_tokens", "num_local"])
def _count_ids(
    ids_ptr,
    counts_ptr,
    num_tokens,
    num_local,
    CHUNKS: tl.constexpr,
    TOP_K: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tokens, stop = _tokens_of_block(num_tokens, CHUNKS, BLOCK)
    ranks = tl.arange(0, RANKS)
    slots = _slots_of_ranks(ids_ptr, tokens, stop, num_local, ranks, TOP_K)
    line_ptr = counts_ptr + tl.program_id(1) * (2 * NUM_RANKS)
    tl.atomic_add(line_ptr + ranks, tl.sum((slots > 0).to(tl.int32), 0), mask=ranks < NUM_RANKS)
    tl.atomic_add(line_ptr + NUM_RANKS + ranks, tl.sum(slots, 0), mask=ranks < NUM_RANKS)


@triton.jit
def _peers(rank, PEERS: tl.constexpr):
    """The other ranks, in order."""
    index = tl.arange(0, PEERS)
    return index + (index >= rank).to(tl.int32)


@triton.jit(do_not_specialize=["num_tokens", "num_local", "num_blocks", "rank"])
def _count_copies(
    ids_ptr,
    counts_ptr,
    num_tokens,
    num_local,
    num_blocks,
    rank,
    CHUNKS: tl.constexpr,
    TOP_K: tl.constexpr,
    NUM_PEERS: tl.constexpr,
    PEERS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tokens, stop = _tokens_of_block(num_tokens, CHUNKS, BLOCK)
    wanted = _slots_of_ranks(ids_ptr, tokens, stop, num_local, _peers(rank, PEERS), TOP_K) > 0
    index = tl.arange(0, PEERS)
    cell_ptr = counts_ptr + (tl.program_id(1) * NUM_PEERS + index) * num_blocks + tl.program_id(0)
    tl.store(cell_ptr, tl.sum(wanted.to(tl.int32), 0), mask=index < NUM_PEERS)


@triton.jit(do_not_specialize=["num_tokens", "num_local", "num_blocks", "rank"])
def _place_copies(
    ids_ptr,
    counts_ptr,
    ends_ptr,
    copies_ptr,
    num_tokens,
    num_local,
    num_blocks,
    rank,
    CHUNKS: tl.constexpr,
    TOP_K: tl.constexpr,
    NUM_PEERS: tl.constexpr,
    PEERS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tokens, stop = _tokens_of_block(num_tokens, CHUNKS, BLOCK)
    wanted = _slots_of_ranks(ids_ptr, tokens, stop, num_local, _peers(rank, PEERS), TOP_K) > 0
    index = tl.arange(0, PEERS)
    there = index < NUM_PEERS
    cell = (tl.program_id(1) * NUM_PEERS + index) * num_blocks + tl.program_id(0)
    first = tl.load(ends_ptr + cell, mask=there, other=0) - tl.load(counts_ptr + cell, mask=there, other=0)
    place = first[None, :] + tl.cumsum(wanted.to(tl.int32), 0) - 1
    tl.store(
        copies_ptr + tokens.to(tl.int64)[:, None] * NUM_PEERS + index[None, :],
        tl.where(wanted, place, -1),
        mask=(tokens < stop)[:, None] & there[None, :],
    )


@triton.jit
def _load_experts(
    ids_ptr, num_slots, first_expert, num_local, TOP_K: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr
):
    """The slots of this program and their local experts; ``num_local`` for slots of other ranks' and for none."""
    slots = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + (slots // TOP_K).to(tl.int64) * STRIDE + slots % TOP_K, mask=slots < num_slots, other=-1)
    experts = (ids - first_expert).to(tl.int32)
    return slots, tl.where((ids < 0) | (experts < 0) | (experts >= num_local), num_local, experts)


@triton.jit(do_not_specialize=["num_slots", "num_blocks", "first_expert", "num_local"])
def _count_slots(
    ids_ptr,
    counts_ptr,
    num_slots,
    num_blocks,
    first_expert,
    num_local,
    BINS: tl.constexpr,
    TOP_K: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    _, experts = _load_experts(ids_ptr, num_slots, first_expert, num_local, TOP_K, STRIDE, BLOCK)
    bins = tl.arange(0, BINS)
    counts = tl.histogram(experts, BINS)
    tl.store(counts_ptr + bins * num_blocks + tl.program_id(0), counts, mask=bins < num_local)


@triton.jit(do_not_specialize=["num_slots", "num_blocks", "first_expert", "num_local"])
def _place_slots(
    ids_ptr,
    weights_ptr,
    counts_ptr,
    ends_ptr,
    copies_ptr,
    expert_ends_ptr,
    sorted_weights_ptr,
    num_slots,
    num_blocks,
    first_expert,
    num_local,
    BINS: tl.constexpr,
    WEIGHTS_STRIDE: tl.constexpr,
    TOP_K: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    slots, experts = _load_experts(ids_ptr, num_slots, first_expert, num_local, TOP_K, STRIDE, BLOCK)
    index = tl.arange(0, BLOCK)
    earlier = (index[None, :] < index[:, None]) & (experts[None, :] == experts[:, None])
    here = experts < num_local
    cell = experts * num_blocks + tl.program_id(0)
    start = tl.load(ends_ptr + cell, mask=here, other=0) - tl.load(counts_ptr + cell, mask=here, other=0)
    place = start + tl.sum(earlier.to(tl.int32), axis=1)
    tl.store(copies_ptr + slots, tl.where(here, place, -1), mask=slots < num_slots)
    weight_ptr = weights_ptr + (slots // TOP_K).to(tl.int64) * WEIGHTS_STRIDE + slots % TOP_K
    tl.store(sorted_weights_ptr + place, tl.load(weight_ptr, mask=here), mask=here)
    if tl.program_id(0) == 0:
        bins = tl.arange(0, BINS)
        ends = tl.load(ends_ptr + (bins + 1) * num_blocks - 1, mask=bins < num_local)
        tl.store(expert_ends_ptr + bins, ends, mask=bins < num_local)
