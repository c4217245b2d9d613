"""forward and backward on plain tensors, in one process and in several, against the dense reference."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
import torch
import torch.distributed as dist

from helpers.processes import run
from lightning_moe.dispatch import LocalDispatcher, select_dispatcher
from lightning_moe.ops.grouped_mm import grouped_mm
from lightning_moe.ops.rows import gather
from lightning_moe.ops.swiglu import swiglu_backward
from lightning_moe.overlap import primitives
from lightning_moe.overlap.gradient_sums import GradientTarget
from lightning_moe.overlap.primitives import Gradients, Weights
from lightning_moe.overlap.weight_gradients import chunk_rows
from lightning_moe.recompute.policy import ROUTED_MODES
from overlap.dense import HIDDEN, NUM_EXPERTS, TOP_K, WIDTH, Case, make_case, reference

CHUNKS = [1, 2, 3, 5]
LAYOUTS = {  # tokens of each of four ranks (fewer ranks take the first), and the pattern of their ids
    "uneven": ([7, 12, 1, 5], "any"),
    "empty slots": ([6, 9, 4, 8], "slots"),
    "nothing on rank 0": ([0, 11, 3, 6], "any"),
    "nothing on the last ranks": ([9, 0, 0, 0], "slots"),
    "nothing anywhere": ([0, 0, 0, 0], "any"),
    "one token in all": ([1, 0, 0, 0], "any"),
    "one expert gets all": ([6, 5, 7, 4], "one"),
    "experts of one rank get all": ([6, 5, 7, 4], "few"),
}
SCALE = 0.25


def call(dispatcher, case: Case, rank: int, num_chunks: int, mode: str, buffers=(None, None)):
    """Output and gradients of one rank, what was kept, and the plans."""
    num_local = NUM_EXPERTS // dispatcher.size
    mine = slice(rank * num_local, (rank + 1) * num_local)
    experts = Weights(case.gate_up_E2FH[mine], case.down_EHF[mine])
    plans = dispatcher.plan(case.ids_TK, case.weights_TK, NUM_EXPERTS, num_chunks)
    inputs = (case.tokens_TH, case.weights_TK)
    out_TH, kept = primitives.forward(dispatcher, plans, *inputs, experts, mode, buffers[0])
    targets = [GradientTarget(case.grad_TH.dtype, SCALE)] * 2
    # what the mode says was kept is not handed in again
    tokens_TH = case.tokens_TH if mode in ("dispatch", "full") else None
    grads = primitives.backward(dispatcher, plans, kept, case.grad_TH, tokens_TH, experts, targets, buffers[1])
    return out_TH, grads, kept, plans


def modes(num_ranks: int, layout: int, num_chunks: int) -> list[str]:
    """All on one rank; on several, two by turns, so that over the layouts each meets every number of chunks."""
    known = list(ROUTED_MODES)
    return known if num_ranks == 1 else [known[(layout + num_chunks + turn) % len(known)] for turn in (0, 2)]


def check_layouts() -> int:
    """One rank's part of every layout, number of chunks, mode and way back; returns how many were compared."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    dispatchers = [select_dispatcher("all_to_all", dist.group.WORLD, torch.device("cpu")).dispatcher]
    dispatchers += [LocalDispatcher()] if num_ranks == 1 else []
    mine = slice(rank * NUM_EXPERTS // num_ranks, (rank + 1) * NUM_EXPERTS // num_ranks)
    compared = 0
    for layout, (name, (sizes, pattern)) in enumerate(LAYOUTS.items()):
        cases = [make_case(r, sizes[r], pattern) for r in range(num_ranks)]
        outs, tokens, weights, gate_up, down = reference(cases)
        exact = outs[rank], tokens[rank], weights[rank], SCALE * gate_up[mine], SCALE * down[mine]
        for dispatcher, num_chunks in product(dispatchers, CHUNKS):
            for mode in modes(num_ranks, layout, num_chunks):
                out_TH, grads, kept, plans = call(dispatcher, cases[rank], rank, num_chunks, mode)
                assert len(kept.orders) == len(plans)
                for what, a, e in zip(("out", *Gradients._fields), (out_TH, *grads), exact, strict=True):
                    assert (a.shape, a.dtype) == (e.shape, torch.float64)
                    close = torch.allclose(a, e, rtol=1e-12, atol=1e-12)
                    assert close, f"{what}: {name}, {num_chunks} chunks, {mode}"
                compared += 1
    return compared


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_every_mode_and_number_of_chunks_equals_the_dense_layer(num_ranks):
    compared = run(check_layouts, num_ranks)
    assert compared == [len(LAYOUTS) * len(CHUNKS) * (2 * 4 if num_ranks == 1 else 2)] * num_ranks


@pytest.mark.parametrize(
    ("mode", "fields"),
    [
        ("none", ["rows_RH", "gate_up_R2F", "act_RF"]),
        ("act", ["rows_RH", "gate_up_R2F"]),
        ("dispatch", ["gate_up_R2F"]),
        ("full", []),
    ],
)
def test_a_mode_keeps_what_it_names(mode, fields):
    case = make_case(0, 7)
    _, _, kept, plans = call(LocalDispatcher(), case, 0, 3, mode)
    assert [name for name in ("rows_RH", "gate_up_R2F", "act_RF") if getattr(kept, name) is not None] == fields
    num_rows = [(plan.tokens.stop - plan.tokens.start) * TOP_K for plan in plans]
    assert [order.weights_R.shape[0] for order in kept.orders] == num_rows
    if kept.rows_RH is not None:
        assert kept.rows_RH.shape == (sum(num_rows), HIDDEN)
    if kept.gate_up_R2F is not None:
        assert kept.gate_up_R2F.shape == (sum(num_rows), 2 * WIDTH)
    if kept.act_RF is not None:
        assert kept.act_RF.shape == (sum(num_rows), WIDTH)


class Counting:
    """A dispatcher that writes down how many tensors each dispatch and each combine moves."""

    def __init__(self, dispatcher, log):
        self.dispatcher, self.log = dispatcher, log

    def __getattr__(self, name):
        return getattr(self.dispatcher, name)

    def dispatch(self, plan, tokens, arriving):
        self.log.append(("dispatch", len(tokens)))
        self.dispatcher.dispatch(plan, tokens, arriving)

    def combine(self, plan, leaving, tokens):
        self.log.append(("combine", len(tokens)))
        self.dispatcher.combine(plan, leaving, tokens)


def what_runs(num_chunks: int):
    """For each mode, how often a forward and then its backward moved what, and multiplied rows by which matrix."""
    dispatcher = select_dispatcher("all_to_all", dist.group.WORLD, torch.device("cpu")).dispatcher
    rank, log, counted = dist.get_rank(), [], {}
    case, mine = make_case(rank, 6), slice(rank * NUM_EXPERTS // 2, (rank + 1) * NUM_EXPERTS // 2)
    experts = Weights(case.gate_up_E2FH[mine], case.down_EHF[mine])

    def logged(function, name):
        def call(rows, matrix, *args):
            which = "gate_up" if matrix.data_ptr() == experts.gate_up_e2FH.data_ptr() else "down"
            log.append((name, which, "mT" if matrix.stride(-1) != 1 else ""))
            return function(rows, matrix, *args)

        return call

    for name in ("grouped_mm", "grouped_mm_swiglu"):
        setattr(primitives, name, logged(getattr(primitives, name), name))
    for mode in ROUTED_MODES:
        plans = dispatcher.plan(case.ids_TK, case.weights_TK, NUM_EXPERTS, num_chunks)
        counting = Counting(dispatcher, log)
        _, kept = primitives.forward(counting, plans, case.tokens_TH, case.weights_TK, experts, mode)
        forward = Counter(log)
        log.clear()
        targets = [GradientTarget(torch.float64)] * 2
        primitives.backward(counting, plans, kept, case.grad_TH, case.tokens_TH, experts, targets)
        counted[mode] = forward, Counter(log), sum(plan.route is not None for plan in plans), len(plans)
        log.clear()
    return counted


def test_backward_runs_nothing_again_that_it_does_not_read():
    """No second product and no combine of outputs: that one combine a chunk is the gradients', of tokens and of weights."""
    for counted in run(what_runs, 2, 2):
        for mode, (forward, backward, travelling, parts) in counted.items():
            assert forward == {
                ("dispatch", 3): travelling,
                ("grouped_mm_swiglu", "gate_up", ""): parts,
                ("grouped_mm", "down", "mT"): parts,
                ("combine", 1): travelling,
            }
            again = {("grouped_mm", "gate_up", "mT"): parts} if mode == "full" else {}
            assert backward == again | {
                ("dispatch", 2 if mode in ("dispatch", "full") else 1): travelling,
                ("grouped_mm", "down", ""): parts,
                ("grouped_mm", "gate_up", ""): parts,
                ("combine", 2): travelling,
            }
            assert parts > travelling > 0


@pytest.mark.parametrize("mode", ROUTED_MODES)
def test_the_callers_buffers_are_written_and_nothing_around_them(mode):
    """Both lie inside larger tensors, rows apart from each other in memory."""
    case = make_case(0, 7, "slots")
    around_out, around_grad = torch.full((2, 9, HIDDEN + 3), -3.0, dtype=torch.float64).unbind(0)
    buffers = around_out[1:8, 2 : 2 + HIDDEN], around_grad[1:8, 2 : 2 + HIDDEN]
    out_TH, grads, _, _ = call(LocalDispatcher(), case, 0, 3, mode, buffers)
    assert out_TH is buffers[0]
    assert grads.tokens_TH is buffers[1]
    (exact_TH,), (exact_grad_TH,), *_ = reference([case])
    for around, buffer, exact in ((around_out, buffers[0], exact_TH), (around_grad, buffers[1], exact_grad_TH)):
        torch.testing.assert_close(buffer, exact, rtol=1e-12, atol=1e-12)
        buffer.fill_(-3.0)
        assert (around == -3.0).all()


def owned_buffers_across_ranks() -> None:
    rank = dist.get_rank()
    case = make_case(rank, 4 + rank)
    buffers = tuple(torch.full((2, *case.tokens_TH.shape), float("nan"), dtype=torch.float64).unbind(0))
    dispatcher = select_dispatcher("auto", dist.group.WORLD, torch.device("cpu")).dispatcher
    plain, plain_grads, _, _ = call(dispatcher, case, rank, 3, "dispatch")
    out_TH, grads, _, _ = call(dispatcher, case, rank, 3, "dispatch", buffers)
    assert out_TH is buffers[0]
    assert grads.tokens_TH is buffers[1]
    assert torch.equal(out_TH, plain)
    assert torch.equal(grads.tokens_TH, plain_grads.tokens_TH)


def test_the_callers_buffers_are_written_across_ranks():
    run(owned_buffers_across_ranks, 2)


@pytest.mark.parametrize("needed", [(True, False), (False, True), (False, False)], ids=str)
@pytest.mark.parametrize("mode", ["none", "full"])
def test_a_weight_gradient_that_is_not_asked_for_is_none(mode, needed):
    case = make_case(0, 7)
    dispatcher = LocalDispatcher()
    plans = dispatcher.plan(case.ids_TK, case.weights_TK, NUM_EXPERTS, 2)
    inputs, experts = (case.tokens_TH, case.weights_TK), Weights(case.gate_up_E2FH, case.down_EHF)
    _, kept = primitives.forward(dispatcher, plans, *inputs, experts, mode)
    targets = [GradientTarget(torch.float64) if wanted else None for wanted in needed]
    grads = primitives.backward(dispatcher, plans, kept, case.grad_TH, case.tokens_TH, experts, targets)
    _, (tokens,), (weights,), gate_up, down = reference([case])
    expected = tokens, weights, gate_up if needed[0] else None, down if needed[1] else None
    for actual, exact in zip(grads, expected, strict=True):
        assert (actual is None) == (exact is None)
        if exact is not None:
            torch.testing.assert_close(actual, exact, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mode", ROUTED_MODES)
def test_it_does_not_matter_how_many_chunks_are_summed_together(mode):
    """From batches whose operands are small beside the matrices to some that outgrow them with their first chunk."""
    for num_tokens in (3, 12, 18, 30, 60):
        case = make_case(0, num_tokens)
        _, grads, _, _ = call(LocalDispatcher(), case, 0, 5, mode)
        _, (tokens,), (weights,), gate_up, down = reference([case])
        for actual, exact in zip(grads, (tokens, weights, SCALE * gate_up, SCALE * down), strict=True):
            torch.testing.assert_close(actual, exact, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("num_chunks", [1, 5, 16])
def test_bf16_weight_gradients_are_rounded_once_whatever_the_chunks(num_chunks):
    """Against float64 sums of the very bf16 factors that backward multiplies: half a unit of bf16, and no more."""
    case = make_case(0, 64, dtype=torch.bfloat16, hidden=16, width=8)
    dispatcher = LocalDispatcher()
    _, grads, kept, plans = call(dispatcher, case, 0, num_chunks, "none")
    exact = {"gate_up": torch.zeros_like(case.gate_up_E2FH.double()), "down": torch.zeros_like(case.down_EHF.double())}
    size = {name: torch.zeros_like(total) for name, total in exact.items()}
    places = chunk_rows(order.groups.num_rows for order in kept.orders)
    for plan, order, place in zip(plans, kept.orders, places, strict=True):
        grad_out_RH = torch.empty_like(kept.rows_RH[place])
        gather(case.grad_TH[plan.tokens], order.by_expert, grad_out_RH)
        grad_act_RF, gate_up_R2F = torch.empty_like(kept.act_RF[place]), kept.gate_up_R2F[place]
        grouped_mm(grad_out_RH, case.down_EHF, order.groups, grad_act_RF)
        grad_gate_up_R2F = torch.empty_like(gate_up_R2F)
        swiglu_backward(grad_act_RF, gate_up_R2F, order.weights_R, grad_gate_up_R2F)
        pairs = {"down": (grad_out_RH, kept.act_RF[place]), "gate_up": (grad_gate_up_R2F, kept.rows_RH[place])}
        for name, (left, right) in pairs.items():
            for expert, rows in enumerate(order.groups.slices):
                left_MR, right_RN = SCALE * left[rows].double().t(), right[rows].double()
                exact[name][expert] += left_MR @ right_RN
                size[name][expert] += left_MR.abs() @ right_RN.abs()
    for name, actual in (("gate_up", grads.gate_up_e2FH), ("down", grads.down_eHF)):
        assert actual.dtype == torch.bfloat16
        one_rounding = 2.0**-8 * exact[name].abs() * 1.001
        assert ((actual.double() - exact[name]).abs() <= one_rounding + 200 * 2.0**-24 * size[name]).all(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", ROUTED_MODES)
def test_narrow_dtypes_stay_within_their_rounding(mode, dtype):
    """Relative L2 error against the dense layer in float64; every mode gives the same bits."""
    case = make_case(0, 50, dtype=dtype, hidden=16, width=8)
    out_TH, grads, _, _ = call(LocalDispatcher(), case, 0, 3, mode)
    kept_all_TH, kept_all_grads, _, _ = call(LocalDispatcher(), case, 0, 3, "none")
    (out,), (tokens,), (weights,), gate_up, down = reference([case])
    expected = out, tokens, weights, SCALE * gate_up, SCALE * down
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
    for actual, exact, same in zip((out_TH, *grads), expected, (kept_all_TH, *kept_all_grads), strict=True):
        assert torch.equal(actual, same)
        assert (actual.double() - exact).norm() <= tolerance * exact.norm()
    assert out_TH.dtype == grads.tokens_TH.dtype == grads.down_eHF.dtype == grads.gate_up_e2FH.dtype == dtype
    assert grads.weights_TK.dtype == torch.float32
