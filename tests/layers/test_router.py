"""The router's options, against transformers' router of DeepSeek-V3 in float64."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from lightning_moe import TopKRouter
from lightning_moe.layers.router import router_scores

HIDDEN, EXPERTS, TOKENS = 16, 12, 40


def routers(top_k, groups, top_k_groups, normalize, scaling):
    """Ours and transformers', with the same weights and a bias that changes most choices."""
    ours = TopKRouter(
        HIDDEN,
        EXPERTS,
        top_k,
        normalize,
        0.5,
        score_function="sigmoid",
        selection_bias=True,
        num_groups=groups,
        top_k_groups=top_k_groups,
        scaling=scaling,
    ).double()
    config = SimpleNamespace(
        num_experts_per_tok=top_k,
        num_local_experts=EXPERTS,
        hidden_size=HIDDEN,
        routed_scaling_factor=scaling,
        n_group=groups,
        topk_group=top_k_groups,
        norm_topk_prob=normalize,
    )
    theirs = DeepseekV3TopkRouter(config).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        theirs.weight.copy_(ours.weight)
        ours.selection_bias.copy_(torch.rand(EXPERTS, generator=generator))
        theirs.e_score_correction_bias.copy_(ours.selection_bias)
    return ours, theirs


@pytest.mark.parametrize(
    ("top_k", "groups", "top_k_groups", "normalize", "scaling"),
    [(4, 1, 1, True, 1.0), (4, 4, 2, True, 2.5), (3, 6, 3, False, 1.0), (1, 3, 1, True, 1.5)],
)
def test_choice_weights_and_gradients_are_transformers(top_k, groups, top_k_groups, normalize, scaling, monkeypatch):
    monkeypatch.setattr(modeling_deepseek_v3.torch, "float32", torch.float64)  # it would step down in its forward
    ours, theirs = routers(top_k, groups, top_k_groups, normalize, scaling)
    tokens_TH = torch.randn(TOKENS, HIDDEN, dtype=torch.float64)
    upstream_TE = torch.randn(TOKENS, EXPERTS, dtype=torch.float64)
    dense = []
    for router in (ours, theirs):
        logits_TE, weights_TK, ids_TK = router(tokens_TH)
        dense.append(torch.zeros(TOKENS, EXPERTS, dtype=torch.float64).scatter(1, ids_TK, weights_TK))
        (dense[-1] * upstream_TE).sum().backward()
    torch.testing.assert_close(dense[0], dense[1], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad, rtol=1e-11, atol=1e-13)
    assert (dense[0] != 0).sum(1).tolist() == [top_k] * TOKENS
    if groups > 1:
        used = (dense[0] != 0).view(TOKENS, groups, -1).any(-1).sum(1)
        assert used.max() <= top_k_groups
    plain_TK = router_scores(logits_TE, "sigmoid").topk(top_k)[1]
    assert not torch.equal(ids_TK.sort(1)[0], plain_TK.sort(1)[0]), "the bias must have mattered"


def test_the_bias_stays_in_float32_whatever_the_model_is_converted_to():
    router = TopKRouter(HIDDEN, EXPERTS, 2, selection_bias=True)
    router.selection_bias.fill_(0.1234567)
    for convert in (torch.nn.Module.bfloat16, torch.nn.Module.double, lambda module: module.to(torch.float16)):
        module = convert(torch.nn.Sequential(copy.deepcopy(router)))
        assert module[0].weight.dtype != torch.float32
        assert torch.equal(module[0].selection_bias, router.selection_bias)
    with torch.device("meta"):
        empty = TopKRouter(HIDDEN, EXPERTS, 2, selection_bias=True).bfloat16().to_empty(device="cpu")
    empty.reset_parameters()
    assert torch.equal(empty.selection_bias, torch.zeros(EXPERTS))
    assert list(router.state_dict()) == ["weight", "selection_bias"]
    assert list(TopKRouter(HIDDEN, EXPERTS, 2).state_dict()) == ["weight"]


def test_no_tokens():
    router = TopKRouter(HIDDEN, EXPERTS, 2, score_function="sigmoid", selection_bias=True, num_groups=4, top_k_groups=2)
    routing = router(torch.zeros(0, HIDDEN))
    assert routing.weights_TK.shape == routing.ids_TK.shape == (0, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"score_function": "tanh"}, "`score_function` to be 'softmax' or 'sigmoid' but got 'tanh'"),
        ({"num_groups": 5}, "`num_groups` to divide num_experts=12 evenly but got 5"),
        ({"num_groups": 4, "top_k_groups": 5}, "`top_k_groups` to lie in 1..num_groups=4"),
        ({"num_groups": 6, "top_k_groups": 1}, "leave at least top_k=3 of 12 experts but got 1"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        TopKRouter(HIDDEN, EXPERTS, 3, **options)
