"""Row maps against index arithmetic on Python lists, and gather/reduce as each other's adjoint."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lightning_moe.ops.rows import RowMap, gather, rank_keys, reduce, rows_by_key

checked = settings(max_examples=80, deadline=None, derandomize=True, database=None)


@st.composite
def routings(draw):
    """Ids ``[T, K]`` without repetition, ``-1`` in any slot, over P ranks of e experts; few experts are often in use."""
    num_ranks, num_local = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    num_used = draw(st.integers(1, num_ranks * num_local))
    used = draw(st.permutations(range(num_ranks * num_local)))[:num_used]
    top_k = draw(st.integers(1, 4))
    chosen = st.lists(st.sampled_from(used), unique=True, max_size=min(top_k, num_used))
    rows = draw(st.lists(chosen, max_size=9))
    shift = draw(st.integers(0, top_k - 1))  # where the empty slots lie
    padded = [row + [-1] * (top_k - len(row)) for row in rows]
    return [row[shift:] + row[:shift] for row in padded], top_k, num_ranks, num_local


NO_TOKENS = ([], 2, 3, 2)
ALL_TO_ONE_EXPERT = ([[4], [4], [4]], 1, 3, 2)
NO_EXPERT_AT_ALL = ([[-1, -1], [-1, -1]], 2, 2, 2)
EVERY_EXPERT = ([[3, 1, 0, 2], [0, 1, 2, 3]], 4, 2, 2)


def on_every_edge(test):
    for case in (NO_TOKENS, ALL_TO_ONE_EXPERT, NO_EXPERT_AT_ALL, EVERY_EXPERT):
        test = example(case)(test)
    return checked(given(routings())(test))


def ids_tensor(rows, top_k: int, dtype=torch.int32):
    return torch.tensor(rows, dtype=dtype).view(-1, top_k)


def by_expert(ids_NK, counts):
    row_map, slots_R, ends = rows_by_key(ids_NK, len(counts), sum(counts))
    assert ends.tolist() == [sum(counts[: e + 1]) for e in range(len(counts))]
    return row_map, slots_R


def expert_map(rows, top_k: int, num_experts: int):
    counts = tuple(sum(row.count(expert) for row in rows) for expert in range(num_experts))
    return by_expert(ids_tensor(rows, top_k), counts)


def rank_map(rows, top_k: int, num_ranks: int, num_local: int):
    wanted = [[any(i >= 0 and i // num_local == rank for i in row) for row in rows] for rank in range(num_ranks)]
    splits = tuple(map(sum, wanted))
    keys_TP = rank_keys(ids_tensor(rows, top_k), num_local, num_ranks)
    return rows_by_key(keys_TP, num_ranks, sum(splits)).rows, wanted


@on_every_edge
def test_rows_by_expert_is_a_stable_sort_of_slots(case):
    rows, top_k, num_ranks, num_local = case
    row_map, slots_R = expert_map(rows, top_k, num_ranks * num_local)
    flat = [expert for row in rows for expert in row]
    slots = sorted((slot for slot, expert in enumerate(flat) if expert >= 0), key=lambda slot: (flat[slot], slot))
    assert slots_R.tolist() == slots
    assert row_map.source_R.tolist() == [slot // top_k for slot in slots]
    copies = [slots.index(slot) if expert >= 0 else -1 for slot, expert in enumerate(flat)]
    assert row_map.copies_MJ.tolist() == [copies[n * top_k : (n + 1) * top_k] for n in range(len(rows))]
    assert {row_map.source_R.dtype, row_map.copies_MJ.dtype, slots_R.dtype} == {torch.int32}


@on_every_edge
def test_rows_by_rank_holds_each_token_once_for_each_rank_that_needs_it(case):
    rows, top_k, num_ranks, num_local = case
    row_map, wanted = rank_map(rows, top_k, num_ranks, num_local)
    sent = [(rank, token) for rank in range(num_ranks) for token in range(len(rows)) if wanted[rank][token]]
    assert row_map.source_R.tolist() == [token for _, token in sent]
    copies = [
        [sent.index((rank, token)) if wanted[rank][token] else -1 for rank in range(num_ranks)]
        for token in range(len(rows))
    ]
    assert row_map.copies_MJ.tolist() == copies
    assert tuple(row_map.copies_MJ.shape) == (len(rows), num_ranks)
    keys_TP = rank_keys(ids_tensor(rows, top_k), num_local, num_ranks)
    assert keys_TP.tolist() == [[r if wanted[r][t] else -1 for r in range(num_ranks)] for t in range(len(rows))]


@on_every_edge
def test_gather_and_reduce_are_adjoint(case):
    """<gather(x), r> == <x, reduce(r)>, and both equal plain index arithmetic."""
    rows, top_k, num_ranks, num_local = case
    generator = torch.Generator().manual_seed(0)
    by_expert, _ = expert_map(rows, top_k, num_ranks * num_local)
    by_rank, _ = rank_map(rows, top_k, num_ranks, num_local)
    for row_map in (by_expert, by_rank):
        source_R = row_map.source_R.tolist()
        x_MX = torch.randn(len(rows), 3, generator=generator, dtype=torch.float64)
        r_RX = torch.randn(len(source_R), 3, generator=generator, dtype=torch.float64)
        back_MX = torch.full_like(x_MX, float("nan"))
        gathered_RX = gather(x_MX, row_map)
        reduce(r_RX, row_map, back_MX)
        assert gathered_RX.tolist() == [x_MX[m].tolist() for m in source_R]
        expected_MX = torch.zeros_like(x_MX)
        for position, m in enumerate(source_R):
            expected_MX[m] += r_RX[position]
        torch.testing.assert_close(back_MX, expected_MX, rtol=1e-14, atol=1e-14)
        assert abs((gathered_RX * r_RX).sum() - (x_MX * back_MX).sum()) <= 1e-12


def random_ids(num_rows: int = 40, num_experts: int = 6, top_k: int = 4, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    ids_NK = torch.rand(num_rows, num_experts, generator=generator).argsort(1)[:, :top_k].int()
    return torch.where(torch.rand(ids_NK.shape, generator=generator) < 0.3, -1, ids_NK), generator


def counted(ids_NK, num_experts: int = 6):
    return tuple(int((ids_NK == expert).sum()) for expert in range(num_experts))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_reduce_rounds_once(dtype):
    """Summed in float32: what is left is one rounding to the output's dtype."""
    ids_NK, generator = random_ids()
    row_map, slots_R = by_expert(ids_NK, counted(ids_NK))
    r_RX = torch.randn(len(slots_R), 33, generator=generator).to(dtype)
    out_NX = torch.empty(len(ids_NK), 33, dtype=dtype)
    reduce(r_RX, row_map, out_NX)
    exact_NX = torch.zeros(out_NX.shape, dtype=torch.float64).index_add_(0, row_map.source_R, r_RX.double())
    size_NX = torch.zeros(out_NX.shape, dtype=torch.float64).index_add_(0, row_map.source_R, r_RX.double().abs())
    bound_NX = torch.finfo(dtype).eps / 2 * exact_NX.abs() * 1.001 + 4 * 2.0**-24 * size_NX
    assert ((out_NX.double() - exact_NX).abs() <= bound_NX).all()


def test_reduce_does_not_depend_on_where_copies_lie():
    """Bitwise: the order of the sum is that of a source row's slots, not of the rows."""
    ids_NK, generator = random_ids()
    row_map, slots_R = by_expert(ids_NK, counted(ids_NK))
    r_RX = torch.randn(len(slots_R), 8, generator=generator)
    moved_R = torch.randperm(len(slots_R), generator=generator)
    elsewhere_RX = torch.empty_like(r_RX)
    elsewhere_RX[moved_R] = r_RX
    new_place_NK = moved_R[row_map.copies_MJ.clamp(min=0).long()].int()
    other_map = RowMap(row_map.source_R, torch.where(row_map.copies_MJ >= 0, new_place_NK, -1))
    first_NX, second_NX = torch.empty(2, len(ids_NK), 8).unbind(0)
    reduce(r_RX, row_map, first_NX)
    reduce(elsewhere_RX, other_map, second_NX)
    assert torch.equal(first_NX, second_NX)


def test_reduce_writes_only_its_buffer_and_lets_no_row_leak():
    """A missing copy adds nothing, even though row 0, which stands in for it, is not finite."""
    ids_NK = torch.tensor([[0, 1], [-1, 1], [-1, -1], [1, -1]], dtype=torch.int32)
    row_map, _ = by_expert(ids_NK, (1, 3))
    r_RX = torch.tensor([[float("nan")], [10.0], [20.0], [30.0]])
    around = torch.full((6, 3), -7.0)
    reduce(r_RX, row_map, around[1:5, 1:2])
    assert around[2:5, 1].tolist() == [20.0, 0.0, 30.0]
    assert around[1, 1].isnan()
    around[1:5, 1] = -7.0
    assert (around == -7.0).all()


def test_gather_moves_integers_and_keeps_the_dtype():
    ids_NK, _ = random_ids()
    row_map, slots_R = by_expert(ids_NK, counted(ids_NK))
    for dtype in (torch.int32, torch.int64, torch.bfloat16):
        source_NX = torch.arange(2 * len(ids_NK)).view(-1, 2).to(dtype)
        gathered_RX = gather(source_NX, row_map)
        assert gathered_RX.dtype == dtype
        assert torch.equal(gathered_RX, source_NX[slots_R.long() // ids_NK.shape[1]])
