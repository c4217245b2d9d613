"""The layer and its parts on one process, against a loop over tokens that anyone can check by eye."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from lightning_moe import GroupedExperts, MoELayer, Routing, SharedExperts, TopKRouter
from lightning_moe.dispatch import LocalDispatcher
from lightning_moe.overlap import chunked_experts
from lightning_moe.recompute.policy import ROUTED_MODES

HIDDEN, WIDTH, SHARED_WIDTH, NUM_EXPERTS, TOP_K = 16, 8, 12, 6, 3


def make_layer(normalize: bool = True, shared: bool | None = None, dtype=torch.float64) -> MoELayer:
    """``shared`` is whether the shared experts are gated; ``None`` for none."""
    torch.manual_seed(3)
    layer = MoELayer(
        TopKRouter(HIDDEN, NUM_EXPERTS, TOP_K, normalize=normalize, init_std=0.5),
        GroupedExperts(NUM_EXPERTS, HIDDEN, WIDTH, init_std=0.3),
        None if shared is None else SharedExperts(HIDDEN, SHARED_WIDTH, gated=shared),
    )
    return layer.to(dtype)


def random(*shape: int, seed: int = 0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def by_token(parameters: dict, hidden, normalize: bool, shared: bool | None):
    """Token after token: softmax, the K largest, their experts' sum; then the shared branch."""
    p, rows = parameters, []
    for token_H in hidden.reshape(-1, HIDDEN):
        probabilities = (p["router.weight"] @ token_H).exp()
        probabilities = probabilities / probabilities.sum()
        chosen = sorted(range(NUM_EXPERTS), key=lambda e, q=probabilities: -q[e].item())[:TOP_K]
        total = sum(probabilities[e] for e in chosen) if normalize else 1.0
        out_H = torch.zeros_like(token_H)
        for e in chosen:
            gate_up = p["experts.gate_up_proj"][e] @ token_H
            gate, up = gate_up[:WIDTH], gate_up[WIDTH:]
            out_H = out_H + probabilities[e] / total * (p["experts.down_proj"][e] @ (gate / (1 + (-gate).exp()) * up))
        if shared is not None:
            gate = p["shared_experts.gate_proj.weight"] @ token_H
            up = p["shared_experts.up_proj.weight"] @ token_H
            shared_H = p["shared_experts.down_proj.weight"] @ (gate / (1 + (-gate).exp()) * up)
            if shared:
                shared_H = shared_H / (1 + (-(p["shared_experts.output_gate.weight"] @ token_H)).exp())
            out_H = out_H + shared_H
        rows.append(out_H)
    return (torch.stack(rows) if rows else hidden).view(hidden.shape)


@pytest.mark.parametrize("shape", [(9, HIDDEN), (2, 5, HIDDEN), (2, 1, 3, HIDDEN)], ids=str)
@pytest.mark.parametrize("shared", [None, False, True], ids=["routed only", "shared", "gated shared"])
@pytest.mark.parametrize("normalize", [True, False], ids=["normalized", "softmax"])
def test_output_and_every_gradient_equal_the_loop_over_tokens(normalize, shared, shape):
    layer = make_layer(normalize, shared)
    hidden, upstream = random(*shape).requires_grad_(), random(*shape, seed=1)
    exact_parameters = {name: p.detach().clone().requires_grad_() for name, p in layer.named_parameters()}
    exact_hidden = hidden.detach().clone().requires_grad_()
    out, exact = layer(hidden), by_token(exact_parameters, exact_hidden, normalize, shared)
    assert out.dtype == torch.float64
    torch.testing.assert_close(out, exact, rtol=1e-11, atol=1e-12)
    out.backward(upstream)
    exact.backward(upstream)
    torch.testing.assert_close(hidden.grad, exact_hidden.grad, rtol=1e-11, atol=1e-12)
    for name, parameter in layer.named_parameters():
        assert exact_parameters[name].grad.norm() > 0, name
        torch.testing.assert_close(parameter.grad, exact_parameters[name].grad, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("mode", ROUTED_MODES)
def test_chunks_modes_and_scale_change_only_what_they_say(mode):
    """More chunks and less memory give the same result; the scale is on the experts' weights alone."""
    plain, chunked = make_layer(shared=True), make_layer(shared=True)
    chunked.experts.distribute(LocalDispatcher(), num_chunks=4, mode=mode, weight_grad_scale=0.25)
    hidden, upstream = random(2, 5, HIDDEN), random(2, 5, HIDDEN, seed=1)
    for layer in (plain, chunked):
        layer(hidden).backward(upstream)
    torch.testing.assert_close(chunked(hidden), plain(hidden), rtol=1e-12, atol=1e-13)
    for (name, ours), theirs in zip(chunked.named_parameters(), plain.parameters(), strict=True):
        scale = 0.25 if name.startswith("experts.") else 1.0
        torch.testing.assert_close(ours.grad, scale * theirs.grad, rtol=1e-12, atol=1e-13)
    assert "num_chunks=4" in repr(chunked.experts)
    assert f"mode={mode}" in repr(chunked.experts)


@pytest.mark.parametrize("autocast", [False, True], ids=["bf16", "autocast"])
def test_bf16_and_autocast_stay_within_bf16_of_float64(autocast):
    """Where the router chose the same experts; output in the input's dtype, gradients in the parameters'."""
    parameter_dtype = torch.float32 if autocast else torch.bfloat16
    layer = make_layer(shared=True, dtype=torch.bfloat16).to(parameter_dtype)
    hidden = random(40, HIDDEN, dtype=torch.bfloat16).to(parameter_dtype).requires_grad_()
    upstream = random(40, HIDDEN, seed=1, dtype=torch.bfloat16).to(parameter_dtype)
    exact_layer = copy.deepcopy(layer).double()
    exact_hidden = hidden.detach().double().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        routing = layer.route(hidden)
        out = layer(hidden)
    exact_routing = exact_layer.route(exact_hidden)
    assert routing.logits_TE.dtype == torch.bfloat16
    assert routing.weights_TK.dtype == torch.float32
    same = (routing.ids_TK.sort(1)[0] == exact_routing.ids_TK.sort(1)[0]).all(1)
    assert same.float().mean() > 0.8
    out.backward(upstream * same[:, None])
    exact = exact_layer(exact_hidden)
    exact.backward(upstream.double() * same[:, None])
    assert out.dtype == hidden.grad.dtype == parameter_dtype
    pairs = {
        name: (p.grad, e.grad) for (name, p), e in zip(layer.named_parameters(), exact_layer.parameters(), strict=True)
    }
    pairs |= {"output": (out[same], exact[same]), "input": (hidden.grad, exact_hidden.grad)}
    for name, (actual, expected) in pairs.items():
        assert actual.dtype == parameter_dtype, name
        assert (actual.double() - expected).norm() <= 2e-2 * expected.norm(), name


@pytest.mark.parametrize("autocast", [False, True], ids=["bf16", "autocast"])
def test_routing_weights_stay_in_float32_beside_bf16_experts(autocast):
    """Bit by bit what bf16 tokens and matrices give with unrounded weights; autocast is what made them bf16."""
    layer = make_layer(dtype=torch.float32 if autocast else torch.bfloat16)
    tokens_TH, ids_TK = random(9, HIDDEN, dtype=torch.float32), torch.arange(9 * 2).view(9, 2) % NUM_EXPERTS
    weights_TK = random(9, 2, seed=2, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        out_TH = layer.experts(tokens_TH, weights_TK, ids_TK)
    matrices = [p.detach().bfloat16() for p in (layer.experts.gate_up_proj, layer.experts.down_proj)]
    dispatcher = LocalDispatcher()
    plans = dispatcher.plan(ids_TK, weights_TK, NUM_EXPERTS, 1)
    assert out_TH.dtype == torch.bfloat16
    assert torch.equal(out_TH, chunked_experts(tokens_TH.bfloat16(), weights_TK, *matrices, dispatcher, plans, "none"))
    assert layer.experts(tokens_TH, weights_TK, ids_TK).dtype == layer.experts.down_proj.dtype


@pytest.mark.parametrize("shape", [(0, HIDDEN), (0, 5, HIDDEN), (2, 0, HIDDEN)], ids=str)
@pytest.mark.parametrize("num_chunks", [1, 3])
def test_an_empty_batch_gives_an_empty_output_and_zero_gradients(num_chunks, shape):
    layer = make_layer(shared=True)
    layer.experts.distribute(LocalDispatcher(), num_chunks)
    hidden = random(*shape).requires_grad_()
    out = layer(hidden)
    assert out.shape == shape
    (out * 1.5).sum().backward()
    assert hidden.grad.shape == shape
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.count_nonzero() == 0, name


def test_router_takes_the_largest_probabilities():
    router = TopKRouter(HIDDEN, NUM_EXPERTS, TOP_K, normalize=False, init_std=0.5).double()
    tokens_TH = random(20, HIDDEN)
    routing = router(tokens_TH)
    assert isinstance(routing, Routing)
    assert routing.logits_TE.shape == (20, NUM_EXPERTS)
    assert routing.weights_TK.shape == routing.ids_TK.shape == (20, TOP_K)
    probabilities_TE = (tokens_TH @ router.weight.t()).softmax(-1)
    torch.testing.assert_close(routing.weights_TK, probabilities_TE.sort(descending=True)[0][:, :TOP_K])
    torch.testing.assert_close(probabilities_TE.gather(1, routing.ids_TK), routing.weights_TK)
    assert all(len(set(ids)) == TOP_K for ids in routing.ids_TK.tolist())
    assert (routing.weights_TK.sum(1) < 0.999).any()
    router.normalize = True
    torch.testing.assert_close(router(tokens_TH).weights_TK.sum(1), torch.ones(20, dtype=torch.float64))


def test_a_slot_of_minus_one_goes_nowhere():
    """A router of the user's own may drop tokens: what is left is the sum over the other slots."""

    class Dropping(nn.Module):
        def forward(self, tokens_TH):
            num_tokens = len(tokens_TH)
            ids_TK = torch.tensor([[2, -1], [-1, -1], [0, 5]])[torch.arange(num_tokens) % 3]
            return tokens_TH.new_zeros(num_tokens, NUM_EXPERTS), random(num_tokens, 2, seed=4), ids_TK

    layer = make_layer()
    layer.router, full = Dropping(), layer.experts
    hidden = random(6, HIDDEN)
    weights_TK = random(6, 2, seed=4)
    out = layer(hidden)
    only_first = full(hidden[::3], weights_TK[::3, :1], torch.full((2, 1), 2))
    torch.testing.assert_close(out[::3], only_first)
    assert out[1::3].count_nonzero() == 0
    both = full(hidden[2::3], weights_TK[2::3], torch.tensor([[0, 5], [0, 5]]))
    torch.testing.assert_close(out[2::3], both)


def test_copies_and_state_dicts_carry_the_whole_layer():
    layer, hidden = make_layer(shared=True), random(7, HIDDEN)
    layer.experts.distribute(LocalDispatcher(), num_chunks=3, mode="full")
    twin = copy.deepcopy(layer)
    other = make_layer(shared=True)
    for parameter in other.parameters():
        nn.init.uniform_(parameter)
    assert not torch.allclose(other(hidden), layer(hidden))
    assert list(layer.state_dict()) == [
        "router.weight",
        "experts.gate_up_proj",
        "experts.down_proj",
        *(f"shared_experts.{name}.weight" for name in ("gate_proj", "up_proj", "down_proj", "output_gate")),
    ]
    other.load_state_dict(layer.state_dict())
    expected = layer(hidden)
    assert torch.equal(twin(hidden), expected)
    torch.testing.assert_close(other(hidden), expected, rtol=1e-12, atol=1e-13)
    with torch.no_grad():
        layer.experts.down_proj.zero_()
        layer.router.weight.zero_()
    assert torch.equal(twin(hidden), expected)
    twin(hidden).backward(random(7, HIDDEN, seed=1))
    assert twin.experts.gate_up_proj.grad.norm() > 0
    assert layer.experts.gate_up_proj.grad is None


def test_weights_start_as_normal_with_the_given_deviation():
    torch.manual_seed(0)
    modules = GroupedExperts(8, 64, 64, init_std=0.05), TopKRouter(512, 64, 2, init_std=0.05)
    for weight in (modules[0].gate_up_proj, modules[0].down_proj, modules[1].weight):
        assert weight.std().item() == pytest.approx(0.05, rel=0.03)
        assert abs(weight.mean().item()) < 4 * 0.05 / math.sqrt(weight.numel())
    before = modules[0].down_proj.detach().clone()
    modules[0].reset_parameters()
    assert not torch.equal(modules[0].down_proj, before)


@pytest.mark.parametrize("top_k", [0, -1, 5])
def test_top_k_out_of_range_is_refused(top_k):
    with pytest.raises(ValueError, match=rf"`top_k` to lie in 1\.\.num_experts=4 but got {top_k}"):
        TopKRouter(HIDDEN, 4, top_k)
    TopKRouter(HIDDEN, 4, 4)


@pytest.mark.parametrize("num_chunks", [0, -2])
def test_fewer_than_one_chunk_is_refused(num_chunks):
    experts = GroupedExperts(4, HIDDEN, WIDTH)
    with pytest.raises(ValueError, match=rf"`num_chunks` to be an integer of at least 1 but got {num_chunks}"):
        experts.distribute(LocalDispatcher(), num_chunks=num_chunks)
    assert experts.num_chunks == 1


def test_router_and_experts_must_agree_on_their_number():
    with pytest.raises(ValueError, match="chooses between 16 experts, but there are 4.*`num_experts`"):
        MoELayer(TopKRouter(16, 16, 2), GroupedExperts(4, 16, 8))


@pytest.mark.parametrize(("tokens", "weights", "ids"), [(6, (5, 2), (5, 2)), (5, (5, 3), (5, 2)), (5, (4, 2), (5, 2))])
def test_tokens_and_routing_that_do_not_belong_together_are_refused(tokens, weights, ids):
    experts = GroupedExperts(4, 8, 8)
    with pytest.raises(ValueError, match=r"\[T, K\], but got"):
        experts(torch.randn(tokens, 8), torch.rand(weights), torch.zeros(ids, dtype=torch.int64))


def test_autocast_leaves_float64_alone():
    experts = GroupedExperts(4, 8, 8).double()
    tokens_TH, weights_TK = torch.randn(5, 8, dtype=torch.float64), torch.rand(5, 2, dtype=torch.float64)
    ids_TK = torch.tensor([[0, 1]] * 5)
    expected = experts(tokens_TH, weights_TK, ids_TK)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(experts(tokens_TH, weights_TK, ids_TK), expected)


def test_tokens_whose_columns_lie_together_give_rows_that_do():
    experts = GroupedExperts(4, 8, 8)
    columns_HT, weights_TK, ids_TK = torch.randn(8, 5), torch.rand(5, 2), torch.tensor([[0, 1]] * 5)
    out_TH = experts(columns_HT.t(), weights_TK, ids_TK)
    assert out_TH.is_contiguous()
    torch.testing.assert_close(out_TH, experts(columns_HT.t().contiguous(), weights_TK, ids_TK))
