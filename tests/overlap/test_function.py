"""chunked_experts through autograd: gradients, what is kept for them, and what is not."""

from __future__ import annotations

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from helpers.devices import DEVICES
from lightning_moe.dispatch import LocalDispatcher
from lightning_moe.layers import GroupedExperts
from lightning_moe.overlap import chunked_experts, function, primitives, weight_gradients
from lightning_moe.overlap.gradient_sums import GradientSum
from lightning_moe.recompute.policy import ROUTED_MODES
from overlap.dense import HIDDEN, NUM_EXPERTS, TOP_K, WIDTH, Case, dense, make_case

NAMES = ("tokens", "weights", "gate_up", "down")


def leaves(case, frozen=()):
    tensors = (case.tokens_TH, case.weights_TK, case.gate_up_E2FH, case.down_EHF)
    return [x.clone().requires_grad_(name not in frozen) for name, x in zip(NAMES, tensors, strict=True)]


def layer(inputs, ids_TK, mode: str, num_chunks: int = 3, scale: float = 1.0):
    dispatcher = LocalDispatcher()
    return chunked_experts(
        *inputs, dispatcher, dispatcher.plan(ids_TK, inputs[1].detach(), NUM_EXPERTS, num_chunks), mode, scale
    )


def assert_same_gradients(inputs, expected, scale: float = 1.0) -> None:
    for name, actual, exact in zip(NAMES, inputs, expected, strict=True):
        assert (actual.grad is None) == (exact.grad is None), name
        if exact.grad is not None:
            factor = scale if name in ("gate_up", "down") else 1.0
            torch.testing.assert_close(actual.grad, factor * exact.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("pattern", ["any", "slots"])
@pytest.mark.parametrize("mode", ROUTED_MODES)
def test_gradcheck(mode, pattern):
    """Numerical derivatives of all four inputs; five tokens in three chunks."""
    case = make_case(0, 5, pattern, hidden=3, width=2)
    assert torch.autograd.gradcheck(
        lambda *inputs: layer(inputs, case.ids_TK, mode), leaves(case), fast_mode=True, atol=1e-7
    )


@pytest.mark.parametrize(
    "frozen",
    [
        ("gate_up",),
        ("down",),
        ("gate_up", "down"),
        ("tokens",),
        ("weights",),
        ("tokens", "weights"),
        NAMES[1:],
        NAMES[:3],
    ],
    ids="+".join,
)
@pytest.mark.parametrize("mode", ROUTED_MODES)
def test_what_is_frozen_gets_no_gradient_and_the_rest_its_own(mode, frozen, monkeypatch):
    """Nor is a frozen matrix's gradient computed."""
    computed = []
    backward = primitives.backward
    monkeypatch.setattr(primitives, "backward", lambda *args: computed.append(backward(*args)) or computed[-1])
    case = make_case(0, 7, "slots")
    inputs, expected = leaves(case, frozen), leaves(case, frozen)
    layer(inputs, case.ids_TK, mode, scale=0.5).backward(case.grad_TH)
    dense(*expected[:2], case.ids_TK, *expected[2:]).backward(case.grad_TH)
    assert_same_gradients(inputs, expected, scale=0.5)
    (grads,) = computed
    assert [grads.gate_up_e2FH is None, grads.down_eHF is None] == [name in frozen for name in NAMES[2:]]


@pytest.mark.parametrize("mode", ROUTED_MODES)
@pytest.mark.parametrize("num_tokens", [0, 1, 2])
def test_fewer_tokens_than_chunks(num_tokens, mode):
    case = make_case(0, num_tokens)
    inputs, expected = leaves(case), leaves(case)
    out_TH = layer(inputs, case.ids_TK, mode, num_chunks=5)
    exact_TH = dense(*expected[:2], case.ids_TK, *expected[2:])
    torch.testing.assert_close(out_TH, exact_TH, rtol=1e-12, atol=1e-12)
    out_TH.backward(case.grad_TH)
    exact_TH.backward(case.grad_TH)
    assert_same_gradients(inputs, expected)


@pytest.mark.parametrize("mode", ROUTED_MODES)
def test_an_upstream_gradient_that_is_not_contiguous(mode):
    """Expanded (stride 0 on both axes, and on one), and transposed; tokens and weights are transposed views too."""
    case = make_case(0, 7)
    column_H, factor = case.grad_TH[0], case.grad_TH[1, 0]
    for project in (
        lambda out_TH: out_TH.sum() * factor,
        lambda out_TH: out_TH.sum(0) @ column_H,
        lambda out_TH: (out_TH.t() * case.grad_TH.t().contiguous()).sum(),
    ):
        inputs, expected = leaves(case), leaves(case)
        views = [x.detach().t().contiguous().t().requires_grad_() for x in inputs[:2]]
        inputs = views + inputs[2:]
        assert not views[0].is_contiguous()
        project(layer(inputs, case.ids_TK, mode)).backward()
        project(dense(*expected[:2], case.ids_TK, *expected[2:])).backward()
        assert_same_gradients(inputs, expected)


@pytest.mark.parametrize("mode", ROUTED_MODES)
def test_saved_elements_are_those_of_the_formula(mode):
    """What autograd holds beside the inputs, for each token: RecomputePolicy's table, and K routing weights."""
    case = make_case(0, 12)
    inputs = leaves(case)
    of_inputs = {x.untyped_storage().data_ptr(): name for name, x in zip(NAMES, inputs, strict=True)}
    saved, places, from_inputs = [], [], set()

    def pack(tensor):
        name = of_inputs.get(tensor.untyped_storage().data_ptr())
        if name:
            from_inputs.add(name)
        else:
            (saved if tensor.is_floating_point() else places).append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out_TH = layer(inputs, case.ids_TK, mode, num_chunks=3)
    per_token = {
        "none": TOP_K * (HIDDEN + 3 * WIDTH) + TOP_K,
        "act": TOP_K * (HIDDEN + 2 * WIDTH) + TOP_K,
        "dispatch": TOP_K * 2 * WIDTH + TOP_K,
        "full": TOP_K,
    }
    again = {"none": set(), "act": set(), "dispatch": {"tokens"}, "full": {"tokens"}}
    assert sum(saved) == 12 * per_token[mode]
    assert sum(places) == 12 * TOP_K + 3 * NUM_EXPERTS  # where each slot's row is, and where each expert's rows end
    assert from_inputs == {"gate_up", "down"} | again[mode]
    del out_TH


@pytest.mark.parametrize("no_graph", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("mode", ROUTED_MODES)
def test_without_a_graph_nothing_is_kept(mode, no_graph, monkeypatch):
    kept_by_forward, watched = [], []
    forward = primitives.forward

    def spy(*args, **options):
        out_TH, kept = forward(*args, **options)
        kept_by_forward.extend([kept.rows_RH, kept.gate_up_R2F, kept.act_RF])
        return out_TH, kept

    monkeypatch.setattr(primitives, "forward", spy)
    monkeypatch.setattr(function, "watchers", [lambda plans, kept: watched.append((len(plans), kept))])
    case = make_case(0, 7)
    inputs = leaves(case)
    with no_graph():
        out_TH = layer(inputs, case.ids_TK, mode)
    assert not out_TH.requires_grad
    assert kept_by_forward == [None] * 3
    assert watched == [(3, [])] * 2
    torch.testing.assert_close(out_TH, dense(*inputs[:2], case.ids_TK, *inputs[2:]).detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mode", ROUTED_MODES)
def test_a_matrix_hears_its_gradient_once_and_backward_can_run_twice(mode):
    """One accumulation for a layer call of three chunks; a graph that is retained gives the same gradient again."""
    case = make_case(0, 7)
    inputs = leaves(case)
    heard = []
    for name, x in zip(NAMES, inputs, strict=True):
        x.register_post_accumulate_grad_hook(lambda _, name=name: heard.append(name))
    out_TH = layer(inputs, case.ids_TK, mode)
    out_TH.backward(case.grad_TH, retain_graph=True)
    assert sorted(heard) == sorted(NAMES)
    first = [x.grad.clone() for x in inputs]
    out_TH.backward(case.grad_TH)
    for x, once in zip(inputs, first, strict=True):
        assert once.norm() > 0
        assert torch.equal(x.grad, 2 * once)


def test_a_second_derivative_is_refused():
    case = make_case(0, 4)
    inputs, grad_TH = leaves(case), case.grad_TH.clone().requires_grad_()
    (grad,) = torch.autograd.grad(layer(inputs, case.ids_TK, "none"), inputs[0], grad_TH, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        (grad * case.grad_TH).sum().backward()


def hold(sums, holds: bool) -> None:
    for one in sums:
        one.holds = holds


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", ROUTED_MODES)
def test_gradients_that_are_held_are_summed_in_float32_and_rounded_once(mode, device):
    """Three calls of bfloat16 matrices: nothing is heard of the first two, and the third's gradient is the sum of all."""
    sizes = {"dtype": torch.bfloat16, "hidden": 32, "width": 16}  # which the kernels take
    cases = [make_case(0, num_tokens, **sizes) for num_tokens in (40, 0, 60)]
    cases = [Case(**{name: tensor.to(device) for name, tensor in vars(case).items()}) for case in cases]
    sums, dispatcher = (GradientSum(), GradientSum()), LocalDispatcher()
    matrices = [x.clone().requires_grad_() for x in (cases[0].gate_up_E2FH, cases[0].down_EHF)]
    exact = [torch.zeros_like(x, dtype=torch.float64) for x in matrices]
    size = [torch.zeros_like(x) for x in exact]
    for case in cases:
        holds = case is not cases[-1]
        hold(sums, holds)
        plans = dispatcher.plan(case.ids_TK, case.weights_TK, NUM_EXPERTS, 2)
        out_TH = chunked_experts(case.tokens_TH, case.weights_TK, *matrices, dispatcher, plans, mode, 0.25, sums)
        out_TH.backward(case.grad_TH)
        assert [x.grad is None for x in matrices] == [holds] * 2
        assert [one.total_eMN is not None and one.total_eMN.dtype == torch.float32 for one in sums] == [holds] * 2
        (one,) = dispatcher.plan(case.ids_TK, case.weights_TK, NUM_EXPERTS, 1)
        wide = [x.detach().float().requires_grad_() for x in matrices]  # converted inside: its gradient is not rounded
        chunked_experts(case.tokens_TH, case.weights_TK, *wide, dispatcher, [one], "none").backward(case.grad_TH)
        for total, absolute, x in zip(exact, size, wide, strict=True):
            assert x.grad.dtype == torch.float32
            total += 0.25 * x.grad.double()
            absolute += 0.25 * x.grad.double().abs()
    for x, total, absolute in zip(matrices, exact, size, strict=True):
        rounding = total.abs() * 2**-8 + absolute * 1e-5
        assert ((x.grad.double() - total).abs() <= rounding).all()


@pytest.mark.parametrize("holds", [True, False])
def test_a_backward_that_does_not_train_the_matrices_leaves_what_is_held(holds):
    """``autograd.grad`` of an input or of a matrix, ``backward(inputs=...)``, and a graph in which they are frozen."""
    case, dispatcher = make_case(0, 9), LocalDispatcher()
    inputs, expected, sums = leaves(case), leaves(case), (GradientSum(), GradientSum())
    plans = dispatcher.plan(case.ids_TK, case.weights_TK, NUM_EXPERTS, 2)

    def call(tensors):
        return chunked_experts(*tensors, dispatcher, plans, "full", 0.5, sums)

    dense(*expected[:2], case.ids_TK, *expected[2:]).backward(case.grad_TH)
    hold(sums, True)
    call(inputs).backward(case.grad_TH)
    held = [one.total_eMN.clone() for one in sums]
    inputs[0].grad = None
    hold(sums, holds)
    (of_input,) = torch.autograd.grad(call(inputs), inputs[0], case.grad_TH)
    (of_matrix,) = torch.autograd.grad(call(inputs), inputs[2], case.grad_TH)
    call(inputs).backward(case.grad_TH, inputs=[inputs[0]])
    call([inputs[0], inputs[1], inputs[2].detach(), inputs[3].detach()]).backward(case.grad_TH)
    assert all(torch.equal(one.total_eMN, before) for one, before in zip(sums, held, strict=True))
    assert [x.grad for x in inputs[2:]] == [None, None]
    torch.testing.assert_close(of_input, expected[0].grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(inputs[0].grad, 2 * expected[0].grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(of_matrix, 0.5 * expected[2].grad, rtol=1e-12, atol=1e-12)


def test_a_total_goes_as_soon_as_its_gradient_is_there(monkeypatch):
    """Of bfloat16 matrices: while the second is computed, the float32 total of the first is gone."""
    case, dispatcher = make_case(0, 9, dtype=torch.bfloat16), LocalDispatcher()
    inputs, sums = leaves(case), (GradientSum(), GradientSum())
    plans = dispatcher.plan(case.ids_TK, case.weights_TK, NUM_EXPERTS, 2)
    hold(sums, True)
    chunked_experts(*inputs, dispatcher, plans, "full", 1.0, sums).backward(case.grad_TH)
    totals, alive = [StorageWeakRef(one.total_eMN.untyped_storage()) for one in sums], []
    product = weight_gradients.weight_gradient

    def watched(*args):
        alive.append(sum(not total.expired() for total in totals))
        product(*args)

    monkeypatch.setattr(weight_gradients, "weight_gradient", watched)
    hold(sums, False)
    chunked_experts(*inputs, dispatcher, plans, "full", 1.0, sums).backward(case.grad_TH)
    assert alive[0] == 2
    assert alive[-1] == 1
    assert all(total.expired() for total in totals)


def test_an_error_in_backward_loses_nothing_of_earlier_micro_batches(monkeypatch):
    case, dispatcher = make_case(0, 9), LocalDispatcher()
    inputs, sums = leaves(case), (GradientSum(), GradientSum())
    plans = dispatcher.plan(case.ids_TK, case.weights_TK, NUM_EXPERTS, 2)
    hold(sums, True)
    chunked_experts(*inputs, dispatcher, plans, "full", 1.0, sums).backward(case.grad_TH)
    expected = [one.total_eMN.clone() for one in sums]
    hold(sums, False)
    out_TH = chunked_experts(*inputs, dispatcher, plans, "full", 1.0, sums)

    def fail(*_):
        raise MemoryError

    monkeypatch.setattr(primitives, "pipeline", fail)
    with pytest.raises(MemoryError):
        out_TH.backward(case.grad_TH)
    assert all(torch.equal(one.total_eMN, before) for one, before in zip(sums, expected, strict=True))


def test_matrices_of_another_dtype_are_converted_and_nothing_of_that_is_kept():
    case = make_case(0, 9, dtype=torch.bfloat16)
    matrices = [x.float().requires_grad_() for x in (case.gate_up_E2FH, case.down_EHF)]
    same = [x.detach().bfloat16().requires_grad_() for x in matrices]
    saved = []
    for weights in (matrices, same):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: saved[-1].append(x) or x, lambda x: x):
            saved.append([])
            out_TH = layer([case.tokens_TH, case.weights_TK, *weights], case.ids_TK, "full")
        out_TH.backward(case.grad_TH)
    assert [x.dtype for x in saved[0][:2]] == [torch.float32] * 2
    assert all(ours is x for ours, x in zip(saved[0], matrices, strict=False))
    assert len(saved[0]) == len(saved[1])
    for wide, narrow in zip(matrices, same, strict=True):
        assert wide.grad.dtype == torch.float32
        assert torch.equal(wide.grad.bfloat16(), narrow.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_held_when_no_backward_comes_is_handed_over(dtype):
    """Once, into the gradient that is there, scaled; and hooks hear of it."""
    experts, heard = GroupedExperts(NUM_EXPERTS, HIDDEN, WIDTH).to(dtype), []
    case = make_case(0, 9, dtype=dtype)
    experts.distribute(LocalDispatcher(), 2, "full", weight_grad_scale=0.5)
    experts(case.tokens_TH, case.weights_TK, case.ids_TK).backward(case.grad_TH)
    expected = [x.grad.clone() for x in experts.parameters()]
    experts.gradient_sums = GradientSum(), GradientSum()
    hold(experts.gradient_sums, True)
    for x in experts.parameters():
        x.register_post_accumulate_grad_hook(heard.append)
    for twice in (False, True):
        before = [x.grad for x in experts.parameters()]
        hold(experts.gradient_sums, True)
        experts(case.tokens_TH, case.weights_TK, case.ids_TK).backward(case.grad_TH)
        heard.clear()
        experts.hand_over_gradients()
        assert not heard
        hold(experts.gradient_sums, False)
        for _ in range(2):  # there is nothing to hand over a second time
            experts.hand_over_gradients()
        assert [id(x) for x in heard] == [id(x) for x in experts.parameters()]
        for x, was, once in zip(experts.parameters(), before, expected, strict=True):
            assert x.grad is was
            torch.testing.assert_close(x.grad, (3 if twice else 2) * once)
