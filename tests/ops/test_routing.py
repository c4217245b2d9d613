"""Chunks, counts, places and orders against index arithmetic on Python lists."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_moe.ops.routing import Order, chunk_slices, count_needs, place_copies, sort_by_expert
from ops.routings import checked, ids_tensor, on_every_edge, random_ids, sorted_slots

CHUNKS = (1, 2, 5, 12)  # the last are more than tokens


@checked
@given(st.integers(0, 10_000), st.integers(1, 40))
def test_chunks_are_contiguous_cover_the_batch_and_are_even(num_tokens, num_chunks):
    chunks = chunk_slices(num_tokens, num_chunks)
    assert len(chunks) == num_chunks
    assert chunks[0].start == 0
    assert chunks[-1].stop == num_tokens
    assert all(before.stop == after.start for before, after in pairwise(chunks))
    sizes = [chunk.stop - chunk.start for chunk in chunks]
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) == -(-num_tokens // num_chunks)


@checked
@given(st.lists(st.lists(st.integers(-1, 5), min_size=3, max_size=3), max_size=12), st.integers(1, 5))
def test_slots_are_counted_for_each_chunk_and_rank(rows, num_chunks):
    """Also those that name an expert a second time."""
    counts_C2P = torch.zeros(num_chunks, 2, 3, dtype=torch.int64)
    count_needs(ids_tensor(rows, 3, torch.int64), 6, counts_C2P)
    chunks = [rows[chunk] for chunk in chunk_slices(len(rows), num_chunks)]
    slots = [[[sum(i // 2 == rank for i in row) for row in chunk] for rank in range(3)] for chunk in chunks]
    assert counts_C2P[:, 0].tolist() == [[sum(n > 0 for n in of_rank) for of_rank in chunk] for chunk in slots]
    assert counts_C2P[:, 1].tolist() == [[sum(of_rank) for of_rank in chunk] for chunk in slots]


def wanted_by(rows, num_ranks: int, num_local: int) -> list[list[bool]]:
    """Which tokens each rank needs."""
    return [[any(i >= 0 and i // num_local == rank for i in row) for row in rows] for rank in range(num_ranks)]


@on_every_edge
def test_a_rank_needs_a_token_once_and_its_experts_each_slot(case):
    """In chunks of any number, for ids of either width."""
    rows, top_k, num_ranks, num_local = case
    wanted = wanted_by(rows, num_ranks, num_local)
    slots = [[sum(i >= 0 and i // num_local == rank for i in row) for row in rows] for rank in range(num_ranks)]
    for num_chunks in CHUNKS:
        chunks = chunk_slices(len(rows), num_chunks)
        expected = [[[sum(of_rank[chunk]) for of_rank in counts] for counts in (wanted, slots)] for chunk in chunks]
        for dtype in (torch.int32, torch.int64):
            for mark in (0, 1 << 40):
                counts_C2P = torch.full((num_chunks, 2, num_ranks), 77)
                count_needs(ids_tensor(rows, top_k, dtype), num_ranks * num_local, counts_C2P, mark)
                assert (counts_C2P - mark).tolist() == expected


@on_every_edge
def test_a_token_is_sent_once_to_each_peer_that_needs_it(case):
    """Sorted by peer, then by token, in each chunk; as seen by each rank, for ids of either width."""
    rows, top_k, num_ranks, num_local = case
    wanted = wanted_by(rows, num_ranks, num_local)
    for num_chunks in CHUNKS:
        for me in range(num_ranks):
            peers, copies = [rank for rank in range(num_ranks) if rank != me], []
            for chunk in chunk_slices(len(rows), num_chunks):
                tokens = range(len(rows))[chunk]
                sent = [(peer, token) for peer in peers for token in tokens if wanted[peer][token]]
                copies += [[sent.index((p, t)) if wanted[p][t] else -1 for p in peers] for t in tokens]
            for dtype in (torch.int32, torch.int64):
                ids_TK = ids_tensor(rows, top_k, dtype)
                copies_TJ = place_copies(ids_TK, num_ranks * num_local, num_ranks, me, num_chunks)
                assert copies_TJ.tolist() == copies
                assert copies_TJ.shape == (len(rows), num_ranks - 1)
                assert copies_TJ.dtype == torch.int32


def sort(ids_NK, weights_NK, first_expert: int, num_local: int, room: int):
    """An order, over memory that holds something else before."""
    order = Order.empty(*ids_NK.shape, num_local, room, weights_NK)
    order.by_expert.copies_MJ.fill_(77)
    order.groups.ends_e.fill_(77)
    order.weights_R.fill_(float("nan"))
    sort_by_expert(ids_NK, weights_NK, first_expert, order)
    return order


@on_every_edge
def test_each_rank_sorts_its_own_slots_stably(case):
    """Places, ends and weights; slots of other ranks' experts are left out, whatever lies before and after them."""
    rows, top_k, num_ranks, num_local = case
    for dtype, ids_dtype in ((torch.float32, torch.int32), (torch.float64, torch.int32), (torch.float32, torch.int64)):
        weights_NK = torch.arange(1.0, 1 + len(rows) * top_k, dtype=dtype).view(-1, top_k)
        ids_NK = ids_tensor(rows, top_k, ids_dtype)
        for rank in range(num_ranks):
            slots, places, ends = sorted_slots(rows, rank * num_local, num_local)
            exact = sort(ids_NK, weights_NK, rank * num_local, num_local, len(slots))
            roomy = sort(ids_NK, weights_NK, rank * num_local, num_local, ids_NK.numel())
            for order in (exact, roomy.cut(len(slots))):
                assert order.by_expert.copies_MJ.flatten().tolist() == places
                assert order.by_expert.copies_MJ.shape == (len(rows), top_k)
                assert order.by_expert.num_copies == order.groups.num_rows == len(slots)
                assert order.weights_R.tolist() == [1.0 + slot for slot in slots]
                assert order.groups.ends_e.tolist() == ends
                assert order.weights_R.dtype == dtype
                assert order.by_expert.copies_MJ.dtype == order.groups.ends_e.dtype == torch.int32


@pytest.mark.parametrize("first_expert", [0, 4, 8])
def test_ids_and_weights_may_be_columns_of_wider_rows(first_expert):
    """As they are when they arrive side by side with other rows."""
    ids_NK = random_ids(40, 12, 4)
    weights_NK = torch.rand(40, 4, generator=torch.Generator().manual_seed(1))
    slots, places, ends = sorted_slots(ids_NK.tolist(), first_expert, 4)
    wide_ids, wide_weights = torch.full((40, 12), first_expert, dtype=torch.int32), torch.full((40, 9), float("nan"))
    wide_ids[:, 4:8], wide_weights[:, 3:7] = ids_NK, weights_NK
    order = sort(wide_ids[:, 4:8], wide_weights[:, 3:7], first_expert, 4, len(slots))
    assert order.by_expert.copies_MJ.flatten().tolist() == places
    assert order.groups.ends_e.tolist() == ends
    assert torch.equal(order.weights_R, weights_NK.flatten()[slots])


def test_an_order_keeps_to_the_device_and_dtype_of_the_weights():
    order = Order.empty(5, 3, 4, 6, torch.empty(5, 3, dtype=torch.float64, device="meta"))
    tensors = (order.by_expert.copies_MJ, order.groups.ends_e, order.weights_R)
    assert [tuple(x.shape) for x in tensors] == [(5, 3), (4,), (6,)]
    assert [x.dtype for x in tensors] == [torch.int32, torch.int32, torch.float64]
    assert {x.device.type for x in tensors} == {"meta"}
    assert (order.by_expert.num_copies, order.groups.num_rows) == (6, 6)
