"""Losses on routing, against transformers and against formulas written out token by token in float64."""

from __future__ import annotations

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from helpers.decoder import Decoder
from helpers.models import batch, computing_in, full, qwen3_moe
from helpers.processes import run
from lightning_moe import (
    ChunkedEPStrategy,
    GroupedExperts,
    MoELayer,
    RecomputePolicy,
    TopKRouter,
    load_balancing_loss,
    record_routing,
    router_z_loss,
)

SCOPES = ["batch", "sequence", "global"]


def balance_by_token(logits_TE, top_k, score_function="softmax"):
    """The formula for N tokens, one after the other."""
    num_tokens, num_experts = logits_TE.shape
    counts, sums = [0] * num_experts, [0.0] * num_experts
    for logits_E in logits_TE:
        scores_E = logits_E.exp() if score_function == "softmax" else 1 / (1 + (-logits_E).exp())
        scores_E = scores_E / scores_E.sum()
        for e in sorted(range(num_experts), key=lambda e, s=scores_E: -s[e].item())[:top_k]:
            counts[e] += 1
        sums = [total + scores_E[e] for e, total in enumerate(sums)]
    return sum(
        num_experts / (top_k * num_tokens) * count * (total / num_tokens)
        for count, total in zip(counts, sums, strict=True)
    )


def z_by_token(logits_TE):
    return sum(logits_E.exp().sum().log() ** 2 for logits_E in logits_TE) / len(logits_TE)


def make_layer(score_function="softmax", bias=False) -> MoELayer:
    torch.manual_seed(3)
    router = TopKRouter(16, 8, 3, init_std=0.7, score_function=score_function, selection_bias=bias)
    if bias:
        router.selection_bias.copy_(torch.rand(8))
    return MoELayer(router, GroupedExperts(8, 16, 8)).double()


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
@pytest.mark.parametrize("masked", [False, True])
def test_values_and_gradients_are_the_formulas(score_function, masked):
    """With a selection bias, which plays no part, and two layers, whose mean it is."""
    layers = nn.Sequential(make_layer(score_function, True), make_layer(score_function, True))
    hidden_BSH = torch.randn(3, 5, 16, dtype=torch.float64, requires_grad=True)
    mask_BS = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 1, 1, 1, 1]]) if masked else None
    kept_BS = torch.ones(3, 5, dtype=torch.bool) if mask_BS is None else mask_BS.bool()
    with record_routing(layers) as routing:
        layers(hidden_BSH)
    assert [record.name for record in routing] == ["0", "1"]
    logits = [record.routing.logits_TE.view(3, 5, 8) for record in routing]
    expected = {
        "batch": [balance_by_token(x_BSE[kept_BS], 3, score_function) for x_BSE in logits],
        "sequence": [
            sum(balance_by_token(x_SE[kept_S], 3, score_function) for x_SE, kept_S in zip(x_BSE, kept_BS, strict=True))
            / 3
            for x_BSE in logits
        ],
        "z": [z_by_token(x_BSE[kept_BS]) for x_BSE in logits],
    }
    expected["global"] = expected["batch"]  # of one process
    for name, by_layer in expected.items():
        loss = router_z_loss(routing, mask_BS) if name == "z" else load_balancing_loss(routing, name, mask_BS)
        exact = sum(by_layer) / 2
        assert loss.dtype == torch.float64
        torch.testing.assert_close(loss, exact, rtol=1e-12, atol=0.0)
        for actual, wanted in zip(
            torch.autograd.grad(loss, [hidden_BSH, layers[0].router.weight], retain_graph=True),
            torch.autograd.grad(exact, [hidden_BSH, layers[0].router.weight], retain_graph=True),
            strict=True,
        ):
            torch.testing.assert_close(actual, wanted, rtol=1e-10, atol=1e-15)
            assert wanted.abs().max() > 1e-4


@pytest.mark.parametrize("masked", [False, True])
def test_one_layer_is_transformers_over_k(masked):
    layer = make_layer().float()
    mask_BS = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]]) if masked else None
    with record_routing(layer) as routing:
        layer(torch.randn(2, 4, 16))
    logits = routing[0].routing.logits_TE
    theirs = load_balancing_loss_func((logits,), 8, 3, mask_BS)
    torch.testing.assert_close(3 * load_balancing_loss(routing, mask=mask_BS), theirs)
    assert theirs > 3


def test_even_load_gives_one_and_the_worst_e_over_k():
    layer = make_layer()
    with torch.no_grad():
        layer.router.weight.zero_()[:3, 0] = 40.0
    tokens = torch.zeros(4, 16, dtype=torch.float64)
    tokens[:, 0] = 1.0
    with record_routing(layer) as routing:
        layer(tokens)
    assert load_balancing_loss(routing).item() == pytest.approx(8 / 3)
    logits = torch.eye(8).roll(1, 0) * 30 + torch.eye(8).roll(2, 0) * 30 + torch.eye(8) * 30
    even = [routing[0]._replace(routing=routing[0].routing._replace(logits_TE=logits), shape=torch.Size([8]))]
    with torch.no_grad():  # these have no graph
        assert load_balancing_loss(even).item() == pytest.approx(1)


def test_losses_are_float32_for_bfloat16_and_zero_for_no_tokens():
    """Whatever the default dtype, which Lightning's `bf16-true` sets in forward."""
    layer = make_layer().bfloat16()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with record_routing(layer) as routing:
            layer(torch.randn(4, 300, 16))
        losses = [load_balancing_loss(routing, scope) for scope in SCOPES] + [router_z_loss(routing)]
    finally:
        torch.set_default_dtype(torch.float32)
    assert {loss.dtype for loss in losses} == {torch.float32}
    exact = balance_by_token(routing[0].routing.logits_TE.double(), 3)
    assert losses[0].item() == pytest.approx(exact.item(), rel=1e-3)  # ties in bfloat16 may go either way
    for shape in ((0, 5, 16), (2, 0, 16)):
        with record_routing(layer) as routing:
            layer(torch.randn(shape, dtype=torch.bfloat16))
        total = sum(load_balancing_loss(routing, scope) for scope in SCOPES) + router_z_loss(routing)
        total.backward()
        assert total == 0
        assert layer.router.weight.grad.count_nonzero() == 0


def test_what_a_checkpoint_around_the_layer_runs_again_is_not_recorded():
    layer, hidden = make_layer(), torch.randn(2, 5, 16, dtype=torch.float64, requires_grad=True)
    gradients = []
    for again in (False, True):
        layer.zero_grad()
        with record_routing(layer) as routing:
            out = checkpoint(layer, hidden, use_reentrant=False) if again else layer(hidden)
            (out.square().sum() + load_balancing_loss(routing)).backward()
        assert len(routing) == 1
        gradients.append(layer.router.weight.grad)
    assert torch.equal(*gradients)
    layer(hidden)
    assert len(routing) == 1, "nothing is recorded outside"


def test_a_forward_that_ran_without_a_graph_is_refused_where_a_gradient_is_wanted():
    layer, hidden = make_layer(), torch.randn(2, 5, 16, dtype=torch.float64, requires_grad=True)
    with record_routing(layer) as routing:
        checkpoint(layer, hidden, use_reentrant=True)
    for loss in (load_balancing_loss, router_z_loss):
        with pytest.raises(ValueError, match=r"recorded in training mode, but without a graph.*use_reentrant=False"):
            loss(routing)
        with torch.no_grad():
            assert loss(routing) > 0
    for without in (layer.eval(), layer.train().requires_grad_(False)):
        with record_routing(without) as routing, torch.no_grad():
            without(hidden)
        assert load_balancing_loss(routing) > 0


@pytest.mark.parametrize("loss", [load_balancing_loss, router_z_loss])
def test_what_stands_at_padding_does_not_matter(loss):
    layer, mask_BS = make_layer(), torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    with record_routing(layer) as routing:
        layer(torch.randn(2, 5, 16, dtype=torch.float64))
    (record,) = routing
    results = []
    for padding in (0.0, torch.nan, torch.inf):
        logits_TE = record.routing.logits_TE.detach().clone()
        logits_TE[8:] = padding
        logits_TE.requires_grad_()
        value = loss([record._replace(routing=record.routing._replace(logits_TE=logits_TE))], mask=mask_BS)
        results.append((value, *torch.autograd.grad(value, logits_TE)))
    for value, gradient in results:
        assert torch.equal(value, results[0][0])
        assert torch.equal(gradient, results[0][1])
        assert gradient[:8].abs().max() > 0


def test_of_sequences_it_is_the_same_however_a_batch_is_cut_into_micro_batches():
    layer, hidden = make_layer(), torch.randn(4, 5, 16, dtype=torch.float64)
    gradients = []
    for size in (4, 2, 1):
        layer.zero_grad()
        for part in hidden.split(size):
            with record_routing(layer) as routing:
                layer(part)
            ((load_balancing_loss(routing, "sequence") + router_z_loss(routing)) * size / 4).backward()
        gradients.append(layer.router.weight.grad)
    for gradient in gradients[1:]:
        torch.testing.assert_close(gradient, gradients[0], rtol=1e-11, atol=1e-14)


def test_bad_calls_are_refused():
    layer = make_layer()
    with record_routing(layer) as routing, pytest.raises(ValueError, match="Nothing was recorded"):
        load_balancing_loss(routing)
    with record_routing(layer) as routing:
        layer(torch.randn(6, 16, dtype=torch.float64))
    with pytest.raises(ValueError, match="`scope` to be one of 'batch', 'sequence', 'global' but got 'token'"):
        load_balancing_loss(routing, "token")
    with pytest.raises(ValueError, match=r"needs tokens \[B, S, H\]"):
        load_balancing_loss(routing, "sequence")
    for loss in (load_balancing_loss, router_z_loss):
        with pytest.raises(ValueError, match=r"as the batch, \[6\], but got one of shape \[2, 4\]"):
            loss(routing, mask=torch.ones(2, 4))
    with pytest.raises(ValueError, match=r"`Linear` has no MoE layer.*swap_blocks"), record_routing(nn.Linear(2, 2)):
        pass


# --- under the strategy


def losses_of(model, ids):
    """The three scopes and the z-loss, weighted so that a wrong factor on any shows."""
    with record_routing(model) as routing:
        model(ids) if isinstance(getattr(model, "module", model), Decoder) else model(input_ids=ids, use_cache=False)
    return sum(
        weight * load_balancing_loss(routing, scope) for weight, scope in zip((0.3, 0.5, 0.7), SCOPES, strict=True)
    ) + 0.01 * router_z_loss(routing)


def make(name):
    if name == "Hugging Face":
        return qwen3_moe()
    model = Decoder(dropout=0.0)
    for layer in model.layers:  # everything that a router can do
        layer.moe.router = TopKRouter(
            *(16, 8, 3),
            init_std=0.3,
            score_function="sigmoid",
            selection_bias=True,
            num_groups=4,
            top_k_groups=2,
            scaling=2.5,
        )
        layer.moe.router.selection_bias.copy_(torch.rand(8) / 4)
    return model.double()


def task(model, ids):
    return (
        model(ids).square().mean()
        if isinstance(getattr(model, "module", model), Decoder)
        else model(input_ids=ids).logits.square().mean()
    )


def sharded(name, world_size, cases):
    """Gradients of the sum with a task's loss and of the losses alone, over two micro-batches."""
    results = {}
    for ep_size, num_chunks, policy, reshard in cases:
        strategy = ChunkedEPStrategy(ep_size, num_chunks, recompute=policy, reshard_after_forward=reshard)
        fabric = Fabric(accelerator="cpu", devices=world_size, strategy=strategy, precision="64-true")
        fabric.launch()
        model = fabric.setup(make(name))
        for alone in (False, True):
            model.zero_grad()
            with computing_in(torch.float64):
                for micro in range(2):
                    with fabric.no_backward_sync(model, enabled=micro == 0):
                        ids = batch(fabric.global_rank, seed=micro)
                        loss = losses_of(model, ids) + (0 if alone else task(model, ids))
                        fabric.backward(loss / 2)
            gradients = {key: full(p.grad) for key, p in model.module.named_parameters() if p.grad is not None}
            results[ep_size, num_chunks, str(policy), reshard, alone] = gradients if fabric.global_rank == 0 else None
    return results


def plainly(name, world_size, alone):
    """All ranks' micro-batches through one plain model; `"global"` is over the ranks of a micro-batch."""
    model = make(name)
    if name == "Hugging Face":
        model.set_experts_implementation("eager")
    score_function = "softmax" if name == "Hugging Face" else "sigmoid"
    gates = [module for key, module in model.named_modules() if key.endswith((".gate", ".router"))]
    with computing_in(torch.float64):
        for micro in range(2):
            total, everywhere = 0.0, [[] for _ in gates]
            for rank in range(world_size):
                logits = []
                handles = [gate.register_forward_hook(lambda *call: logits.append(call[-1][0])) for gate in gates]  # noqa: B023
                ids = batch(rank, seed=micro)
                loss = task(model, ids)
                for handle in handles:
                    handle.remove()
                if not alone:
                    total = total + loss / world_size
                for i, x_TE in enumerate(logits):
                    everywhere[i].append(x_TE)
                    sequences = [balance_by_token(x_SE, 3, score_function) for x_SE in x_TE.view(*ids.shape, -1)]
                    parts = (
                        0.3 * balance_by_token(x_TE, 3, score_function)
                        + 0.5 * sum(sequences) / len(sequences)
                        + 0.01 * z_by_token(x_TE)
                    )
                    total = total + parts / len(gates) / world_size
            total = total + sum(
                0.7 * balance_by_token(torch.cat(parts), 3, score_function) for parts in everywhere
            ) / len(gates)
            (total / 2).backward()
    return {key: p.grad for key, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", ["Hugging Face", "own layers"])
def test_gradients_do_not_depend_on_layout_chunks_or_recompute(name):
    """Alone too: there the last layer's output has no gradient to gather parameters, and to bring outputs back, with."""
    cases = [
        (1, 2, "full", True),
        (2, 3, "selective", True),
        (2, 1, RecomputePolicy(norm=True, routed="dispatch"), False),
    ]
    results = run(sharded, 2, name, 2, cases, init=False)[0]
    for alone in (False, True):
        expected = plainly(name, 2, alone)
        for key, actual in results.items():
            if key[-1] != alone:
                continue
            weightless = {name for name, grad in expected.items() if not grad.abs().max()}
            assert actual.keys() >= expected.keys() - weightless
            for parameter, grad in actual.items():
                wanted = expected.get(parameter, torch.zeros_like(grad))
                assert (grad - wanted).norm() <= 1e-10 * max(wanted.norm(), 1e-3), (key, parameter)
