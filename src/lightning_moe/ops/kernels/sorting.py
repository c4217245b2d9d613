"""Sorting small integer keys: count each block's keys, scan the counts, put every slot where it belongs.

A counting sort, stable and deterministic: within a key, slots keep their order. The counts of all blocks lie key by key, so
their running sum is at once the end of each key and the start of each block within it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 128  # slots of a program; it compares each of them with each other


def sort_slots(keys_MJ: Tensor, num_keys: int, num_rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See :func:`lightning_moe.ops.rows.rows_by_key`.

    Args:
        keys_MJ: int32 ``[M, J]``, below ``num_keys``, negative for none; not empty.
        num_keys: Number of keys.
        num_rows: R, how many slots have a key.

    Returns:
        ``source_R``, ``copies_MJ``, ``slots_R`` and ``ends``, all int32.

    """
    keys_MJ = keys_MJ.contiguous()
    num_slots, device = keys_MJ.numel(), keys_MJ.device
    num_blocks = triton.cdiv(num_slots, BLOCK)
    counts = torch.empty(num_keys, num_blocks, dtype=torch.int32, device=device)
    bins = triton.next_power_of_2(num_keys + 1)
    _count_blocks[(num_blocks,)](keys_MJ, counts, num_slots, num_blocks, num_keys, BINS=bins, BLOCK=BLOCK)
    ends = counts.view(-1).cumsum(0, dtype=torch.int32)
    source_R, slots_R = torch.empty(2, num_rows, dtype=torch.int32, device=device)
    copies_MJ = torch.empty_like(keys_MJ)
    _place[(num_blocks,)](
        keys_MJ, counts, ends, source_R, slots_R, copies_MJ, num_slots, num_blocks, WIDTH=keys_MJ.shape[1], BLOCK=BLOCK
    )
    return source_R, copies_MJ, slots_R, ends[num_blocks - 1 :: num_blocks].contiguous()


def add_counts(keys_MJ: Tensor, counts: Tensor) -> None:
    """Add how often each key occurs to int32 ``counts``; keys as above."""
    keys_MJ = keys_MJ.contiguous()
    num_keys, block = counts.shape[0], 1024
    bins = triton.next_power_of_2(num_keys + 1)
    grid = (triton.cdiv(keys_MJ.numel(), block),)
    _add_counts[grid](keys_MJ, counts, keys_MJ.numel(), num_keys, BINS=bins, BLOCK=block)


def ranks_of_tokens(ids_TK: Tensor, num_local: int, num_ranks: int) -> Tensor:
    """See :func:`lightning_moe.ops.rows.rank_keys`; the ids are int32 and not empty."""
    num_tokens, top_k = ids_TK.shape
    keys_TP = torch.empty(num_tokens, num_ranks, dtype=torch.int32, device=ids_TK.device)
    ranks, block = triton.next_power_of_2(num_ranks), 128
    _ranks[(triton.cdiv(num_tokens, block),)](
        ids_TK.contiguous(), keys_TP, num_tokens, num_local, num_ranks, TOP_K=top_k, RANKS=ranks, BLOCK=block
    )
    return keys_TP


@triton.jit
def _load_keys(keys_ptr, num_slots, BLOCK: tl.constexpr):
    """The slots of this program and their keys; ``-1`` for slots that are not there."""
    slots = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    return slots, tl.load(keys_ptr + slots, mask=slots < num_slots, other=-1)


@triton.jit
def _histogram(keys, num_keys, BINS: tl.constexpr):
    """How often each key occurs; slots without a key are counted in the bin after the last."""
    return tl.histogram(tl.where(keys < 0, num_keys, keys), BINS)


@triton.jit
def _count_blocks(keys_ptr, counts_ptr, num_slots, num_blocks, num_keys, BINS: tl.constexpr, BLOCK: tl.constexpr):
    _, keys = _load_keys(keys_ptr, num_slots, BLOCK)
    bins = tl.arange(0, BINS)
    tl.store(counts_ptr + bins * num_blocks + tl.program_id(0), _histogram(keys, num_keys, BINS), mask=bins < num_keys)


@triton.jit
def _add_counts(keys_ptr, counts_ptr, num_slots, num_keys, BINS: tl.constexpr, BLOCK: tl.constexpr):
    _, keys = _load_keys(keys_ptr, num_slots, BLOCK)
    bins = tl.arange(0, BINS)
    tl.atomic_add(counts_ptr + bins, _histogram(keys, num_keys, BINS), mask=bins < num_keys)


@triton.jit
def _place(
    keys_ptr,
    counts_ptr,
    ends_ptr,
    source_ptr,
    slots_ptr,
    copies_ptr,
    num_slots,
    num_blocks,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    slots, keys = _load_keys(keys_ptr, num_slots, BLOCK)
    index = tl.arange(0, BLOCK)
    earlier = (index[None, :] < index[:, None]) & (keys[None, :] == keys[:, None])
    has_key = keys >= 0
    cell = keys * num_blocks + tl.program_id(0)
    start = tl.load(ends_ptr + cell, mask=has_key, other=0) - tl.load(counts_ptr + cell, mask=has_key, other=0)
    place = start + tl.sum(earlier.to(tl.int32), axis=1)
    tl.store(source_ptr + place, slots // WIDTH, mask=has_key)
    tl.store(slots_ptr + place, slots, mask=has_key)
    tl.store(copies_ptr + slots, tl.where(has_key, place, -1), mask=slots < num_slots)


@triton.jit
def _ranks(
    ids_ptr,
    keys_ptr,
    num_tokens,
    num_local,
    num_ranks,
    TOP_K: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ranks = tl.arange(0, RANKS)[None, :]
    wanted = tl.zeros((BLOCK, RANKS), tl.int1)
    for k in tl.static_range(TOP_K):
        ids = tl.load(ids_ptr + tokens * TOP_K + k, mask=tokens < num_tokens, other=-1)
        wanted = wanted | ((ids >= 0)[:, None] & ((ids // num_local)[:, None] == ranks))
    keys = tl.where(wanted, ranks, -1)
    tl.store(
        keys_ptr + tokens[:, None] * num_ranks + ranks, keys, mask=(tokens < num_tokens)[:, None] & (ranks < num_ranks)
    )
