"""DeepEP's dispatcher against the all-to-all over collectives, which must find the same bits.

Without GPUs a stand-in takes the place of DeepEP: it keeps to the contract of ``deep_ep.Buffer``, refuses what that one
refuses, and sums in the same order.
"""

from __future__ import annotations

import importlib.util
import sys
from datetime import timedelta
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from helpers.processes import run
from lightning_moe.buffers import held_bytes, release_buffers
from lightning_moe.dispatch import LocalDispatcher, select_dispatcher
from lightning_moe.dispatch.all_to_all import AllToAllDispatcher
from lightning_moe.dispatch.deep_ep import DeepEPDispatcher, DeepEPSettings
from lightning_moe.dispatch.select import _brings_back
from lightning_moe.dispatch.transport import CollectiveTransport
from lightning_moe.overlap import chunked_experts
from lightning_moe.recompute.policy import ROUTED_MODES
from overlap.dense import NUM_EXPERTS, TOP_K, make_case, routing

SETTINGS = DeepEPSettings(multiprocessors=8, dispatch_rows=16, combine_rows=4, queue_rows=64)
CASES = [  # tokens of each of four ranks (fewer ranks take the first), the pattern of their ids, hidden size
    ([37, 61, 5, 20], "any", 256),
    ([200, 9, 64, 3], "slots", 200),
    ([0, 33, 12, 50], "slots", 256),
    ([28, 0, 0, 0], "any", 264),
    ([0, 0, 0, 0], "any", 256),
    ([40, 45, 50, 55], "one", 512),
    ([16, 16, 16, 16], "few", 8),
]
on_two_gpus = pytest.mark.skipif(
    torch.cuda.device_count() < 2 or importlib.util.find_spec("deep_ep") is None,
    reason="two CUDA devices and DeepEP are needed",
)


class Config(NamedTuple):
    """As ``deep_ep.Config``."""

    num_sms: int
    num_sent: int
    num_queued: int
    num_sent_between_hosts: int
    num_queued_between_hosts: int

    def get_nvl_buffer_size_hint(self, row_bytes: int, num_ranks: int) -> int:
        return self.num_sms // 2 * num_ranks * self.num_queued * row_bytes


class Buffer:
    """As ``deep_ep.Buffer`` on one host; notes its size and whether it lives in :attr:`made`."""

    made: list[Buffer]

    def __init__(self, group, num_nvl_bytes, num_rdma_bytes, explicitly_destroy) -> None:
        assert num_rdma_bytes == 0
        assert explicitly_destroy
        self.group, self.num_bytes, self.alive = group, num_nvl_bytes, True
        assert set(self.gathered(num_nvl_bytes)) == {num_nvl_bytes}
        Buffer.made.append(self)

    def gathered(self, mine) -> list:
        everyones = [None] * self.group.size()
        dist.all_gather_object(everyones, mine, self.group)
        return everyones

    def check(self, rows_TX, config) -> None:
        row_bytes = rows_TX.shape[1] * rows_TX.element_size()
        assert self.alive
        assert rows_TX.is_contiguous()
        assert config.num_sms % 2 == 0
        assert config.num_sent < config.num_queued
        assert config.get_nvl_buffer_size_hint(row_bytes, self.group.size()) <= self.num_bytes

    def dispatch(
        self,
        x,
        handle=None,
        num_tokens_per_rank=None,
        is_token_in_rank=None,
        num_tokens_per_expert=None,
        topk_idx=None,
        topk_weights=None,
        num_worst_tokens=0,
        config=None,
    ):
        self.check(x, config)
        row_bytes = x.shape[1] * x.element_size()
        assert row_bytes % 32 == 0
        assert row_bytes <= 16352
        rank, size = self.group.rank(), self.group.size()
        first = handle is None
        if first:
            assert is_token_in_rank.shape == (len(x), size)
            assert is_token_in_rank.dtype == torch.bool
            assert num_tokens_per_rank.dtype == num_tokens_per_expert.dtype == torch.int32
            assert num_tokens_per_rank.tolist() == is_token_in_rank.sum(0).tolist()
            assert num_tokens_per_rank[rank] == 0, "own rows stay"
            assert topk_idx.shape == topk_weights.shape == (len(x), 1)
            assert (topk_idx.dtype, topk_weights.dtype) == (torch.int64, torch.float32)
            assert (topk_idx.data_ptr() == 0) == (topk_weights.data_ptr() == 0)
            wanted_TP = is_token_in_rank
        else:
            channels, *_, sources_N, wanted_TP, _ = handle
            assert channels == config.num_sms
            assert len(wanted_TP) == len(x)
        everyones = self.gathered((x.detach(), wanted_TP))
        rows_NX = torch.cat([rows[wanted[:, rank]] for rows, wanted in everyones])
        sources = torch.cat([wanted[:, rank].nonzero().flatten() for _, wanted in everyones])
        if not first:
            assert torch.equal(sources, sources_N)
            return rows_NX, None, None, None, None, None
        assert num_worst_tokens == max(len(rows_NX), 1)
        left = num_worst_tokens - len(rows_NX)
        rows_NX, sources = torch.cat([rows_NX, rows_NX.new_zeros(left, x.shape[1])]), torch.cat([sources, sources[:0]])
        sources = torch.cat([sources, sources.new_zeros(left)])
        return rows_NX, topk_idx, topk_weights, [], (config.num_sms, None, None, sources, wanted_TP, None), None

    def combine(self, x, handle, topk_weights=None, config=None):
        self.check(x, config)
        channels, *_, sources_N, wanted_TP, _ = handle
        rank = self.group.rank()
        assert channels == config.num_sms
        assert len(x) == len(sources_N)
        assert x.dtype == torch.bfloat16
        assert x.shape[1] * x.element_size() % 512 == 0, "the last lanes of a warp would be without work"
        if topk_weights is not None:
            assert topk_weights.dtype == torch.float32
            assert topk_weights.shape[0] == len(x)
            assert topk_weights.shape[1] <= 32
        everyones = self.gathered((x, topk_weights, self.gathered(wanted_TP)))
        sums = [torch.zeros(len(wanted_TP), x.shape[1])]
        if topk_weights is not None:
            sums.append(torch.zeros(len(wanted_TP), topk_weights.shape[1]))
        for peer, (*tensors, wanted) in enumerate(everyones):
            before = sum(int(wanted_TP[:, peer].sum()) for wanted_TP in wanted[:rank])
            mine = slice(before, before + int(wanted[rank][:, peer].sum()))
            for sum_TX, rows_NX in zip(sums, tensors, strict=False):
                sum_TX[wanted_TP[:, peer]] += rows_NX[mine].float()
        return sums[0].bfloat16(), sums[1] if len(sums) > 1 else None, None

    def destroy(self) -> None:
        self.alive = False


class Forgetful(Buffer):
    """Brings the first rows again when others are sent the same way."""

    def dispatch(self, x, handle=None, **options):
        found = super().dispatch(x, handle, **options)
        self.first = found[0] if handle is None else self.first
        return self.first, *found[1:]


class Lossy(Buffer):
    """Loses what rank 1 sends back."""

    def combine(self, x, *options, **more):
        return super().combine(x * (self.group.rank() != 1), *options, **more)


def stand_in(kind: type[Buffer] = Buffer) -> None:
    Buffer.made = []
    sys.modules["deep_ep"] = SimpleNamespace(Buffer=kind, Config=Config)


def both(device: torch.device) -> tuple[AllToAllDispatcher, DeepEPDispatcher]:
    """The one that is known, and DeepEP: the library itself on a GPU."""
    group = dist.group.WORLD
    if device.type == "cuda":
        choice = select_dispatcher("deep_ep", group, device)
        assert (choice.name, choice.reasons) == ("DeepEP", ("asked for by name",))
        return AllToAllDispatcher(group, CollectiveTransport(group)), choice.dispatcher
    stand_in()
    return (
        AllToAllDispatcher(group, CollectiveTransport(group)),
        DeepEPDispatcher(group, device, timedelta(seconds=60), SETTINGS),
    )


def this_device(kind: str) -> torch.device:
    return torch.device(kind, dist.get_rank()) if kind == "cuda" else torch.device(kind)


def numbers(shape, *seed: int, dtype=torch.bfloat16, device) -> torch.Tensor:
    """Small whole numbers: any sum of them is exact."""
    generator = torch.Generator().manual_seed(sum(n * 1009**i for i, n in enumerate(seed)))
    return torch.randint(-9, 10, shape, generator=generator).to(dtype).to(device)


def go_and_return(dispatcher, plan, outgoing, homes, seed: int) -> list[torch.Tensor]:
    """What arrives; what leaves for the homes is random, the same for whoever asks."""
    arriving = dispatcher.arriving(plan, outgoing)
    dispatcher.dispatch(plan, outgoing, arriving)
    leaving = dispatcher.leaving(plan, homes)
    rank = dist.get_rank()
    for i, home in enumerate(homes):
        shape = plan.num_rows, home.shape[1]
        back_NX = numbers(shape, rank, seed, i, dtype=home.dtype, device=home.device)
        for place in leaving.places:
            back_nX = back_NX[place.rows].clone()
            back_nX[: place.num_summed] += place.out[i][: place.num_summed]
            place.out[i].copy_(back_nX)
    dispatcher.combine(plan, leaving, homes)
    return list(arriving.rows)


def rows_and_sums(device_type: str) -> int:
    """Every case by both dispatchers, forth and back as a layer goes, forward and then backward; returns the rows compared."""
    device, rank = this_device(device_type), dist.get_rank()
    dispatchers = both(device)
    compared = 0
    for seed, (sizes, pattern, hidden) in enumerate(CASES):
        ids_TK = routing(sizes[rank], rank, pattern).to(device)
        weights_TK = numbers(ids_TK.shape, rank, 1, dtype=torch.float32, device=device)
        x_TH, grad_TH = (numbers((len(ids_TK), hidden), rank, seed, i, device=device) for i in (2, 3))
        for num_chunks in (1, 2, 4):
            plans_of = [dispatcher.plan(ids_TK, weights_TK, NUM_EXPERTS, num_chunks) for dispatcher in dispatchers]
            found = []
            for dispatcher, plans in zip(dispatchers, plans_of, strict=True):
                out_TH, grad_x_TH = (torch.full_like(x_TH, float("nan")) for _ in range(2))
                grad_weights_TK = torch.full_like(weights_TK, float("nan"))
                rows = []
                for c, plan in enumerate(plans):
                    outgoing = [x_TH[plan.tokens], weights_TK[plan.tokens], plan.ids_TK]
                    rows += go_and_return(dispatcher, plan, outgoing, [out_TH[plan.tokens]], c)
                for c, plan in enumerate(plans):
                    outgoing = [grad_TH[plan.tokens], x_TH[plan.tokens]][: 1 if num_chunks == 4 else 2]
                    homes = [grad_x_TH[plan.tokens], grad_weights_TK[plan.tokens]]
                    rows += go_and_return(dispatcher, plan, outgoing, homes, 10 + c)
                found.append([*rows, out_TH, grad_x_TH, grad_weights_TK])
            for theirs, ours in zip(*plans_of, strict=True):
                assert (theirs.tokens, theirs.num_rows, theirs.num_sorted) == (
                    ours.tokens,
                    ours.num_rows,
                    ours.num_sorted,
                )
                assert (theirs.num_summed, theirs.route is None) == (ours.num_summed, ours.route is None)
            for i, (theirs, ours) in enumerate(zip(*found, strict=True)):
                assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
                assert torch.equal(ours, theirs), f"case {seed}, {num_chunks} chunks, tensor {i} of {len(found[0])}"
            compared += sum(plan.num_rows for plan in plans_of[0])
    release_buffers()
    return compared


def expected_rows(num_ranks: int) -> list[int]:
    """A token of each rank's own stays, and goes to each other rank that has one of its experts."""
    expected = [0] * num_ranks
    num_local = NUM_EXPERTS // num_ranks
    for sizes, pattern, _ in CASES:
        for source in range(num_ranks):
            for row in routing(sizes[source], source, pattern).tolist():
                for rank in {source} | {expert // num_local for expert in row if expert >= 0}:
                    expected[rank] += 3
    return expected


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_rows_and_sums_are_those_of_the_all_to_all(num_ranks):
    assert run(rows_and_sums, num_ranks, "cpu") == expected_rows(num_ranks)


@on_two_gpus
def test_so_they_are_between_gpus():
    assert run(rows_and_sums, 2, "cuda", device="cuda") == expected_rows(2)


def layers(device_type: str, hidden: int, width: int, sizes: list[int]) -> int:
    """Output and gradients of a whole layer by both dispatchers, in every mode; returns how many were compared."""
    device, rank, size = this_device(device_type), dist.get_rank(), dist.get_world_size()
    dispatchers = both(device)
    mine = slice(rank * NUM_EXPERTS // size, (rank + 1) * NUM_EXPERTS // size)
    case = make_case(rank, sizes[rank], "slots", torch.bfloat16, hidden=hidden, width=width)
    inputs = [case.tokens_TH, case.weights_TK, case.gate_up_E2FH[mine], case.down_EHF[mine]]
    inputs = [tensor.to(device).requires_grad_() for tensor in inputs]
    ids_TK, grad_TH = case.ids_TK.to(device), case.grad_TH.to(device)
    compared = 0
    for num_chunks in (1, 2, 4):
        for mode in ROUTED_MODES:
            found = []
            for dispatcher in dispatchers:
                plans = dispatcher.plan(ids_TK, inputs[1].detach(), NUM_EXPERTS, num_chunks)
                out_TH = chunked_experts(*inputs, dispatcher, plans, mode)
                found.append([out_TH.detach(), *torch.autograd.grad(out_TH, inputs, grad_TH)])
            for i, (theirs, ours) in enumerate(zip(*found, strict=True)):
                assert torch.equal(ours, theirs), f"{num_chunks} chunks, {mode}, tensor {i}"
                compared += 1
    release_buffers()
    return compared


@pytest.mark.parametrize("sizes", [[21, 34], [0, 13]])
def test_a_layer_is_that_of_the_all_to_all(sizes):
    """With two ranks one peer's row is all that comes back, so no rounding differs either."""
    assert run(layers, 2, "cpu", 40, 12, sizes) == [5 * 3 * len(ROUTED_MODES)] * 2


@on_two_gpus
@pytest.mark.parametrize("sizes", [[1500, 2077], [0, 700]])
def test_so_it_is_between_gpus(sizes):
    assert run(layers, 2, "cuda", 256, 128, sizes, device="cuda") == [5 * 3 * len(ROUTED_MODES)] * 2


def buffers_of_a_dispatcher() -> list[tuple[int, bool]]:
    """Narrow rows, wider rows by the old plan, narrow ones again, and some after a release."""
    device = torch.device("cpu")
    _, dispatcher = both(device)
    (plan,) = dispatcher.plan(routing(6, dist.get_rank()), torch.ones(6, TOP_K), NUM_EXPERTS, 1)
    for hidden in (256, 1024, 512, None, 256):
        if hidden is None:
            release_buffers()
            assert not any(buffer.alive for buffer in Buffer.made)
            assert held_bytes() == {"communication": 0}
            release_buffers()
        else:
            outgoing = [numbers((6, hidden), 1, device=device)]
            go_and_return(dispatcher, plan, outgoing, [torch.empty_like(outgoing[0])], 0)
    return [(buffer.num_bytes, buffer.alive) for buffer in Buffer.made]


def test_a_buffer_grows_with_the_rows_and_is_given_back():
    hint = Config(8, 16, 64, 6, 128).get_nvl_buffer_size_hint
    for made in run(buffers_of_a_dispatcher, 2):
        assert made == [(hint(512, 2), False), (hint(2048, 2), False), (hint(512, 2), True)]


def refusals() -> dict[str, str]:
    device = torch.device("cpu")
    _, dispatcher = both(device)
    plans = dispatcher.plan(routing(6, dist.get_rank()), torch.ones(6, TOP_K), NUM_EXPERTS, 2)
    cases = {
        "float32": [torch.zeros(6, 256)],
        "float16": [torch.zeros(6, 256, dtype=torch.float16)],
        "wide": [torch.zeros(6, 8192, dtype=torch.bfloat16)],
        "many experts": [torch.zeros(6, 256, dtype=torch.bfloat16), torch.zeros(6, 33)],
    }
    messages = {}
    for name, tokens in cases.items():
        for plan in plans:
            for ask in (dispatcher.arriving, dispatcher.leaving):
                with pytest.raises(ValueError, match="all_to_all") as error:
                    ask(plan, [tensor[plan.tokens] for tensor in tokens])
                messages[name] = str(error.value)
    assert Buffer.made == [], "refused before anything is sent"
    return messages


def test_rows_that_deep_ep_cannot_move_are_refused():
    """Already where a rank's own rows are asked for, which come first."""
    for messages in run(refusals, 2):
        assert messages["float32"] == (
            "`dispatcher='deep_ep'` moves rows of torch.bfloat16, of at most 16352 bytes and with at most 32 experts a token,"
            " but got 256 x torch.float32. `dispatcher='all_to_all'` moves any."
        )
        assert "but got 256 x torch.float16." in messages["float16"]
        assert "but got 8192 x torch.bfloat16." in messages["wide"]
        assert "but got 256 x torch.bfloat16, 33 x torch.float32." in messages["many experts"]


def test_settings_leave_multiprocessors_to_others_and_share_a_queue_between_more_ranks():
    for size in (2, 4, 8):
        for multiprocessors in (1, 33, 66, 132):
            settings = DeepEPSettings.of(size, multiprocessors)
            assert settings.multiprocessors % 2 == 0
            assert 2 <= settings.multiprocessors <= max(multiprocessors - 32, 2)
            assert 0 < settings.combine_rows <= settings.dispatch_rows < settings.queue_rows
            assert settings.queue_rows * size == 512


def select(name: str, group, device: torch.device) -> tuple[str, str]:
    try:
        choice = select_dispatcher(name, group, device)
    except ValueError as error:
        return "refused", str(error)
    return choice.name, "; ".join(choice.reasons)


def selections() -> dict[str, tuple[str, str]]:
    """Seen from three ranks, of which the first two form a group; there is no GPU, whatever the devices are called."""
    rank = dist.get_rank()
    pair, alone = dist.new_group([0, 1]), [dist.new_group([r]) for r in range(3)][rank]
    cpu, gpu = torch.device("cpu"), torch.device("cuda", rank)
    found = {
        "three": select("deep_ep", dist.group.WORLD, gpu),
        "alone": select("deep_ep", alone, gpu),
        "cpu": select("deep_ep", alone, cpu),
        "auto": select("auto", dist.group.WORLD, cpu),
    }
    if rank < 2:
        stand_in()
        if rank == 1:
            sys.modules["deep_ep"] = None  # what makes an import fail
        found["one has it"] = select("deep_ep", pair, gpu)
        sys.modules["deep_ep"] = None
        found["nobody has it"] = select("deep_ep", pair, gpu)
    return found


def test_the_reasons_why_deep_ep_cannot_serve():
    by_rank = run(selections, 3)
    assert by_rank[0] == by_rank[1]
    for found in by_rank:
        for case, reason in {
            "three": "it serves 2, 4, 8 ranks, and there are 3",
            "alone": "there is no other rank",
            "cpu": "there is no GPU",
        }.items():
            assert found[case][0] == "refused"
            assert f"`dispatcher='deep_ep'` cannot serve this run: not deep_ep, since {reason}." in found[case][1]
        name, reasons = found["auto"]
        assert name == "all_to_all over gloo"
        assert "not nvlink, since there is no GPU" in reasons
        assert "deep_ep" not in reasons  # it is taken when it is asked for
    for case, ranks in (("one has it", "[1]"), ("nobody has it", "[0, 1]")):
        kind, message = by_rank[0][case]
        assert kind == "refused"
        assert f"the package `deep_ep` cannot be imported on ranks {ranks} (" in message
        assert "https://github.com/deepseek-ai/DeepEP" in message


def self_checks() -> list[bool]:
    group, device = dist.group.WORLD, torch.device("cpu")
    found = [_brings_back(AllToAllDispatcher(group, CollectiveTransport(group)), group, device)]
    for kind in (Buffer, Forgetful, Lossy):
        stand_in(kind)
        found.append(_brings_back(DeepEPDispatcher(group, device, timedelta(seconds=60), SETTINGS), group, device))
    return found


def test_the_self_check_of_a_dispatcher_sees_what_is_wrong():
    """Rank 1 receives what it lost from nobody."""
    assert run(self_checks, 2) == [[True, True, False, False], [True, True, False, True]]


def test_the_self_check_passes_a_rank_that_is_alone():
    assert run(self_check_of_one, 1) == [True]


def self_check_of_one() -> bool:
    return _brings_back(LocalDispatcher(), dist.group.WORLD, torch.device("cpu"))
