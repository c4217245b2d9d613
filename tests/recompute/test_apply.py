"""A recompute policy on whole models, on one process: the same gradients to the bit, and the memory that formulas say."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from transformers import DynamicCache

from helpers.decoder import Decoder
from helpers.models import batch, loss_of, qwen3_moe
from lightning_moe import RecomputePolicy, load_balancing_loss, record_routing, router_z_loss
from lightning_moe.bench.storages import kept_bytes
from lightning_moe.dispatch import LocalDispatcher
from lightning_moe.models import swap_blocks
from lightning_moe.parallel.recompute import count_parts, recompute_in_backward, refuse_recompute
from lightning_moe.recompute import chain
from lightning_moe.recompute.policy import ROUTED_MODES

POLICIES = [
    RecomputePolicy(norm=norm, attention=attention, shared_experts=shared, routed=routed)
    for norm, attention, shared, routed in itertools.product((False, True), (False, True), (False, True), ROUTED_MODES)
][1:]


def applied(model: nn.Module, policy: RecomputePolicy, num_chunks: int = 2) -> nn.Module:
    """What the strategy does with a model, but for the sharding."""
    for block in swap_blocks(model):
        block.layer.experts.distribute(LocalDispatcher(), num_chunks, policy.routed)
    recompute_in_backward([model], policy)
    return model.train()


def hugging_face(**options) -> nn.Module:
    """The middle one of three layers has no experts; attention has dropout."""
    options = {"attention_dropout": 0.2, "num_hidden_layers": 3, "mlp_only_layers": [1]} | options
    return qwen3_moe(torch.float32, **options)


def loss(model: nn.Module, rank: int) -> torch.Tensor:
    ids = batch(rank).to(next(model.parameters()).device)
    return model(ids).square().mean() if isinstance(model, Decoder) else loss_of(model, ids, rank)


def accumulated(model: nn.Module, backward_at_once: bool = True):
    """Loss and gradients of two micro-batches."""
    torch.manual_seed(5)
    losses = []
    for rank in range(2):
        losses.append(loss(model, rank))
        if backward_at_once:
            losses[-1].backward()
    if not backward_at_once:
        sum(losses).backward()
    return [value.item() for value in losses], {name: p.grad for name, p in model.named_parameters()}


def assert_same(actual, expected) -> None:
    assert actual[0] == expected[0]
    assert [name for name, grad in expected[1].items() if not torch.equal(actual[1][name], grad)] == []


@pytest.mark.parametrize("make", [hugging_face, Decoder], ids=["Hugging Face", "own layers"])
@pytest.mark.parametrize("num_chunks", [1, 2])
def test_gradients_under_every_policy_are_bitwise_those_under_none(make, num_chunks):
    expected = accumulated(applied(make(), RecomputePolicy(), num_chunks))
    for policy in POLICIES:
        assert_same(accumulated(applied(make(), policy, num_chunks)), expected)


def apart(one, other) -> float:
    """The largest distance of two gradients, beside their size."""
    pairs = [(grad.double(), other[1][name].double()) for name, grad in one[1].items()]
    return max(((a - b).norm() / b.norm().clamp(min=1e-12)).item() for a, b in pairs)


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]
)
@pytest.mark.parametrize("make", [hugging_face, Decoder], ids=["Hugging Face", "own layers"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_any_device_a_policy_changes_no_more_than_a_repetition(make, dtype, device):
    """Where repetitions are the same to the bit, so are the policies."""

    def train(policy):
        return accumulated(applied(make().to(device, dtype), RecomputePolicy.of(policy)))

    repetitions = [train("none") for _ in range(4)]
    spread = max(apart(a, b) for a, b in itertools.combinations(repetitions, 2))
    for policy in ("selective", "full", RecomputePolicy(norm=True, shared_experts=True, routed="dispatch")):
        assert apart(train(policy), repetitions[0]) <= 1.5 * spread, policy


@pytest.mark.parametrize("make", [hugging_face, Decoder], ids=["Hugging Face", "own layers"])
def test_several_forwards_before_the_first_backward(make):
    expected = accumulated(applied(make(), RecomputePolicy()), backward_at_once=False)
    for name in ("selective", "full"):
        assert_same(accumulated(applied(make(), RecomputePolicy.of(name)), backward_at_once=False), expected)


@pytest.mark.parametrize("make", [hugging_face, Decoder], ids=["Hugging Face", "own layers"])
@pytest.mark.parametrize("name", ["selective", "full"])
def test_bf16_autocast_is_bitwise_too(make, name):
    def train(policy):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return accumulated(applied(make(), RecomputePolicy.of(policy)))

    assert_same(train(name), train("none"))


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_attention_that_returns_its_weights_and_the_auxiliary_loss(implementation):
    def train(policy):
        options = {"output_router_logits": True, "router_aux_loss_coef": 0.3, "attn_implementation": implementation}
        return accumulated(applied(hugging_face(**options), RecomputePolicy.of(policy)))

    expected = train("none")
    for name in ("selective", "full"):
        assert_same(train(name), expected)


@pytest.mark.parametrize("make", [hugging_face, Decoder], ids=["Hugging Face", "own layers"])
@pytest.mark.parametrize("policy", [["norm"], ["norm", "attention"], "selective", "full"], ids=str)
def test_a_loss_on_router_logits_alone_brings_back_what_it_needs(make, policy):
    """No gradient reaches the output of the last layer, nor its experts."""

    def train(policy):
        model = applied(make(), RecomputePolicy.of(policy))
        torch.manual_seed(5)
        with record_routing(model) as routing:
            loss(model, 0)
        (load_balancing_loss(routing) + router_z_loss(routing)).backward()
        return {name: p.grad for name, p in model.named_parameters()}

    expected, actual = train("none"), train(policy)
    assert [name for name, grad in expected.items() if grad is None] == [n for n, g in actual.items() if g is None]
    assert [name for name, grad in expected.items() if grad is not None and not torch.equal(grad, actual[name])] == []
    assert any(grad is not None and ".0." in name and "norm" in name for name, grad in actual.items())


@pytest.mark.parametrize("name", ["selective", "full"])
def test_frozen_embeddings_and_frozen_experts(name):
    def train(policy):
        model = hugging_face()
        model.model.embed_tokens.requires_grad_(False)
        model.model.layers[2].mlp.experts.requires_grad_(False)
        torch.manual_seed(5)
        loss(applied(model, RecomputePolicy.of(policy)), 0).backward()
        return [p.grad for p in model.parameters() if p.requires_grad]

    assert all(map(torch.equal, train(name), train("none")))


# --- order, and what runs how often


@pytest.mark.parametrize("num_chunks", [1, 2])
def test_shared_experts_before_their_norm_fails(num_chunks, monkeypatch):
    """Both hooks are on the layer's output: norm, then shared experts."""
    register = chain.register_in_order
    policy = RecomputePolicy(norm=True, shared_experts=True)
    accumulated(applied(Decoder(), policy, num_chunks))
    monkeypatch.setattr(chain, "register_in_order", lambda them, tensor: register(them[::-1], tensor))
    model = applied(Decoder(), policy, num_chunks)
    kept = []  # someone holds the shared experts' output, so that it has to come back
    for layer in model.layers:
        layer.moe.shared_experts.register_forward_hook(lambda *call: kept.append(call[-1]))
    with pytest.raises(RuntimeError, match="has to come first"):
        accumulated(model)


@pytest.mark.parametrize("name", ["none", "selective", "full"])
@pytest.mark.parametrize("num_chunks", [1, 2])
def test_the_order_in_backward_and_what_does_not_run_again(name, num_chunks):
    """Norm, then shared experts, then their backward; the router runs once, and what makes the shared output once."""
    model, log = Decoder(layers=1), []
    layer = model.layers[0]

    def logged(what, method):
        return lambda *args, **kwargs: (log.append(what), method(*args, **kwargs))[1]

    watched = {
        "first norm": layer.first_norm,
        "attention": layer.attention,
        "second norm": layer.second_norm,
        "shared": layer.moe.shared_experts.gate_proj,
        "shared output": layer.moe.shared_experts.output_gate,
        "router": layer.moe.router,
        "experts": layer.moe.experts,
    }
    for what, module in watched.items():
        module.forward = logged(what, module.forward)
    out = applied(model, RecomputePolicy.of(name), num_chunks)(batch(0))
    assert sorted(log) == sorted(watched)
    log.clear()
    weight = layer.moe.shared_experts.gate_proj.weight
    weight.register_hook(lambda _: log.append("backward of shared"))
    out.square().mean().backward()
    again = {
        "none": ["backward of shared"],
        "selective": ["second norm", "shared", "shared output", "backward of shared", "first norm"],
        "full": ["first norm", "attention", "second norm", "shared", "shared output", "backward of shared"],
    }
    assert log == again[name]


@pytest.mark.parametrize("how", ["eval", "no_grad"])
def test_evaluation_runs_everything_once_and_frees_nothing(how):
    policy = RecomputePolicy.of("full")
    plain, model = applied(Decoder(dropout=0.0), RecomputePolicy()), applied(Decoder(dropout=0.0), policy)
    normed = []
    model.layers[0].second_norm.register_forward_hook(lambda *call: normed.append(call[-1]))
    if how == "eval":
        model.eval(), plain.eval()
    with torch.set_grad_enabled(how == "eval"):
        assert torch.equal(model(batch(0)), plain(batch(0)))
    assert normed[0].isfinite().all()
    if how == "eval":  # gradients are there all the same
        expected = torch.autograd.grad(plain(batch(0)).square().sum(), list(plain.parameters()))
        assert all(
            map(torch.equal, torch.autograd.grad(model(batch(0)).square().sum(), list(model.parameters())), expected)
        )


# --- memory


def test_discarded_outputs_and_the_sum_between_the_halves_are_gone_until_backward():
    model, references = applied(hugging_face(), RecomputePolicy.of("full")), {}

    def watch(name, _module, args, kwargs, output):
        tensors = {"in": (*args, *kwargs.values())[0], "out": output[0] if isinstance(output, tuple) else output}
        references.update({(name, end): StorageWeakRef(tensor.untyped_storage()) for end, tensor in tensors.items()})

    layer = model.model.layers[0]
    for name in ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp"):
        module = getattr(layer, name)
        module.register_forward_hook(lambda *call, name=name: watch(name, *call), with_kwargs=True, prepend=True)
    out = loss(model, 0)

    def live(name, end):
        storage = torch.UntypedStorage._new_with_weak_ptr(references[name, end].cdata)
        return storage is not None and storage.nbytes() > 0

    assert live("input_layernorm", "in")
    gone = [(name, "out") for name in ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")]
    gone.append(("post_attention_layernorm", "in"))
    assert [which for which in gone if live(*which)] == []
    out.backward()
    del out
    assert all(reference.expired() for reference in references.values())


def per_token(make, policy: RecomputePolicy, itemsize: int) -> float:
    """Elements that a layer more keeps for backward, for each token."""
    ids = torch.randint(32, (2, 32), generator=torch.Generator().manual_seed(0))

    def kept(layers):
        model = applied(make(layers), policy)
        call = {"input_ids": ids} if hasattr(model, "config") else {"ids": ids}
        return kept_bytes(lambda: model(**call), model, ids)

    return (kept(3) - kept(1)) / 2 / ids.numel() / itemsize


ROUTED = {  # FACTS: elements a token besides the layer's input
    "none": lambda h, f, k: k * (h + 3 * f),
    "act": lambda h, f, k: k * (h + 2 * f),
    "dispatch": lambda h, f, k: 2 * k * f,
    "full": lambda h, f, k: 0,
}


@pytest.mark.parametrize("policy", [RecomputePolicy(), *POLICIES], ids=str)
def test_a_hugging_face_layer_keeps_what_the_formula_says(policy):
    """In float32, where a norm keeps its input, its input's inverse length, and what it multiplies by its weight."""
    hidden, width, experts, top_k, heads, kv_heads, head_dim = 64, 48, 8, 4, 4, 2, 16
    options = {
        "hidden_size": hidden,
        "moe_intermediate_size": width,
        "num_experts_per_tok": top_k,
        "head_dim": head_dim,
    }
    options |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "num_experts": experts}
    queries, keys = heads * head_dim, kv_heads * head_dim
    expected = hidden  # the layer's input
    if not (policy.norm and policy.attention):
        expected += hidden  # the sum between its halves
    if not policy.norm:
        expected += 2 * (hidden + hidden + 1)  # normalized, output, inverse length
    if not policy.attention:  # norms of queries and keys, as above; then queries, keys, values, output, log-sum-exp
        expected += 2 * (queries + keys) + heads + kv_heads + queries + 2 * keys + queries + heads
    expected += ROUTED[policy.routed](hidden, width, top_k)
    expected += (
        experts + 5 * top_k
    )  # the router's probabilities, choice (int64) and weights; the rows' order and weights
    actual = per_token(lambda layers: qwen3_moe(torch.float32, num_hidden_layers=layers, **options), policy, 4)
    assert actual == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("policy", [RecomputePolicy(), *POLICIES], ids=str)
def test_a_layer_with_shared_experts_keeps_what_the_formula_says(policy):
    hidden, width, experts, top_k = 64, 48, 8, 4
    sizes = {"hidden": hidden, "heads": 4, "experts": experts, "top_k": top_k, "width": width, "dropout": 0.0}
    expected = hidden  # the layer's input
    if not (policy.norm and policy.attention):
        expected += hidden
    if not policy.norm:
        expected += 2 * (hidden + hidden + 1)  # normalized, output, inverse length
    if not policy.attention:
        expected += 3 * hidden + hidden + 4  # queries, keys and values; output, log-sum-exp
    if not policy.shared_experts:
        expected += 4 * width + hidden + 1  # gate, up, silu(gate), their product; the gated output and its gate
    expected += ROUTED[policy.routed](hidden, width, top_k)
    expected += experts + 6 * top_k
    actual = per_token(lambda layers: Decoder(layers, **sizes), policy, 4)
    assert actual == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("num_chunks", [1, 2])
@pytest.mark.parametrize("norm", [False, True])
def test_shared_experts_keep_no_more_than_under_torchs_checkpoint_whose_output_is_gone_too(norm, num_chunks):
    """A sum keeps none of its terms, with overlap and without: no output is left that discarding could free."""
    ids = batch(0)
    ours, torchs = Decoder(dropout=0.0), Decoder(dropout=0.0)
    for layer in torchs.layers:
        shared = layer.moe.shared_experts
        shared.forward = partial(torch_checkpoint, shared.forward, use_reentrant=False)
    policies = RecomputePolicy(norm=norm, shared_experts=True), RecomputePolicy(norm=norm)
    kept = []
    for model, policy in zip((ours, torchs), policies, strict=True):
        outputs = []
        for layer in model.layers:
            layer.moe.shared_experts.register_forward_hook(
                lambda *call, outputs=outputs: outputs.append(StorageWeakRef(call[-1].untyped_storage()))
            )
        kept.append(kept_bytes(partial(applied(model, policy, num_chunks), ids), model, ids))
        assert [output.expired() for output in outputs] == [True, True]
    assert kept[0] == kept[1]


def test_full_keeps_less_than_6_kib_a_token_at_the_width_of_qwen3_30b():
    """Whatever the experts' width; with shared experts, in bfloat16."""
    sizes = {"hidden": 2048, "heads": 16, "experts": 128, "top_k": 8, "width": 8, "dropout": 0.0}
    actual = per_token(lambda layers: Decoder(layers, **sizes).bfloat16(), RecomputePolicy.of("full"), 1)
    assert 4096 < actual < 6 * 1024


# --- what a model must be


def test_parts_are_counted_where_they_are():
    model = applied(hugging_face(), RecomputePolicy())
    assert count_parts([model], RecomputePolicy()) == {}
    assert count_parts([model], RecomputePolicy.of("full")) == {"norm": 6, "attention": 3, "shared_experts": 1}
    assert count_parts([Decoder()], RecomputePolicy.of("selective")) == {"norm": 4, "shared_experts": 2}
    assert count_parts([Decoder().layers[0].moe], RecomputePolicy.of("full")) == {
        "norm": 0,
        "attention": 0,
        "shared_experts": 1,
    }


def test_a_part_that_no_layer_has_is_refused_where_it_was_named_and_no_preset():
    model = applied(qwen3_moe(torch.float32), RecomputePolicy())
    for preset in ("none", "selective", "full"):
        refuse_recompute([model, Decoder().layers[0].moe], RecomputePolicy.of(preset))
    refuse_recompute([model], RecomputePolicy.of(["norm", "moe_act", "shared_experts"]))  # the same as "selective"
    with pytest.raises(ValueError, match="names 'shared_experts', but no decoder layer has.*leave the name out"):
        refuse_recompute([model], RecomputePolicy.of(["norm", "shared_experts"]))
    with pytest.raises(ValueError, match="names 'norm', 'attention', but.*`post_attention_layernorm`.*`decoder_parts`"):
        refuse_recompute([Decoder().layers[0].moe], RecomputePolicy.of(["norm", "attention", "shared_experts"]))


@pytest.mark.parametrize(
    "names", [{"mlp": "feed_forward"}, {"moe": "moe"}, {"self_attn": "num_heads"}], ids=["child", "part", "no module"]
)
def test_a_wrong_attribute_is_refused(names):
    model = Decoder()
    model.layers[1].decoder_parts = names
    with pytest.raises(ValueError, match="`Block.decoder_parts` maps.*'input_layernorm'.*'first_norm'"):
        refuse_recompute([model], RecomputePolicy.of("full"))


def test_a_models_own_gradient_checkpointing_is_refused():
    model = applied(hugging_face(), RecomputePolicy())
    model.gradient_checkpointing_enable()
    refuse_recompute([model], RecomputePolicy())
    for policy in (RecomputePolicy(routed="act"), RecomputePolicy.of("full")):
        with pytest.raises(ValueError, match="own gradient checkpointing is on.*gradient_checkpointing_disable"):
            refuse_recompute([model], policy)
    model.gradient_checkpointing_disable()
    refuse_recompute([model], RecomputePolicy.of("full"))


def test_the_cache_that_hugging_face_makes_in_training_does_not_matter():
    """It would be written twice: once in forward, once more in backward."""

    def train(policy, **options):
        model = applied(hugging_face(), RecomputePolicy.of(policy))
        torch.manual_seed(5)
        model(input_ids=batch(0), labels=batch(0), **options).loss.backward()
        return [p.grad for p in model.parameters()]

    expected = train("none", use_cache=False)
    assert all(map(torch.equal, train("full"), expected))
    cache = DynamicCache()
    model = applied(hugging_face(), RecomputePolicy.of("full"))
    with torch.no_grad():
        model(input_ids=batch(0), past_key_values=cache)
    assert cache.get_seq_length() == batch(0).shape[1]
    with pytest.raises(ValueError, match="`past_key_values` that hold something"):
        model(input_ids=batch(0), past_key_values=cache)
