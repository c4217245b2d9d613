"""Dispatch and combine in real processes, against what one can work out by hand from everybody's ids."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from helpers.processes import run
from lightning_moe.dispatch import LocalDispatcher, chunk_slices
from lightning_moe.dispatch.all_to_all import AllToAllDispatcher
from lightning_moe.dispatch.transport import CollectiveTransport

DTYPES = [torch.float64, torch.float32, torch.bfloat16]
PATTERNS = [
    "any",
    "empty slots",
    "one expert",
    "one rank",
    "every expert",
    "a rank without tokens",
    "no tokens",
    "one token",
    "fewer tokens than chunks",
]


def everyones_ids(seed: int, num_ranks: int) -> tuple[list[list[list[int]]], int, int, int]:
    """Ids ``[T, K]`` of each rank as lists, K, e and the number of chunks: the same on whoever asks."""
    rng = random.Random(seed)
    pattern = PATTERNS[seed % len(PATTERNS)]
    num_local = rng.randint(1, 3)
    experts = range(num_ranks * num_local)
    top_k = len(experts) if pattern == "every expert" else rng.randint(1, min(4, len(experts)))
    num_chunks = rng.randint(1, 5)
    sizes = [rng.choice([0, 1, rng.randint(2, 12)]) for _ in range(num_ranks)]
    if pattern == "a rank without tokens":
        sizes = [rng.randint(1, 9) for _ in range(num_ranks)]
        sizes[rng.randrange(num_ranks)] = 0
    elif pattern == "no tokens":
        sizes = [0] * num_ranks
    elif pattern == "one token":
        sizes = [0] * num_ranks
        sizes[rng.randrange(num_ranks)] = 1
    elif pattern == "fewer tokens than chunks":
        sizes, num_chunks = [rng.randint(0, 3) for _ in range(num_ranks)], 5
    favourite = rng.choice(experts)
    home = [expert for expert in experts if expert // num_local == favourite // num_local]

    def token() -> list[int]:
        if pattern == "one expert":
            ids = [favourite]
        elif pattern == "one rank":
            ids = rng.sample(home, min(top_k, len(home)))
        else:
            ids = rng.sample(experts, top_k)
        if pattern == "empty slots":
            ids = [expert if rng.random() < 0.5 else -1 for expert in ids]
        ids += [-1] * (top_k - len(ids))
        rng.shuffle(ids)
        return ids

    return [[token() for _ in range(size)] for size in sizes], top_k, num_local, num_chunks


def rows_at(ids_of, rank: int, chunk: int, num_local: int, num_chunks: int) -> list[tuple[int, int]]:
    """The (source rank, token) pairs that one chunk must bring to ``rank``, in order."""
    return [
        (source, t)
        for source, ids in enumerate(ids_of)
        for t in range(len(ids))[chunk_slices(len(ids), num_chunks)[chunk]]
        if any(expert >= 0 and expert // num_local == rank for expert in ids[t])
    ]


def values(shape, *seed: int, dtype=torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(hash(seed) % 2**31)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


class Transport:
    """Counts the exchanges and the rows that are handed to them."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self._send = dist.all_to_all_single
        dist.all_to_all_single = self

    def __call__(self, output, input, *args, **options):
        self.rows.append(len(input))
        return self._send(output, input, *args, **options)

    def take(self) -> list[int]:
        rows, self.rows = self.rows, []
        return rows


def check_cases(seeds: range) -> int:
    """One rank's part of every case; returns the rows that it received, over all cases."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    dispatcher = AllToAllDispatcher(dist.group.WORLD, CollectiveTransport(dist.group.WORLD))
    transport = Transport()
    num_rows = 0
    for seed in seeds:
        dtype = DTYPES[seed // len(PATTERNS) % len(DTYPES)]
        ids_of, top_k, num_local, num_chunks = everyones_ids(seed, num_ranks)
        ids_TK = torch.tensor(ids_of[rank], dtype=torch.int64).view(-1, top_k)
        x_TX = values((len(ids_TK), 3), seed, rank, dtype=dtype)
        back_TX = torch.full_like(x_TX, float("nan"))
        plans = dispatcher.plan(ids_TK, num_ranks * num_local, num_chunks)
        assert len(plans) == num_chunks
        assert len(transport.take()) == 2, "counts and ids: two exchanges serve all chunks"
        both_sides = torch.zeros(3, dtype=torch.float64)
        for c, plan in enumerate(plans):
            where = f"case {seed} ({PATTERNS[seed % len(PATTERNS)]}), chunk {c}"
            arrivals = [rows_at(ids_of, r, c, num_local, num_chunks) for r in range(num_ranks)]
            mine = arrivals[rank]
            assert plan.tokens == chunk_slices(len(ids_TK), num_chunks)[c], where
            assert tuple(row[rank] for row in plan.traffic_PP) == tuple(
                sum(s == r for s, _ in mine) for r in range(num_ranks)
            ), where
            sent = tuple(sum(source == rank for source, _ in arrivals[r]) for r in range(num_ranks))
            assert plan.traffic_PP[rank] == sent, where

            slots = [(expert - rank * num_local) for s, t in mine for expert in ids_of[s][t]]
            order = sorted((i for i, e in enumerate(slots) if 0 <= e < num_local), key=lambda i: (slots[i], i))
            counts = tuple(slots.count(expert) for expert in range(num_local))
            assert plan.slots_R.tolist() == order, where
            assert plan.by_expert.source_R.tolist() == [i // top_k for i in order], where
            assert plan.groups.counts == counts, where
            assert plan.groups.ends_e.tolist() == [sum(counts[: e + 1]) for e in range(num_local)], where
            assert plan.groups.ends_e.dtype == torch.int32

            tokens_TX = x_TX[plan.tokens]
            rows_NX = dispatcher.rows_like(plan, tokens_TX).fill_(float("nan"))
            dispatcher.dispatch(plan, [tokens_TX], [rows_NX])
            x_of = [values((len(ids), 3), seed, s, dtype=dtype) for s, ids in enumerate(ids_of)]
            assert rows_NX.tolist() == [x_of[s][t].tolist() for s, t in mine], where
            assert transport.take() == [sum(sent)], f"{where}: each token once to each rank that needs it"

            r_of = [values((len(rows), 3), seed, 100 + r, c, dtype=dtype) for r, rows in enumerate(arrivals)]
            dispatcher.combine(plan, [r_of[rank]], [back_TX[plan.tokens]])
            assert transport.take() == [len(mine)], where
            exact_TX = torch.zeros(tokens_TX.shape, dtype=torch.float64)
            for r, rows in enumerate(arrivals):
                for position, (source, t) in enumerate(rows):
                    if source == rank:
                        exact_TX[t - plan.tokens.start] += r_of[r][position].double()
            atol = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 4e-2}[dtype]
            torch.testing.assert_close(back_TX[plan.tokens].double(), exact_TX, rtol=0, atol=atol)
            both_sides[0] += (rows_NX.double() * r_of[rank].double()).sum()
            num_rows += len(mine)
        both_sides[1] = (x_TX.double() * back_TX.double()).sum()
        both_sides[2] = (x_TX.double() * back_TX.double()).abs().sum()
        dist.all_reduce(both_sides)
        left, right, size = both_sides.tolist()
        tolerance = max(torch.finfo(dtype).eps / 2, 1e-14) * 1.01 * size  # `back` was rounded once
        assert abs(left - right) <= tolerance + 1e-13, f"<dispatch(x), r> != <x, combine(r)> in case {seed}"
    return num_rows


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_dispatch_and_combine_are_adjoint_and_move_the_right_rows(num_ranks):
    """Every pattern in every dtype: plans, rows, sums and the inner products, against the ids of all ranks."""
    seeds = range(2 * len(PATTERNS) * len(DTYPES))
    received = run(check_cases, num_ranks, seeds)
    expected = [0] * num_ranks
    for seed in seeds:
        ids_of, _, num_local, num_chunks = everyones_ids(seed, num_ranks)
        for rank in range(num_ranks):
            expected[rank] += sum(len(rows_at(ids_of, rank, c, num_local, num_chunks)) for c in range(num_chunks))
    assert received == expected
    assert min(received) > 50


@pytest.mark.parametrize("num_chunks", [1, 2, 5])
def test_local_dispatcher_moves_nothing(num_chunks):
    """Rows are the tokens themselves; the experts' order is that of their ids."""
    dispatcher = LocalDispatcher()
    for seed in range(2 * len(PATTERNS)):
        (ids,), top_k, num_experts, _ = everyones_ids(seed, 1)
        ids_TK = torch.tensor(ids, dtype=torch.int64).view(-1, top_k)
        plans = dispatcher.plan(ids_TK, num_experts, num_chunks)
        assert [plan.tokens for plan in plans] == chunk_slices(len(ids), num_chunks)
        for plan in plans:
            slots = [expert for row in ids[plan.tokens] for expert in row]
            order = sorted((i for i, expert in enumerate(slots) if expert >= 0), key=lambda i: (slots[i], i))
            assert plan.slots_R.tolist() == order
            assert plan.groups.counts == tuple(slots.count(expert) for expert in range(num_experts))
            assert plan.groups.ends_e.tolist() == torch.tensor(plan.groups.counts).cumsum(0).tolist()
            tokens_TX = values((len(slots) // top_k, 3), seed)
            assert dispatcher.rows_like(plan, tokens_TX) is tokens_TX
            dispatcher.dispatch(plan, [tokens_TX], [tokens_TX])
            dispatcher.combine(plan, [tokens_TX], [tokens_TX])
            assert torch.equal(tokens_TX, values((len(slots) // top_k, 3), seed))
            for move in (dispatcher.dispatch, dispatcher.combine):  # a buffer of the caller's own is written
                other_TX = torch.full_like(tokens_TX, float("nan"))
                move(plan, tokens_TX, other_TX)
                assert torch.equal(tokens_TX, other_TX)


@st.composite
def routed_batches(draw, num_ranks: int):
    """Everybody's ids: any sizes, ranks without tokens, few experts in use, empty slots, no id twice in a token."""
    num_local, num_chunks = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    experts = range(num_ranks * num_local)
    used = draw(st.lists(st.sampled_from(experts), unique=True, min_size=1))
    top_k = draw(st.integers(1, len(experts)))
    token = st.lists(st.sampled_from([*used, -1]), min_size=top_k, max_size=top_k).map(
        lambda ids: [expert if expert not in ids[:k] else -1 for k, expert in enumerate(ids)]
    )
    batches = draw(st.lists(st.lists(token, max_size=6), min_size=num_ranks, max_size=num_ranks))
    return batches, top_k, num_local, num_chunks


def check_adjoint_property() -> int:
    """Every rank draws the same cases, since the draws are derandomized: so all meet in the same exchanges."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    dispatcher = AllToAllDispatcher(dist.group.WORLD, CollectiveTransport(dist.group.WORLD))
    moved = 0

    @settings(max_examples=60, derandomize=True, database=None, deadline=None, phases=[Phase.generate])
    @given(routed_batches(num_ranks))
    def check(case):
        nonlocal moved
        batches, top_k, num_local, num_chunks = case
        ids_TK = torch.tensor(batches[rank], dtype=torch.int64).view(-1, top_k)
        x_TX = values((len(ids_TK), 3), 1, rank)
        both_sides = torch.zeros(2, dtype=torch.float64)
        for c, plan in enumerate(dispatcher.plan(ids_TK, num_ranks * num_local, num_chunks)):
            tokens_TX = x_TX[plan.tokens]
            rows_NX = dispatcher.rows_like(plan, tokens_TX)
            dispatcher.dispatch(plan, [tokens_TX], [rows_NX])
            r_NX, back_TX = values(rows_NX.shape, 2, rank, c), torch.empty_like(tokens_TX)
            dispatcher.combine(plan, [r_NX], [back_TX])
            both_sides += torch.stack([(rows_NX * r_NX).sum(), (tokens_TX * back_TX).sum()])
            moved += len(rows_NX)
        dist.all_reduce(both_sides)
        torch.testing.assert_close(both_sides[0], both_sides[1], rtol=1e-12, atol=1e-12)

    check()
    return moved


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_dispatch_and_combine_are_adjoint_for_whatever_hypothesis_draws(num_ranks):
    assert min(run(check_adjoint_property, num_ranks)) > 50
