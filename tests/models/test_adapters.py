"""Swapping a Hugging Face model's blocks in place: nothing that a user holds on to changes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from helpers.models import batch, loss_of, qwen3_moe
from lightning_moe import GroupedExperts, MoELayer, SharedExperts, TopKRouter
from lightning_moe.models import FAMILIES, swap_blocks
from lightning_moe.models.qwen3_moe import Qwen3MoELayer


def outputs(model, **options):
    return model(input_ids=batch(0), use_cache=False, **options)


def test_blocks_become_layers_and_say_what_they_were():
    model = qwen3_moe(torch.float32, num_hidden_layers=3, mlp_only_layers=[1])
    blocks = swap_blocks(model)
    assert [(block.name, block.kind) for block in blocks] == [
        ("model.layers.0.mlp", "Qwen3MoeSparseMoeBlock"),
        ("model.layers.2.mlp", "Qwen3MoeSparseMoeBlock"),
    ]
    for block in blocks:
        assert type(block.layer) is Qwen3MoELayer
        assert block.layer is model.get_submodule(block.name)
    assert type(model.model.layers[1].mlp).__name__ == "Qwen3MoeMLP"


def test_parameters_stay_the_same_objects_under_the_same_names():
    """So an optimizer that was built before the swap trains the swapped model, and frozen weights stay frozen."""
    model = qwen3_moe(torch.float32)
    model.model.layers[0].mlp.experts.down_proj.requires_grad_(False)
    gates = [layer.mlp.gate for layer in model.model.layers]
    before, values = dict(model.named_parameters()), {k: v.clone() for k, v in model.state_dict().items()}
    swap_blocks(model)
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)
    assert not model.model.layers[0].mlp.experts.down_proj.requires_grad
    assert [layer.mlp.gate for layer in model.model.layers] == gates
    assert model.state_dict().keys() == values.keys()
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())


def test_parameters_keep_their_order():
    """An optimizer's state dict knows parameters by position."""
    model = qwen3_moe(torch.float32)
    before = [name for name, _ in model.named_parameters()]
    swap_blocks(model)
    assert [name for name, _ in model.named_parameters()] == before


@pytest.mark.parametrize("normalize", [True, False])
def test_outputs_and_gradients_are_those_of_before(normalize):
    model = qwen3_moe(torch.float32, norm_topk_prob=normalize)
    results = []
    for swapped in (False, True):
        if swapped:
            assert len(swap_blocks(model)) == 2
        model.zero_grad()
        loss_of(model, batch(0), 0).backward()
        results.append((outputs(model).logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}))
    (logits, gradients), (swapped_logits, swapped_gradients) = results
    torch.testing.assert_close(swapped_logits, logits, rtol=1e-5, atol=1e-6)
    for name, gradient in gradients.items():
        assert gradient.norm() > 0, name
        assert (swapped_gradients[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


def test_router_logits_and_auxiliary_loss_are_still_recorded():
    model = qwen3_moe(torch.float32, router_aux_loss_coef=0.3)
    before = outputs(model, output_router_logits=True, labels=batch(0))
    swap_blocks(model)
    after = outputs(model, output_router_logits=True, labels=batch(0))
    assert len(after.router_logits) == len(before.router_logits) == 2
    for ours, theirs in zip(after.router_logits, before.router_logits, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(after.aux_loss, before.aux_loss)
    torch.testing.assert_close(after.loss, before.loss)
    assert after.aux_loss > 0
    assert outputs(model).router_logits is None


def test_swapping_twice_changes_nothing_more():
    model = qwen3_moe(torch.float32)
    first = swap_blocks(model)
    first[0].layer.experts.num_chunks = 4
    second = swap_blocks(model)
    assert [block.layer for block in second] == [block.layer for block in first]
    assert [block.name for block in second] == [block.name for block in first]
    assert model.model.layers[0].mlp.experts.num_chunks == 4


def test_weights_of_before_load_after_and_the_other_way_round():
    plain, swapped = qwen3_moe(torch.float32, seed=1), qwen3_moe(torch.float32, seed=2)
    swap_blocks(swapped)
    assert not torch.allclose(outputs(swapped).logits, outputs(plain).logits)
    swapped.load_state_dict(plain.state_dict())
    torch.testing.assert_close(outputs(swapped).logits, outputs(plain).logits, rtol=1e-5, atol=1e-6)
    other = qwen3_moe(torch.float32, seed=3)
    other.load_state_dict(swapped.state_dict())
    assert torch.equal(outputs(other).logits, outputs(plain).logits)


@pytest.mark.parametrize("training", [True, False])
def test_the_training_flag_is_kept(training):
    model = qwen3_moe(torch.float32).train(training)
    for block in swap_blocks(model):
        assert all(module.training == training for module in block.layer.modules())


@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_another_activation_is_refused(activation):
    model = qwen3_moe(torch.float32, hidden_act=activation)
    with pytest.raises(ValueError, match=r"compute SiLU.*hidden_act='silu'"):
        swap_blocks(model)
    assert "Qwen3MoeSparseMoeBlock" in str(type(model.model.layers[0].mlp))


def test_swish_is_silu():
    assert len(swap_blocks(qwen3_moe(torch.float32, hidden_act="swish"))) == 2


def test_experts_that_are_not_stacked_are_refused():
    model = qwen3_moe(torch.float32)
    model.model.layers[0].mlp.experts = nn.ModuleList([nn.Linear(2, 2)])
    with pytest.raises(ValueError, match=r"not stacked.*transformers>=5"):
        swap_blocks(model)


def test_a_model_that_is_itself_a_block_is_refused():
    block = qwen3_moe(torch.float32).model.layers[0].mlp
    with pytest.raises(ValueError, match="is itself a `Qwen3MoeSparseMoeBlock`"):
        swap_blocks(block)
    holder = nn.Sequential(block)
    assert [found.name for found in swap_blocks(holder)] == ["0"]
    assert isinstance(holder[0], MoELayer)


def test_subclasses_of_a_known_block_are_known_and_everything_else_is_left_alone():
    (name,) = FAMILIES
    base = type(qwen3_moe(torch.float32).model.layers[0].mlp)
    assert f"{base.__module__}.{base.__qualname__}" == name

    class Mine(base):
        pass

    model = nn.ModuleDict({"mine": Mine(qwen3_moe(torch.float32).config), "dense": nn.Linear(2, 2)})
    dense = model["dense"]
    assert [(block.name, block.kind) for block in swap_blocks(model)] == [("mine", "Mine")]
    assert model["dense"] is dense
    assert swap_blocks(nn.Linear(2, 2)) == []


def test_layers_of_this_package_are_found_and_stay():
    layer = MoELayer(TopKRouter(8, 4, 2), GroupedExperts(4, 8, 8), SharedExperts(8, 8))
    model = nn.Sequential(nn.Linear(8, 8), layer)
    ((name, kind, found),) = swap_blocks(model)
    assert (name, kind) == ("1", "MoELayer")
    assert found is layer
    assert model[1] is layer
    assert [block.layer for block in swap_blocks(layer)] == [layer]


def shared_block(model):
    model.model.layers[1].mlp = model.model.layers[0].mlp


def own_forward(model):
    block = model.model.layers[0].mlp
    block.__class__ = type("Doubled", (type(block),), {"forward": lambda self, x: 2 * x})


def patched_forward(model):
    model.model.layers[0].mlp.forward = lambda x: x


def extra_module(model):
    model.model.layers[0].mlp.adapter = nn.Linear(16, 16)


def hook(model):
    model.model.layers[0].mlp.register_forward_hook(lambda *_: None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (shared_block, "`model.layers.0.mlp` is shared: it is `model.layers.1.mlp` too"),
        (own_forward, "`model.layers.0.mlp` .*its `forward` is another one"),
        (patched_forward, "its `forward` is another one"),
        (extra_module, "it holds 'adapter'"),
        (hook, "it has hooks"),
    ],
)
def test_what_a_swap_would_lose_is_refused(change, message):
    model = qwen3_moe(torch.float32)
    change(model)
    with pytest.raises(ValueError, match=message):
        swap_blocks(model)


def test_a_decoder_layer_that_is_used_twice_has_one_block():
    model = qwen3_moe(torch.float32)
    model.model.layers[1] = model.model.layers[0]
    assert [block.name for block in swap_blocks(model)] == ["model.layers.0.mlp"]
