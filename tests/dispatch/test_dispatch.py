"""Dispatch and combine in real processes, against what one can work out by hand from everybody's ids."""

from __future__ import annotations

import random
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from helpers.processes import run
from lightning_moe.dispatch import LocalDispatcher
from lightning_moe.dispatch.all_to_all import AllToAllDispatcher
from lightning_moe.dispatch.schedule import schedule
from lightning_moe.dispatch.transport import COMBINE, DISPATCH, CollectiveTransport, NVLinkTransport
from lightning_moe.ops.routing import chunk_slices

NAN = float("nan")
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


def rows_at(ids_of, rank: int, chunk, num_units: int, num_local: int) -> list[tuple[int, int]]:
    """The (source rank, token) pairs that one chunk must bring to ``rank``, in order.

    Of the peers' tokens those that have experts there, then all its own.
    """
    tokens_of = []
    for ids in ids_of:
        units = chunk_slices(len(ids), num_units)[chunk.units]
        tokens_of.append(range(units[0].start, units[-1].stop))
    peers = [(source, t) for source, tokens in enumerate(tokens_of) for t in tokens if source != rank and chunk.peers]
    return [
        *((s, t) for s, t in peers if any(expert >= 0 and expert // num_local == rank for expert in ids_of[s][t])),
        *((rank, t) for t in tokens_of[rank] if chunk.own),
    ]


def values(shape, *seed: int, dtype=torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(hash(seed) % 2**31)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


class Counted:
    """A transport that notes the way, and the rows sent and received, of each exchange; and what is told."""

    def __init__(self, transport) -> None:
        self.transport, self.teller = transport, self
        self.exchanges: list[tuple[int, int, int] | str] = []

    def blank(self, shape, device):
        return self.transport.teller.blank(shape, device)

    def tell(self, blank):
        self.exchanges.append("tell")
        self.told = self.transport.teller.tell(blank)
        return self

    def wait(self):
        self.exchanges.append("wait")
        return self.told.wait()

    def outbox(self, way, traffic, like):
        return self.transport.outbox(way, traffic, like)

    def exchange(self, way, traffic, outbox, inbox) -> None:
        self.exchanges.append((way, len(outbox), len(inbox)))
        self.transport.exchange(way, traffic, outbox, inbox)

    def take(self) -> list[tuple[int, int, int] | str]:
        exchanges, self.exchanges = self.exchanges, []
        return exchanges


def the_transport(name: str):
    group = dist.group.WORLD
    if name == "collective":
        return CollectiveTransport(group)
    return NVLinkTransport(group, torch.device("cuda", dist.get_rank()), timedelta(seconds=60))


def own_tensors(shape, rank: int, seed: int, dtype, device):
    """What a rank sends: rows in a dtype and a number for each slot, narrow and wide at once."""
    (num_tokens, top_k), wide = shape, torch.float64 if dtype == torch.float64 else torch.float32
    tensors = values((num_tokens, 3), seed, rank, dtype=dtype), values((num_tokens, top_k), seed, rank, 1, dtype=wide)
    return [tensor.to(device) for tensor in tensors]


def check_cases(seeds: range, transport_name: str = "collective", device: str = "cpu") -> int:
    """One rank's part of every case; returns the rows that it received, over all cases."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    peers = [peer for peer in range(num_ranks) if peer != rank]
    transport = Counted(the_transport(transport_name))
    dispatcher = AllToAllDispatcher(dist.group.WORLD, transport)
    assert (dispatcher.size, dispatcher.rank) == (num_ranks, rank)
    num_rows = 0
    for seed in seeds:
        dtype = DTYPES[seed // len(PATTERNS) % len(DTYPES)]
        ids_dtype = (torch.int32, torch.int64)[seed % 2]
        ids_of, top_k, num_local, num_chunks = everyones_ids(seed, num_ranks)
        ids_TK = torch.tensor(ids_of[rank], dtype=ids_dtype, device=device).view(-1, top_k)
        sent_of = [own_tensors((len(ids), top_k), s, seed, dtype, device) for s, ids in enumerate(ids_of)]
        back = [torch.full_like(tensor, NAN) for tensor in sent_of[rank]]
        chunks, num_units, _ = schedule(num_chunks, num_ranks)
        meanwhile = partial(transport.exchanges.append, "meanwhile")
        plans = dispatcher.plan(ids_TK, sent_of[rank][1], num_ranks * num_local, num_chunks, meanwhile)
        assert transport.take() == ["tell", "meanwhile", "wait"], "one exchange of counts serves all chunks"
        both_sides = torch.zeros(2, 3, dtype=torch.float64, device=device)
        exact = [torch.zeros(tensor.shape, dtype=torch.float64) for tensor in back]
        sizes = [torch.zeros(tensor.shape, dtype=torch.float64) for tensor in back]
        for c, (plan, chunk) in enumerate(zip(plans, chunks, strict=True)):
            where = f"case {seed} ({PATTERNS[seed % len(PATTERNS)]}), chunk {c}"
            arrivals = [rows_at(ids_of, r, chunk, num_units, num_local) for r in range(num_ranks)]
            mine = arrivals[rank]
            slots = [expert for s, t in mine for expert in ids_of[s][t]]
            units = chunk_slices(len(ids_TK), num_units)[chunk.units]
            assert plan.tokens == slice(units[0].start, units[-1].stop), where
            assert plan.ids_TK.tolist() == ids_of[rank][plan.tokens], where
            assert plan.ids_TK.dtype == ids_TK.dtype
            assert plan.num_rows == len(mine), where
            assert plan.experts == range(rank * num_local, (rank + 1) * num_local)
            assert plan.num_sorted == sum(expert in plan.experts for expert in slots), where
            has_part = [True] * plan.num_summed + [False] * (len(plan.ids_TK) - plan.num_summed)
            assert (~back[0][plan.tokens, 0].isnan()).tolist() == has_part, where
            assert (plan.route is not None) == chunk.peers
            assert (plan.order is not None) == (c == 0 and not chunk.peers)
            if plan.order is not None:
                assert_order(plan, ids_of[rank][plan.tokens], sent_of[rank][1][plan.tokens])

            outgoing = [*(tensor[plan.tokens] for tensor in sent_of[rank]), plan.ids_TK]
            arriving = dispatcher.arriving(plan, outgoing)
            if chunk.peers:
                for rows_NX in arriving.rows:
                    rows_NX.fill_(NAN if rows_NX.is_floating_point() else -7)
            dispatcher.dispatch(plan, outgoing, arriving)
            for i, (rows_NX, tokens_TX) in enumerate(zip(arriving.rows, outgoing, strict=True)):
                expected = ids_of if i == 2 else [sent[i].tolist() for sent in sent_of]
                assert rows_NX.tolist() == [expected[s][t] for s, t in mine], where
                assert rows_NX.shape[1] == tokens_TX.shape[1]
                assert rows_NX.dtype == (torch.int32 if i == 2 and chunk.peers else tokens_TX.dtype)
                assert chunk.peers or rows_NX is tokens_TX, "what stays is not copied"
            to_peers = sum(source == rank for peer in peers for source, _ in arrivals[peer])
            from_peers = sum(source != rank for source, _ in mine)
            each_token_once_to_each_peer = [(DISPATCH, to_peers, from_peers)] if chunk.peers else []
            assert transport.take() == each_token_once_to_each_peer, where

            r_of = [
                own_tensors((len(rows), top_k), 100 + r, seed + c, dtype, device) for r, rows in enumerate(arrivals)
            ]
            homes = [tensor[plan.tokens] for tensor in back]
            leaving = dispatcher.leaving(plan, homes)
            write(leaving.places, r_of[rank], plan.num_rows)
            dispatcher.combine(plan, leaving, homes)
            assert transport.take() == ([(COMBINE, from_peers, to_peers)] if chunk.peers else []), where
            for i in range(len(back)):
                for r, rows in enumerate(arrivals):
                    for position, (source, t) in enumerate(rows):
                        if source == rank:
                            exact[i][t] += r_of[r][i][position].double().cpu()
                            sizes[i][t] += r_of[r][i][position].double().abs().cpu()
                both_sides[i, 0] += (arriving.rows[i].double() * r_of[rank][i].double()).sum()
            num_rows += len(mine)
        for i, (x_TX, back_TX) in enumerate(zip(sent_of[rank], back, strict=True)):
            # what stays and what travels are each rounded once where they are summed
            unit = max(torch.finfo(back_TX.dtype).eps / 2, 1e-15) * 1.01
            back_TX = back_TX.double().cpu()
            assert ((back_TX - exact[i]).abs() <= 2 * unit * sizes[i] + 1e-14).all(), f"case {seed}"
            both_sides[i, 1] = (x_TX.double().cpu() * back_TX).sum()
            both_sides[i, 2] = (2 * unit * x_TX.double().cpu().abs() * sizes[i]).sum()
        dist.all_reduce(both_sides)
        for left, right, tolerance in both_sides.tolist():
            assert abs(left - right) <= tolerance + 1e-12, f"<dispatch(x), r> != <x, combine(r)> in case {seed}"
    return num_rows


def assert_order(plan, ids, weights_TK) -> None:
    """Of tokens that stay: as by a stable sort of the slots that name an expert of this rank."""
    flat = [expert for row in ids for expert in row]
    slots = sorted((i for i, expert in enumerate(flat) if expert in plan.experts), key=lambda i: (flat[i], i))
    places = [slots.index(i) if expert in plan.experts else -1 for i, expert in enumerate(flat)]
    counts = [flat.count(expert) for expert in plan.experts]
    assert plan.order.by_expert.copies_MJ.flatten().tolist() == places
    assert plan.order.by_expert.num_copies == plan.order.groups.num_rows == len(slots)
    assert plan.order.groups.ends_e.tolist() == [sum(counts[: e + 1]) for e in range(len(counts))]
    assert plan.order.weights_R.tolist() == weights_TK.flatten()[slots].tolist()


def write(places, r_of, num_rows: int) -> None:
    """Put rows where they are to leave from, added to what is there if the place says so."""
    assert sorted(row for place in places for row in range(num_rows)[place.rows]) == list(range(num_rows))
    for place in places:
        for out_NX, r_NX in zip(place.out, r_of, strict=True):
            sum_NX = r_NX[place.rows].clone()
            sum_NX[: place.num_summed] += out_NX[: place.num_summed]
            out_NX.copy_(sum_NX)


def check_on(num_ranks: int, times: int, *options: str, **run_options) -> None:
    """Every pattern in every dtype so many times, and that all rows arrived somewhere."""
    seeds = range(times * len(PATTERNS) * len(DTYPES))
    received = run(check_cases, num_ranks, seeds, *options, **run_options)
    expected = [0] * num_ranks
    for seed in seeds:
        ids_of, _, num_local, num_chunks = everyones_ids(seed, num_ranks)
        chunks, num_units, _ = schedule(num_chunks, num_ranks)
        for rank in range(num_ranks):
            expected[rank] += sum(len(rows_at(ids_of, rank, chunk, num_units, num_local)) for chunk in chunks)
    assert received == expected
    assert min(received) > 50


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_dispatch_and_combine_are_adjoint_and_move_the_right_rows(num_ranks):
    """Plans, rows, sums and the inner products, against the ids of all ranks."""
    check_on(num_ranks, 2)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two CUDA devices are needed")
@pytest.mark.parametrize("transport", ["collective", "nvlink"])
def test_so_they_are_between_gpus(transport):
    check_on(2, 1, transport, "cuda", device="cuda", timeout=240)  # kernels are compiled for many widths


def check_new_outbox_beside_queued_work() -> None:
    rank, device, traffic = dist.get_rank(), torch.device("cuda", dist.get_rank()), ((0, 1), (1, 0))
    transport = NVLinkTransport(dist.group.WORLD, device, timedelta(seconds=10))
    lane = torch.cuda.Stream(device)
    for late in (0, 1):
        if rank == late:
            torch.cuda._sleep(10**9)  # cycles of the default stream, half a second
        with torch.cuda.stream(lane):
            inbox = torch.empty(1, 16, dtype=torch.uint8, device=device)
            outbox = transport.outbox(DISPATCH, traffic, inbox)
            outbox.fill_(rank)
            transport.exchange(DISPATCH, traffic, outbox, inbox)
            assert inbox.tolist() == [[1 - rank] * 16]
        transport.release()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two CUDA devices are needed")
def test_no_signal_is_lost_where_an_outbox_is_made_behind_queued_work():
    run(check_new_outbox_beside_queued_work, 2, device="cuda", timeout=60)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32])
def test_ids_may_be_any_integers_and_lie_in_any_order(dtype):
    (ids,), top_k, num_experts, _ = everyones_ids(7, 1)
    ids_TK = torch.tensor(ids).view(-1, top_k).clamp(min=0)
    weights_TK = torch.rand(ids_TK.shape, generator=torch.Generator().manual_seed(0))
    (expected,) = LocalDispatcher().plan(ids_TK, weights_TK, num_experts, 1)
    across_TK = ids_TK.to(dtype).t().contiguous().t()
    (plan,) = LocalDispatcher().plan(across_TK, weights_TK, num_experts, 1)
    assert torch.equal(plan.order.by_expert.copies_MJ, expected.order.by_expert.copies_MJ)
    assert torch.equal(plan.order.weights_R, expected.order.weights_R)
    assert plan.ids_TK.is_contiguous()
    assert plan.num_sorted == expected.num_sorted == ids_TK.numel() > 0


@pytest.mark.parametrize("num_chunks", [1, 2, 5])
def test_local_dispatcher_moves_nothing(num_chunks):
    """Rows are the tokens themselves, there and back."""
    dispatcher = LocalDispatcher()
    assert dispatcher.size == 1
    for seed in range(2 * len(PATTERNS)):
        (ids,), top_k, num_experts, _ = everyones_ids(seed, 1)
        ids_TK = torch.tensor(ids, dtype=(torch.int32, torch.int64)[seed % 2]).view(-1, top_k)
        weights_TK, calls = values(ids_TK.shape, seed, 1, dtype=torch.float32), []
        plans = dispatcher.plan(ids_TK, weights_TK, num_experts, num_chunks, lambda calls=calls: calls.append(1))
        assert calls == [1]
        assert [plan.tokens for plan in plans] == chunk_slices(len(ids), num_chunks)
        for plan in plans:
            rows = ids[plan.tokens]
            slots = [expert for row in rows for expert in row]
            assert plan.ids_TK.tolist() == rows
            assert plan.ids_TK.dtype == ids_TK.dtype
            assert (plan.num_rows, plan.num_sorted) == (len(rows), sum(expert >= 0 for expert in slots))
            assert (plan.experts, plan.num_summed, plan.route) == (range(num_experts), 0, None)
            assert_order(plan, rows, weights_TK[plan.tokens])
            tokens = [values((len(rows), 3), seed), weights_TK[plan.tokens], plan.ids_TK]
            before = [tensor.clone() for tensor in tokens]
            arriving = dispatcher.arriving(plan, tokens)
            dispatcher.dispatch(plan, tokens, arriving)
            assert all(one is other for one, other in zip(arriving.rows, tokens, strict=True))
            assert all(torch.equal(one, other) for one, other in zip(tokens, before, strict=True))
            homes = [torch.full_like(tensor, NAN) for tensor in tokens[:2]]
            leaving = dispatcher.leaving(plan, homes)
            write(leaving.places, tokens[:2], len(rows))
            dispatcher.combine(plan, leaving, homes)
            assert all(torch.equal(one, other) for one, other in zip(homes, before, strict=False))


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
        plans = dispatcher.plan(ids_TK, values(ids_TK.shape, 3, rank), num_ranks * num_local, num_chunks)
        x_TX = values((len(ids_TK), 3), 1, rank)
        back_TX = torch.full_like(x_TX, NAN)
        both_sides = torch.zeros(2, dtype=torch.float64)
        arrived = []

        def dispatch(plan):
            outgoing = [x_TX[plan.tokens]]
            arrived.append(dispatcher.arriving(plan, outgoing))
            dispatcher.dispatch(plan, outgoing, arrived[-1])

        dispatch(plans[0])
        for c, plan in enumerate(plans):
            (rows_NX,) = arrived[c].rows
            r_NX, homes = values(rows_NX.shape, 2, rank, c), [back_TX[plan.tokens]]
            leaving = dispatcher.leaving(plan, homes)
            write(leaving.places, [r_NX], plan.num_rows)
            if c + 1 < len(plans):  # as in the pipeline: the next chunk comes before this one leaves
                dispatch(plans[c + 1])
            dispatcher.combine(plan, leaving, homes)
            both_sides[0] += (rows_NX * r_NX).sum()
            moved += len(rows_NX)
        both_sides[1] = (x_TX * back_TX).sum()
        dist.all_reduce(both_sides)
        torch.testing.assert_close(both_sides[0], both_sides[1], rtol=1e-12, atol=1e-12)

    check()
    return moved


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_dispatch_and_combine_are_adjoint_for_whatever_hypothesis_draws(num_ranks):
    assert min(run(check_adjoint_property, num_ranks)) > 50
