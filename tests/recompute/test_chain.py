"""A chain of parts on plain modules: what comes back, in what order, and what is kept."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from lightning_moe.recompute import Chain, Part, chain, recompute

HIDDEN = 8


class Layer(nn.Module):
    """``h = combine(x, attention(first(x)))``, then ``h + mlp(second(h))``."""

    def __init__(self, combine=torch.add) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.combine = combine
        self.first, self.second = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.attention = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Dropout(0.3), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN))
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Dropout(0.3), nn.Tanh())
        self.middle: list[StorageWeakRef] = []

    def forward(self, x: Tensor) -> Tensor:
        h = self.combine(x, self.attention(self.first(x)))
        self.middle.append(StorageWeakRef(h.untyped_storage()))
        return h + self.mlp(self.second(h))

    def chained(self) -> Layer:
        parts = [
            Part("norm", self.first, reader=self.attention),
            Part("attention", self.attention),
            Part("norm", self.second, reader=self.mlp),
        ]
        recompute(Chain(parts, self.mlp))
        return self


def reversed_sum(x, y):
    return y + x


def subtracted(x, y):
    return x - y


def scaled(x, y):
    return torch.add(x, y, alpha=0.5)


def dropped(x, y):
    return x + nn.functional.dropout(y, 0.3)


def by_way_of_a_view(x, y):
    return x + y.view_as(y)


def of_two_strangers(x, y):
    return (x * 2) + (y * 3)


def in_place(x, y):
    return y.add_(x)


COMBINE = [torch.add, reversed_sum, subtracted, scaled, dropped, by_way_of_a_view, of_two_strangers, in_place]


def tokens(seed: int = 0) -> Tensor:
    return torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def train(layer: nn.Module, x: Tensor) -> list[Tensor]:
    torch.manual_seed(1)
    layer(x * 1).square().sum().backward()
    return [x.grad, *(p.grad for p in layer.parameters())]


@pytest.mark.parametrize("combine", COMBINE, ids=lambda combine: combine.__name__)
def test_gradients_are_bitwise_those_of_the_plain_layer(combine):
    expected, actual = train(Layer(combine), tokens()), train(Layer(combine).chained(), tokens())
    assert all(map(torch.equal, actual, expected))


@pytest.mark.parametrize("combine", COMBINE, ids=lambda combine: combine.__name__)
def test_only_a_plain_sum_is_added_again(combine):
    """Whatever else becomes of the attention's output, the second norm's input is kept."""
    layer = Layer(combine).chained()
    out = layer(tokens() * 1)
    (middle,) = layer.middle
    assert middle.expired() == (combine in (torch.add, reversed_sum))
    out.sum().backward()


def count_calls(layer: Layer) -> dict[str, int]:
    """How often each linear module and norm has computed its output."""
    calls = {}

    def count(name, *_):
        calls[name] = calls.get(name, 0) + 1

    for name, module in layer.named_modules():
        if not list(module.children()) and name:
            method = module.forward
            module.forward = lambda *args, name=name, method=method: (count(name), method(*args))[1]
    return calls


def test_each_part_runs_once_more_and_the_rest_once():
    layer = Layer()
    calls = count_calls(layer)
    train(layer.chained(), tokens())
    assert calls == {
        **dict.fromkeys(("first", "second", "attention.0", "attention.1", "attention.2", "attention.3"), 2),
        **dict.fromkeys(("mlp.0", "mlp.1", "mlp.2"), 1),
    }


def test_what_nobody_reads_is_not_computed_again():
    """Where the second norm keeps its own input, nothing in backward reads the attention's output."""
    layer = Layer(dropped)
    products = []
    layer.attention[3].register_forward_hook(lambda *_: products.append(1))
    train(layer.chained(), tokens())
    assert len(products) == 1


@pytest.mark.parametrize("order", [(2, 1, 0), (1, 0, 2), (0, 2, 1)], ids=str)
def test_another_order_of_hooks_fails(order, monkeypatch):
    register = chain.register_in_order
    monkeypatch.setattr(chain, "register_in_order", lambda them, tensor: register([them[i] for i in order], tensor))
    with pytest.raises(RuntimeError, match="has to come first"):
        train(Layer().chained(), tokens())


def test_outputs_are_gone_until_backward():
    layer = Layer().chained()
    outputs = []
    for module in (layer.first, layer.attention, layer.second):
        module.register_forward_hook(lambda *call: outputs.append(call[-1]), prepend=True)
    out = layer(tokens() * 1)
    assert [output.untyped_storage().nbytes() for output in outputs] == [0, 0, 0]
    references = [StorageWeakRef(output.untyped_storage()) for output in outputs]
    outputs.clear()
    out.sum().backward()
    del out
    assert all(reference.expired() for reference in references)


@pytest.mark.parametrize("evaluate", ["eval", "no_grad", "frozen"])
def test_where_no_backward_comes_nothing_changes(evaluate):
    layer, plain = Layer(), Layer()
    calls = count_calls(layer)
    outputs = []
    layer.chained().second.register_forward_hook(lambda *call: outputs.append(call[-1]))
    x = tokens() * 1
    for each in (layer, plain):
        if evaluate == "eval":
            each.eval()
        if evaluate == "frozen":
            each.requires_grad_(False)
    if evaluate == "frozen":
        x = x.detach()
    torch.manual_seed(1)
    with torch.set_grad_enabled(evaluate != "no_grad"):
        out = layer(x)
    torch.manual_seed(1)
    assert torch.equal(out, plain(x))
    assert set(calls.values()) == {1}
    assert outputs[0].isfinite().all()


def test_a_forward_that_failed_leaves_nothing_to_the_next():
    expected, layer = train(Layer(), tokens()), Layer().chained()

    def fail(*_):
        raise KeyError("on the way")

    for module in (layer.attention, layer.second, layer.mlp):
        handle = module.register_forward_pre_hook(fail)
        with pytest.raises(KeyError):
            layer(tokens(seed=9) * 1)
        handle.remove()
    assert all(map(torch.equal, train(layer, tokens()), expected))


def test_a_layer_may_be_used_twice():
    def twice(layer):
        model = nn.Sequential(layer, layer)
        return train(model, tokens())

    assert all(map(torch.equal, twice(Layer().chained()), twice(Layer())))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_inside_a_torch_checkpoint(use_reentrant):
    class Checkpointed(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return torch_checkpoint(self.layer, x, use_reentrant=use_reentrant)

    expected = train(Layer(), tokens())
    assert all(map(torch.equal, train(Checkpointed(Layer().chained()), tokens()), expected))


def test_a_residual_goes_through_the_hooks_of_saved_tensors():
    """So that an offload of the layer's input is not undone by keeping it for the sum as well."""
    expected, layer = train(Layer(), tokens()), Layer().chained()
    inputs = []
    layer.first.register_forward_pre_hook(lambda _, args: inputs.append(StorageWeakRef(args[0].untyped_storage())))
    x = tokens()
    torch.manual_seed(1)
    with saved_tensors_hooks(lambda tensor: tensor.detach().clone(), lambda copy: copy):
        out = layer(x * 1)
    assert inputs[0].expired()
    out.square().sum().backward()
    assert all(map(torch.equal, [x.grad, *(p.grad for p in layer.parameters())], expected))


def test_a_graph_that_never_runs_backward_goes_without_the_garbage_collector():
    layer = Layer().chained()
    gc.disable()
    try:
        x = tokens() * 1
        reference, out = StorageWeakRef(x.untyped_storage()), layer(x)
        del x
        assert not reference.expired()
        del out
        assert reference.expired()
    finally:
        gc.enable()


class ScaledNorm(nn.LayerNorm):
    def forward(self, hidden, scale):
        return super().forward(hidden) * scale


@pytest.mark.parametrize("by_name", [False, True])
def test_parts_that_take_more_than_one_tensor(by_name):
    class Scaled(Layer):
        def __init__(self):
            super().__init__()
            self.first, self.second = ScaledNorm(HIDDEN), ScaledNorm(HIDDEN)

        def forward(self, x):
            scale = torch.arange(5.0)[:, None]
            given = (lambda hidden: {"hidden": hidden, "scale": scale}) if by_name else (lambda _: {})
            args = (lambda _: ()) if by_name else (lambda hidden: (hidden, scale))
            h = x + self.attention(self.first(*args(x), **given(x)))
            return h + self.mlp(self.second(*args(h), **given(h)))

    assert all(map(torch.equal, train(Scaled().chained(), tokens()), train(Scaled(), tokens())))


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_layer_whose_input_no_graph_leads_to(requires_grad):
    """There the sum is not recognized, and kept."""

    def step(layer):
        torch.manual_seed(1)
        layer(tokens().requires_grad_(requires_grad)).square().sum().backward()
        return [p.grad for p in layer.parameters()]

    assert all(map(torch.equal, step(Layer().chained()), step(Layer())))
