"""Finding the places of rows: count each block's keys, add up what is before it, put every key where it belongs.

Counting sorts, stable and deterministic: within a key, the order is kept. Counting for the other ranks and sorting by expert
come before a layer's first matrix product, where the device waits for launches and not for memory. So these take few: the
last program of a kernel to end does what would take another kernel.

Legend: T tokens, K experts a token, C chunks, P ranks, J of them peers, E experts, e of them here, N received rows, R rows
sorted by expert.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_moe.ops.kernels.launch import blocks, current_stream, launch, power_of_2

TOKENS = 128  # of a program
SLOTS = 128  # of a program; it compares each of them with each other
MOST_SPANS = 128  # of blocks of slots: one program adds up the counts of all of them
CELLS = 4096  # counts that it holds at a time
MEETING = 1024  # numbers of a place to meet at least, so that kernels of one stream need not have one each


def count_ids(ids_TK: Tensor, num_local: int, counts_C2P: Tensor, mark: int) -> None:
    """See :func:`lightning_moe.ops.routing.count_needs`.

    Args:
        ids_TK: int32 or int64 ``[T, K]``, not empty.
        num_local: e, the experts on each rank.
        counts_C2P: int32 or int64 ``[C, 2, P]``, contiguous, written; on the device, or where it may write on the host.
        mark: A multiple of 2**32.

    """
    (num_tokens, top_k), (num_chunks, _, num_ranks) = ids_TK.shape, counts_C2P.shape
    num_blocks = blocks(blocks(num_tokens, num_chunks), TOKENS)
    sums = _meeting_place(ids_TK.device, num_chunks * (2 * num_ranks + 1))
    constants = (num_chunks, top_k, num_ranks, power_of_2(num_ranks), TOKENS)
    numbers = (num_tokens, num_local, mark >> 32)
    launch(_count_ids, (num_blocks, num_chunks), (ids_TK.contiguous(), sums, counts_C2P), numbers, constants)


def _meeting_place(device: torch.device, count: int) -> Tensor:
    """So many int32 zeros, or more, in which the programs of a kernel meet.

    They live as long as the process; the last program leaves zeros for the next kernel of this stream.
    """
    return _zeros(device, current_stream(device), max(power_of_2(count), MEETING))


@functools.cache
def _zeros(device: torch.device, stream: int, count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.int32, device=device)


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
    num_blocks, bins = blocks(num_slots, SLOTS), power_of_2(num_local + 1)
    span = blocks(num_blocks, MOST_SPANS)
    num_spans = blocks(num_blocks, span)
    # of each expert, how many slots are before each block in its span; then, where each span's rows start
    starts_BSe = torch.empty(num_blocks + num_spans, num_local, dtype=torch.int32, device=ids_NK.device)
    done = _meeting_place(ids_NK.device, 1)
    numbers = (num_slots, span, first_expert, num_local)
    constants = (copies_NK.shape[1], ids_NK.stride(0), SLOTS)
    counted = (ids_NK, done, starts_BSe, ends_e)
    launch(_count_slots, (num_spans,), counted, numbers, (bins, max(CELLS // bins, 1), *constants))
    placed = (ids_NK, weights_NK, starts_BSe, copies_NK, weights_R)
    launch(_place_slots, (num_blocks,), placed, numbers, (weights_NK.stride(0), *constants))


@triton.jit
def _chunk_start(chunk, num_tokens, CHUNKS: tl.constexpr):
    """The first token of a chunk: as ``chunk_slices`` cuts."""
    return ((num_tokens.to(tl.int64) * chunk + CHUNKS - 1) // CHUNKS).to(tl.int32)


@triton.jit
def _slots_of_ranks(ids_ptr, tokens, stop, num_local, ranks, TOP_K: tl.constexpr):
    """How many slots of each token of a block name an expert of each of some ranks, ``[BLOCK, RANKS]``."""
    slots = tl.zeros_like(tokens)[:, None] + tl.zeros_like(ranks)[None, :]
    for k in tl.static_range(TOP_K):
        ids = tl.load(ids_ptr + tokens.to(tl.int64) * TOP_K + k, mask=tokens < stop, other=-1).to(tl.int32)
        slots += ((ids >= 0)[:, None] & ((ids // num_local)[:, None] == ranks[None, :])).to(tl.int32)
    return slots


@triton.jit
def _tokens_of_block(num_tokens, CHUNKS: tl.constexpr, BLOCK: tl.constexpr):
    """The tokens of this program, and where those of its chunk end."""
    chunk = tl.program_id(1)
    start = _chunk_start(chunk, num_tokens, CHUNKS)
    return start + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), _chunk_start(chunk + 1, num_tokens, CHUNKS)


@triton.jit(do_not_specialize=["num_tokens", "num_local", "mark"])
def _count_ids(
    ids_ptr,
    sums_ptr,
    counts_ptr,
    num_tokens,
    num_local,
    mark,
    CHUNKS: tl.constexpr,
    TOP_K: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The programs of a chunk add up what they counted; the last one to do so writes the sums, so each is written once."""
    tokens, stop = _tokens_of_block(num_tokens, CHUNKS, BLOCK)
    ranks = tl.arange(0, RANKS)
    there = ranks < NUM_RANKS
    slots = _slots_of_ranks(ids_ptr, tokens, stop, num_local, ranks, TOP_K)
    done_ptr = sums_ptr + tl.program_id(1) * (2 * NUM_RANKS + 1)
    needs_ptr = done_ptr + 1 + ranks
    tl.atomic_add(needs_ptr, tl.sum((slots > 0).to(tl.int32), 0), mask=there, sem="relaxed")
    tl.atomic_add(needs_ptr + NUM_RANKS, tl.sum(slots, 0), mask=there, sem="relaxed")
    tl.debug_barrier()  # all threads have added before one of them says so
    if tl.atomic_add(done_ptr, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        high = mark.to(tl.int64) << 32
        line_ptr = counts_ptr + tl.program_id(1) * (2 * NUM_RANKS) + ranks
        tl.store(line_ptr, high + tl.atomic_xchg(needs_ptr, 0, mask=there), mask=there)
        tl.store(line_ptr + NUM_RANKS, high + tl.atomic_xchg(needs_ptr + NUM_RANKS, 0, mask=there), mask=there)
        tl.atomic_xchg(done_ptr, 0)


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
    ids_ptr, block, num_slots, first_expert, num_local, TOP_K: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr
):
    """The slots of a block and their local experts; ``num_local`` for slots of other ranks' and for none."""
    slots = block * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + (slots // TOP_K).to(tl.int64) * STRIDE + slots % TOP_K, mask=slots < num_slots, other=-1)
    experts = (ids - first_expert).to(tl.int32)
    return slots, tl.where((ids < 0) | (experts < 0) | (experts >= num_local), num_local, experts)


@triton.jit(do_not_specialize=["num_slots", "span", "first_expert", "num_local"])
def _count_slots(
    ids_ptr,
    done_ptr,
    before_ptr,
    expert_ends_ptr,
    num_slots,
    span,
    first_expert,
    num_local,
    BINS: tl.constexpr,
    HELD: tl.constexpr,
    TOP_K: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program counts a span of blocks, and keeps what of each expert is before each block.

    The last program to do so turns the counts of all spans into where each expert's rows of each span start.
    """
    bins, num_spans = tl.arange(0, BINS), tl.num_programs(0)
    there = bins < num_local
    counts = tl.zeros((BINS,), tl.int32)
    num_blocks, first_block = tl.cdiv(num_slots, BLOCK), tl.program_id(0) * span
    starts_ptr = before_ptr + num_blocks * num_local
    for block in range(first_block, tl.minimum(first_block + span, num_blocks)):
        tl.store(before_ptr + block * num_local + bins, counts, mask=there)
        _, experts = _load_experts(ids_ptr, block, num_slots, first_expert, num_local, TOP_K, STRIDE, BLOCK)
        counts += tl.histogram(experts, BINS)
    tl.store(starts_ptr + tl.program_id(0) * num_local + bins, counts, mask=there)
    tl.debug_barrier()  # all threads have written before one of them says so
    if tl.atomic_add(done_ptr, 1, sem="acq_rel") == num_spans - 1:
        tl.atomic_xchg(done_ptr, 0)
        totals = tl.zeros((BINS,), tl.int32)
        for first in range(0, num_spans, HELD):
            _, some, _ = _counts_of_spans(starts_ptr, first, num_spans, num_local, bins, HELD)
            totals += tl.sum(some, 0)
        ends = tl.cumsum(totals, 0)
        tl.store(expert_ends_ptr + bins, ends, mask=there)
        starts = ends - totals
        for first in range(0, num_spans, HELD):
            cells_ptr, some, inside = _counts_of_spans(starts_ptr, first, num_spans, num_local, bins, HELD)
            tl.store(cells_ptr, starts[None, :] + tl.cumsum(some, 0) - some, mask=inside)
            starts += tl.sum(some, 0)


@triton.jit
def _counts_of_spans(counts_ptr, first, num_spans, num_local, bins, HELD: tl.constexpr):
    """Where those of some spans are, what they are, and which there are, all ``[HELD, BINS]``."""
    spans = first + tl.arange(0, HELD)[:, None]
    cells_ptr = counts_ptr + spans * num_local + bins[None, :]
    inside = (spans < num_spans) & (bins < num_local)[None, :]
    # other programs wrote them: not from this multiprocessor's own cache
    return cells_ptr, tl.load(cells_ptr, mask=inside, other=0, cache_modifier=".cg"), inside


@triton.jit(do_not_specialize=["num_slots", "span", "first_expert", "num_local"])
def _place_slots(
    ids_ptr,
    weights_ptr,
    before_ptr,
    copies_ptr,
    sorted_weights_ptr,
    num_slots,
    span,
    first_expert,
    num_local,
    WEIGHTS_STRIDE: tl.constexpr,
    TOP_K: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block, index = tl.program_id(0), tl.arange(0, BLOCK)
    slots, experts = _load_experts(ids_ptr, block, num_slots, first_expert, num_local, TOP_K, STRIDE, BLOCK)
    here = experts < num_local
    start = tl.load(before_ptr + block * num_local + experts, mask=here, other=0)
    start += tl.load(before_ptr + (tl.num_programs(0) + block // span) * num_local + experts, mask=here, other=0)
    earlier = (index[None, :] < index[:, None]) & (experts[None, :] == experts[:, None])
    place = start + tl.sum(earlier.to(tl.int32), 1)
    tl.store(copies_ptr + slots, tl.where(here, place, -1), mask=slots < num_slots)
    weight_ptr = weights_ptr + (slots // TOP_K).to(tl.int64) * WEIGHTS_STRIDE + slots % TOP_K
    tl.store(sorted_weights_ptr + place, tl.load(weight_ptr, mask=here), mask=here)
