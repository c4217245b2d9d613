"""The discard-output checkpoint beside plain torch: same gradients, less memory, and no silent misuse."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from helpers import processes
from helpers.devices import DEVICES
from lightning_moe.layers import SharedExperts
from lightning_moe.recompute import DiscardOutputCheckpoint

HIDDEN = 8


class Plain:
    """The same calls, and plain torch."""

    def checkpoint(self, fn, *args):
        return fn(*args)

    def discard_output(self):
        pass

    def register_recompute_hook(self, tensor):
        pass


class Calls:
    """Wraps a function; counts its calls, and watches the memory it uses without keeping it."""

    def __init__(self, fn, name: str = "fn", log: list[str] | None = None):
        self.fn, self.name, self.log = fn, name, [] if log is None else log
        self.made: list[StorageWeakRef] = []

    def __call__(self, *args):
        self.log.append(self.name)
        with Watch(self.made):
            return self.fn(*args)


class Watch(torch.overrides.TorchFunctionMode):
    def __init__(self, made):
        super().__init__()
        self.made = made

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.made.append(StorageWeakRef(result.untyped_storage()))
        return result


class ViewsOfInput(torch.autograd.Function):
    """A consumer that keeps a view of its input where autograd does not look."""

    @staticmethod
    def forward(ctx, x):
        ctx.view = x.detach().view(-1)
        return x.square()

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad * ctx.view.view_as(grad)


def tokens(seed: int = 0, count: int = 6, device: str = "cpu", requires_grad: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, HIDDEN, generator=generator).to(device).requires_grad_(requires_grad)


def seeded(make, *args, **options) -> Any:
    torch.manual_seed(5)
    return make(*args, **options)


def gated(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def modules() -> nn.ModuleDict:
    return seeded(
        lambda: nn.ModuleDict(
            {
                "norm": nn.RMSNorm(HIDDEN),
                "shared": SharedExperts(HIDDEN, 12, gated=True),
                "mlp": nn.Sequential(
                    nn.Linear(HIDDEN, HIDDEN), nn.Dropout(0.4), nn.Sequential(nn.Linear(HIDDEN, HIDDEN))
                ),
                "consumer": nn.Linear(HIDDEN, HIDDEN),
                "narrow": nn.Linear(HIDDEN // 2, HIDDEN),
            }
        )
    )


def gradients(x: Tensor, model: nn.Module) -> list[Tensor | None]:
    return [None if t.grad is None else t.grad.clone() for t in (x, *model.parameters())]


def assert_bitwise(actual, expected) -> None:
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)


def gone(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() == 0


# Each takes a checkpoint, modules and tokens, and returns the result and the outputs that were discarded.


def norm_before_linear(c, m, x):
    y = c.checkpoint(m["norm"], x)
    out = m["consumer"](y)
    return finish(c, out, y)


def activation_before_linear(c, m, x):
    y = c.checkpoint(gated, x)
    return finish(c, m["narrow"](y), y)


def shared_experts_added(c, m, x):
    y = c.checkpoint(m["shared"], x)
    return finish(c, x * 2 + y, y)


def shared_experts_multiplied(c, m, x):
    y = c.checkpoint(m["shared"], x)
    return finish(c, x * y, y)


def nested_modules_with_dropout(c, m, x):
    y = c.checkpoint(m["mlp"], x)
    return finish(c, m["consumer"](y), y)


def an_output_that_its_own_backward_reads(c, m, x):
    y = c.checkpoint(lambda x: m["norm"](x).softmax(-1), x)
    return finish(c, m["consumer"](y), y)


def consumers_that_save_views(c, m, x):
    y = c.checkpoint(m["norm"], x)
    out = (
        m["consumer"](y.view(2, -1, HIDDEN)).view_as(x) + ViewsOfInput.apply(y.flip(0).flip(0)) + ViewsOfInput.apply(y)
    )
    return finish(c, out, y)


def two_outputs_in_one_storage(c, m, x):
    y, z = c.checkpoint(lambda x: m["shared"](x).chunk(2, -1), x)
    return finish(c, m["narrow"](y) * m["narrow"](z), y, z)


def a_result_of_many_kinds(c, m, x):
    y, (mask, nothing), number, constant = c.checkpoint(
        lambda x, scale, options: (m["norm"](x) * scale, (x > 0, None), 3, x.detach().cos()), x, 1.5, {"a": [x]}
    )
    assert nothing is None
    assert number == 3
    assert not mask.requires_grad
    assert not constant.requires_grad
    return finish(c, m["consumer"](y * mask) * constant, y, mask, constant)


def arguments_without_gradient(c, m, x):
    y = c.checkpoint(m["mlp"], x.detach())
    return finish(c, x * y, y)


def a_tensor_from_outside(c, m, x):
    scale = x.sigmoid()
    y = c.checkpoint(lambda t: m["norm"](t) * scale, x)
    return finish(c, m["consumer"](y), y)


def finish(c, out, *outputs):
    c.discard_output()
    c.register_recompute_hook(out)
    return out, outputs


CASES = [
    norm_before_linear,
    activation_before_linear,
    shared_experts_added,
    shared_experts_multiplied,
    nested_modules_with_dropout,
    an_output_that_its_own_backward_reads,
    consumers_that_save_views,
    two_outputs_in_one_storage,
    a_result_of_many_kinds,
    arguments_without_gradient,
    a_tensor_from_outside,
]


def train(case, kind, x: Tensor, backward=lambda out: out.square().sum().backward()) -> tuple[Any, ...]:
    model = modules().to(x.device)
    torch.manual_seed(11)
    out, outputs = case(kind(), model, x)
    if kind is DiscardOutputCheckpoint:
        assert all(gone(y) for y in outputs)
    value, _ = (
        out.detach().clone(),
        torch.rand(3, device=x.device),
    )  # forward and backward do not meet at one random state
    backward(out)
    if kind is DiscardOutputCheckpoint:
        assert not any(gone(y) for y in outputs if y.numel())
        assert all(type(y) is Tensor for y in outputs)
    return value, gradients(x, model), torch.rand(3, device=x.device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_result_gradients_and_random_state_are_those_of_plain_torch(case, device):
    """Bitwise, in float32; outputs are gone between forward and backward, and there again after."""
    value, grads, after = train(case, DiscardOutputCheckpoint, tokens(device=device))
    plain_value, plain_grads, plain_after = train(case, Plain, tokens(device=device))
    assert torch.equal(value, plain_value)
    assert torch.equal(after, plain_after)
    assert_bitwise(grads, plain_grads)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_zero_tokens(case):
    grads = train(case, DiscardOutputCheckpoint, tokens(count=0), lambda out: out.sum().backward())
    plain = train(case, Plain, tokens(count=0), lambda out: out.sum().backward())
    assert_bitwise(grads[1], plain[1])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_bf16_autocast(case, device):
    """The recomputation runs in backward, outside autocast, yet as forward did; and no autocast reaches it from outside."""

    def step(kind, during_backward):
        x, model = tokens(device=device), modules().to(device)
        torch.manual_seed(11)
        with torch.autocast(device, torch.bfloat16):
            out, _ = case(kind(), model, x)
        with torch.autocast(device, torch.bfloat16, enabled=during_backward):
            out.float().square().sum().backward()
        return gradients(x, model)

    for during_backward in (False, True):
        assert_bitwise(step(DiscardOutputCheckpoint, during_backward), step(Plain, during_backward))


def test_float32_region_is_not_recomputed_under_the_autocast_of_backward():
    dtypes = []

    def fn(x):
        dtypes.append((torch.is_autocast_enabled("cpu"), F.linear(x, x).dtype))
        return x * 2

    c, x = DiscardOutputCheckpoint(), tokens()
    out, _ = finish(c, c.checkpoint(fn, x).square())
    with torch.autocast("cpu", torch.bfloat16):
        out.sum().backward()
    assert dtypes == [(False, torch.float32)] * 2


def test_nothing_of_the_region_stays_in_memory_but_its_arguments():
    model, x, inside = modules(), tokens(), Calls(lambda t: gated(model["mlp"](t)))
    c = DiscardOutputCheckpoint()
    y = c.checkpoint(inside, x)
    made = len(inside.made)
    assert made >= 5
    out = y * 1.0
    square = y.view(-1).square()  # saves a view
    c.discard_output()
    c.register_recompute_hook(out)
    storage = y.untyped_storage()
    del y
    assert all(made.expired() for made in inside.made if made != StorageWeakRef(storage))
    assert storage.nbytes() == 0
    assert storage.data_ptr() == 0
    c.register_recompute_hook(total := out.sum() + square.sum())
    total.backward()
    assert len(inside.made) == 2 * made


def test_backward_lets_everything_go_as_plain_autograd_does():
    """Though the hook's tensor, the output and the checkpoint live on."""
    inside = Calls(lambda t: t.exp().square().sin())
    c = DiscardOutputCheckpoint()
    argument = tokens() * 2
    y = c.checkpoint(inside, argument)
    out, _ = finish(c, y.square())
    alive = weakref.ref(argument)
    del argument
    assert alive() is not None
    out.sum().backward()
    assert alive() is None
    kept = [StorageWeakRef(t.untyped_storage()) for t in (y, out)]
    assert all(made.expired() for made in inside.made if made not in kept)


def test_a_graph_that_never_runs_backward_is_freed_without_the_garbage_collector():
    gc.collect()
    gc.disable()
    try:
        c = DiscardOutputCheckpoint()
        argument = tokens() * 2
        y = c.checkpoint(lambda t: t.exp().softmax(-1), argument)
        out, _ = finish(c, y.square())
        alive = [weakref.ref(argument), weakref.ref(y), weakref.ref(y.grad_fn)]
        del argument, y, out, c
        assert [a() for a in alive] == [None] * 3
    finally:
        gc.enable()


def recomputed_output_pointers(keep_output: bool):
    pointers, kept = [], []

    def fn(t):
        y = t.sin()
        pointers.append(y.data_ptr())
        if keep_output:
            kept.append(y.detach())
        return y

    c, x = DiscardOutputCheckpoint(), tokens()
    y = c.checkpoint(fn, x)
    kept.clear()
    finish(c, y.square())[0].sum().backward()
    return x, y, pointers, kept


@pytest.mark.skipif(not hasattr(torch.UntypedStorage, "_swap_data_ptr_"), reason="this torch can only copy")
def test_memory_is_moved_not_copied():
    x, y, pointers, _ = recomputed_output_pointers(keep_output=False)
    assert y.data_ptr() == pointers[1]
    assert torch.equal(y, x.sin())


def test_memory_that_someone_else_holds_is_copied():
    x, y, pointers, kept = recomputed_output_pointers(keep_output=True)
    assert y.data_ptr() != pointers[1] == kept[0].data_ptr()
    assert torch.equal(y, x.sin())
    assert torch.equal(kept[0], x.sin())


def test_memory_is_copied_where_torch_cannot_move_it(monkeypatch):
    monkeypatch.setattr(torch.UntypedStorage, "_swap_data_ptr_", None, raising=False)
    x, y, _, _ = recomputed_output_pointers(keep_output=False)
    assert torch.equal(y, x.sin())
    assert torch.equal(x.grad, 2 * x.sin() * x.cos())


def test_outputs_that_alias_something_outside_are_kept():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = nn.Parameter(torch.randn(6, HIDDEN))
            self.register_buffer("table", torch.randn(6, HIDDEN))

        def forward(self, x, residual):
            return x + residual, residual.view(-1), self.bias[:3], self.table.T, x

    for fn in (layer := seeded(Layer), layer.forward):
        x, residual = tokens(1), tokens(2) * 1
        c = DiscardOutputCheckpoint()
        fresh, *aliases = c.checkpoint(fn, x, residual)
        out = fresh.square().sum() + aliases[0].square().sum() + aliases[1].square().sum() + aliases[3].square().sum()
        out, _ = finish(c, out)
        assert gone(fresh)
        assert not any(gone(t) for t in (*aliases, residual, x, layer.bias, layer.table))
        layer.zero_grad()
        out.backward()
        assert torch.equal(x.grad, 2 * (x + residual) + 2 * x)
        assert torch.equal(layer.bias.grad[:3], 2 * layer.bias[:3])


def test_more_hooks_and_discards_than_needed_do_no_harm():
    c, x, calls = DiscardOutputCheckpoint(), tokens(), Calls(torch.sin)
    y = c.checkpoint(calls, x)
    squares = y.square()
    out = squares * 3
    for _ in range(2):
        c.discard_output()
        c.register_recompute_hook(out)
        c.register_recompute_hook(squares)
        c.register_recompute_hook(y)
    out.sum().backward()
    assert calls.log == ["fn"] * 2
    torch.testing.assert_close(x.grad, 6 * x.sin() * x.cos())


def test_without_a_hook_the_regions_own_backward_rebuilds():
    model, x, calls = modules(), tokens(), None
    grads = []
    for kind in (DiscardOutputCheckpoint, Plain):
        x.grad = None
        model.zero_grad()
        c, calls = kind(), Calls(model["shared"])
        y = c.checkpoint(calls, x)
        out = x * 2 + y
        c.discard_output()
        out.square().sum().backward()
        grads.append(gradients(x, model))
        assert len(calls.log) == (2 if kind is DiscardOutputCheckpoint else 1)
        assert torch.equal(y, model["shared"](x))
    assert_bitwise(*grads)


@pytest.mark.parametrize("reader", ["nobody", "caller", "consumer"])
@pytest.mark.parametrize("hooked", [False, True])
def test_an_output_that_nobody_reads_is_not_computed_again(reader, hooked):
    """A sum keeps none of its terms: backward then needs what the function saved, and not what it computes after that."""

    def train_sum(c, log):
        x, shared = tokens(), seeded(SharedExperts, HIDDEN, 12)
        shared.down_proj.register_forward_hook(lambda *_: log.append("down"))
        y = c.checkpoint(shared, x)
        out = x + y if reader != "consumer" else x + y * y
        c.discard_output()
        if hooked or reader == "consumer":
            c.register_recompute_hook(out)
        held = y if reader == "caller" else None
        del y
        out.square().sum().backward()
        return gradients(x, shared), held

    log: list[str] = []
    actual, held = train_sum(DiscardOutputCheckpoint(), log)
    expected, value = train_sum(Plain(), [])
    assert_bitwise(actual, expected)
    assert held is None or torch.equal(held, value)
    assert len(log) == (1 if reader == "nobody" else 2)


def test_without_discarding_it_is_an_ordinary_checkpoint():
    c, x, calls = DiscardOutputCheckpoint(), tokens(), Calls(lambda t: t.sin().sin())
    c.checkpoint(calls, x).square().sum().backward()
    assert len(calls.log) == 2
    reference = tokens()
    reference.sin().sin().square().sum().backward()
    assert torch.equal(x.grad, reference.grad)


@pytest.mark.parametrize("why", ["no_grad", "inference_mode", "eval", "method of eval", "frozen"])
def test_where_no_backward_comes_nothing_is_freed_and_nothing_saved_for_later(why):
    model, x = modules(), tokens(requires_grad=False)
    norm = model["norm"].requires_grad_(why != "frozen").train("eval" not in why)
    c = DiscardOutputCheckpoint()
    with (
        torch.inference_mode(why == "inference_mode"),
        torch.set_grad_enabled(why not in ("no_grad", "inference_mode")),
    ):
        y = c.checkpoint(norm.forward if why == "method of eval" else norm, x)
        out = torch.zeros(())  # requires no gradient, which is no error here
        c.discard_output()
        c.register_recompute_hook(out)
    assert torch.equal(y, norm(x))
    assert type(y) is Tensor


def test_an_eval_module_still_gets_its_gradients():
    model, x = modules(), tokens()
    out, (y,) = norm_before_linear(DiscardOutputCheckpoint(), model.eval(), x)
    assert not gone(y)
    out.sum().backward()
    assert x.grad is not None


def test_a_hook_tensor_that_needs_no_gradient_is_refused():
    c = DiscardOutputCheckpoint()
    c.checkpoint(torch.sin, tokens())
    with pytest.raises(
        ValueError,
        match=r"Expected argument `tensor` of `register_recompute_hook` to be computed from what requires a gradient",
    ):
        c.register_recompute_hook(torch.zeros(3))


@pytest.mark.parametrize("call", [lambda c: c.discard_output(), lambda c: c.register_recompute_hook(tokens())])
def test_discarding_what_was_never_made_is_refused(call):
    with pytest.raises(RuntimeError, match=r"call `DiscardOutputCheckpoint.checkpoint\(fn, \*args\)` first"):
        call(DiscardOutputCheckpoint())


def discarded() -> Tensor:
    c = DiscardOutputCheckpoint()
    y = c.checkpoint(torch.sin, tokens())
    c.discard_output()
    return y


@pytest.mark.parametrize(
    "read",
    [
        lambda y: y + 1,
        lambda y: torch.zeros(6, HIDDEN) + y,
        lambda y: y.view(-1),
        lambda y: y.detach(),
        lambda y: y.T,
        lambda y: y.data,
        lambda y: y.data_ptr(),
        lambda y: y[0],
        lambda y: y.add_(1),
        lambda y: y.sum().item(),
        lambda y: y.numpy(),
        lambda y: nn.Linear(HIDDEN, HIDDEN)(y),
        lambda y: ViewsOfInput.apply(y),
        lambda y: DiscardOutputCheckpoint().checkpoint(torch.cos, y),
    ],
)
def test_reading_a_discarded_output_in_forward_is_an_error(read):
    """That is what becomes of freeing too early: before the consumer has run."""
    with pytest.raises(RuntimeError, match=r"reads an output that has been discarded. Call `discard_output\(\)` after"):
        read(discarded())


def test_a_discarded_output_can_be_described():
    y = discarded()
    assert (y.shape, y.size(0), y.dtype, y.device.type, y.stride()) == ((6, 8), 6, torch.float32, "cpu", (8, 1))
    assert y.requires_grad
    assert y.grad_fn is not None
    assert isinstance(y, Tensor)
    assert repr(y) == "<discarded output of shape (6, 8)>"


@pytest.mark.parametrize("view", [lambda y: y, lambda y: y.view(-1), lambda y: y[2:].T])
def test_a_consumer_whose_backward_no_hook_precedes_fails(view):
    """Or whose hook comes too late: both read freed memory, were it not noticed."""
    for late in (False, True):
        c, x = DiscardOutputCheckpoint(), tokens()
        y = c.checkpoint(torch.sin, x)
        out = view(y).square()
        c.discard_output()
        if late:
            c.register_recompute_hook(y)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def layer(kinds, model, x, hooks=("norm", "shared"), log=None):
    """A layer's second half: the shared experts read what the norm made, and the norm's output is discarded too."""
    norm, shared = kinds
    run = {name: model[name] if log is None else Calls(model[name], name, log) for name in ("norm", "shared")}
    normed = norm.checkpoint(run["norm"], x)
    routed = model["mlp"](normed)
    y = shared.checkpoint(run["shared"], normed)
    out = x + routed + y
    shared.discard_output()
    norm.discard_output()
    for name in hooks:
        {"norm": norm, "shared": shared}[name].register_recompute_hook(out)
    return out


def test_hooks_on_one_tensor_run_in_the_order_of_registration():
    """Norm, then shared experts, whose argument is the norm's output."""
    results = []
    for kind in (DiscardOutputCheckpoint, Plain):
        model, x, log = modules(), tokens(), []
        torch.manual_seed(3)
        layer((kind(), kind()), model, x, log=log).square().sum().backward()
        results.append(gradients(x, model))
        assert log == ["norm", "shared"] * (2 if kind is DiscardOutputCheckpoint else 1)
    assert_bitwise(*results)


@pytest.mark.parametrize("hooks", [("shared", "norm"), ("shared",)])
@pytest.mark.parametrize("saved_by_hooks", [False, True])
def test_a_broken_order_of_hooks_fails(hooks, saved_by_hooks):
    """Also where saved tensors pass through someone's hooks, and autograd does not compare versions."""
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t) if saved_by_hooks else torch.enable_grad():
        out = layer((DiscardOutputCheckpoint(), DiscardOutputCheckpoint()), modules(), tokens(), hooks)
    with pytest.raises(RuntimeError, match=r"cannot be run again.*`register_recompute_hook` has to come first"):
        out.sum().backward()


def test_gradient_accumulation_with_one_checkpoint_and_all_forwards_first():
    results = []
    for kind in (DiscardOutputCheckpoint, Plain):
        model, x, c = modules(), tokens(), kind()
        torch.manual_seed(3)
        outs = []
        for i in range(3):
            y = c.checkpoint(model["mlp"], x * (i + 1))
            outs.append(finish(c, model["consumer"](y))[0])
        for out in outs:
            out.square().sum().backward()
        results.append(gradients(x, model))
    assert_bitwise(*results)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_second_backward_through_a_retained_graph_recomputes_again(case):
    def twice(out):
        out.square().sum().backward(retain_graph=True)
        out.square().sum().backward(retain_graph=True)
        out.square().sum().backward()

    assert_bitwise(train(case, DiscardOutputCheckpoint, tokens(), twice)[1], train(case, Plain, tokens(), twice)[1])


def test_a_second_backward_through_a_freed_graph_is_autograds_error():
    c, x = DiscardOutputCheckpoint(), tokens()
    out, _ = finish(c, c.checkpoint(torch.sin, x) + x)
    out.sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        out.sum().backward()


def test_autograd_grad_and_second_derivatives():
    results = []
    for kind in (DiscardOutputCheckpoint, Plain):
        c, x = kind(), tokens().double().detach().requires_grad_()
        y = c.checkpoint(lambda t: t.sin() * t.exp(), x)
        out, _ = finish(c, y.pow(3))
        (first,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        results.append((first.detach(), second))
    assert_bitwise(*results)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_inside_a_torch_checkpoint(case, use_reentrant):
    """Whose recomputation frees nothing, since its own graph runs no hook."""

    def step(kind):
        x, model = tokens(), modules()
        torch.manual_seed(11)
        out = torch_checkpoint(lambda x: case(kind(), model, x)[0], x, use_reentrant=use_reentrant)
        out.square().sum().backward()
        return gradients(x, model)

    assert_bitwise(step(DiscardOutputCheckpoint), step(Plain))


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_around_another_checkpoint(case, use_reentrant):
    """Around one of its own kind, and around torch's."""

    def step(kind):
        x, model = tokens(), modules()
        torch.manual_seed(11)

        def fn(x):
            inner, _ = case(kind(), model, x)
            return torch_checkpoint(model["shared"], inner, use_reentrant=use_reentrant)

        c = kind()
        y = c.checkpoint(fn, x)
        finish(c, model["consumer"](y))[0].square().sum().backward()
        return gradients(x, model)

    assert_bitwise(step(DiscardOutputCheckpoint), step(Plain))


def test_under_saved_tensor_hooks_that_offload():
    results = []
    for kind in (DiscardOutputCheckpoint, Plain):
        model, x = modules(), tokens()
        with torch.autograd.graph.save_on_cpu():
            torch.manual_seed(3)
            out = layer((kind(), kind()), model, x)
        out.square().sum().backward()
        results.append(gradients(x, model))
    assert_bitwise(*results)


def test_a_function_that_changes_its_argument_is_refused():
    with pytest.raises(RuntimeError, match="changed an argument in place"):
        DiscardOutputCheckpoint().checkpoint(lambda t: t.mul_(2).sin(), tokens() * 1)


def test_an_argument_changed_in_place_afterwards_is_noticed():
    c, argument = DiscardOutputCheckpoint(), tokens() * 1
    out = c.checkpoint(lambda t: t.sin().cos(), argument)
    argument.mul_(2)
    with pytest.raises(RuntimeError, match="cannot be run again without its arguments"):
        out.sum().backward()


def test_an_output_changed_in_place_is_not_discarded():
    c, x = DiscardOutputCheckpoint(), tokens()
    y = c.checkpoint(lambda t: t * 2, x)
    y.add_(1)
    with pytest.raises(RuntimeError, match=r"The output of .* was changed in place"):
        c.discard_output()
    y.square().sum().backward()
    assert torch.equal(x.grad, 4 * (2 * x + 1))


@pytest.mark.parametrize(
    "second", [lambda t: t[:2].sin(), lambda t: t.double().sin(), lambda t: t.sin().sin(), lambda t: t * 2]
)
def test_a_function_that_does_something_else_the_second_time_is_noticed(second):
    calls = iter([torch.sin, second])
    c, x = DiscardOutputCheckpoint(), tokens()
    out, _ = finish(c, c.checkpoint(lambda t: next(calls)(t), x).square())
    with pytest.raises(RuntimeError, match="run again in backward, did not do the same"):
        out.sum().backward()


def test_a_tensor_that_leaves_by_the_back_door_is_noticed():
    leaked = []

    def fn(t):
        leaked.append(t.sin())
        return leaked[0] * 2

    DiscardOutputCheckpoint().checkpoint(fn, tokens())
    with pytest.raises(RuntimeError, match="left it other than as a result"):
        leaked[0].sum().backward()


def test_an_error_in_the_recomputation_leaves_the_random_state_alone():
    calls = iter([torch.sin, lambda t: (torch.rand(9), 1 / 0)])
    c = DiscardOutputCheckpoint()
    out, _ = finish(c, c.checkpoint(lambda t: next(calls)(t), tokens()).square())
    torch.manual_seed(7)
    with pytest.raises(ZeroDivisionError):
        out.sum().backward()
    after = torch.rand(3)
    torch.manual_seed(7)
    assert torch.equal(after, torch.rand(3))


class Block(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.parts = modules()

    def forward(self, x):
        return layer((self.kind(), self.kind()), self.parts, x)


def fsdp_training(kind, shard_the_region: bool):
    model = nn.Sequential(Block(kind), Block(kind))
    mesh = init_device_mesh("cpu", (2,))
    for block in model:
        if shard_the_region:
            fully_shard(block.parts["shared"], mesh=mesh, reshard_after_forward=True)
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    values = []
    for step in range(3):
        torch.manual_seed(step)
        loss = model(tokens(10 * mesh.get_rank() + step, requires_grad=False)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        values.append(loss.detach())
    return [*values, *(p.to_local() for p in model.parameters())]


def compare_fsdp():
    for shard_the_region in (False, True):
        assert_bitwise(fsdp_training(DiscardOutputCheckpoint, shard_the_region), fsdp_training(Plain, shard_the_region))


def test_fsdp_shards_and_reshards_the_parameters_inside():
    """Those of a region's module, and a region that is itself an FSDP unit."""
    processes.run(compare_fsdp, 2)


def dtensor_step(kind):
    mesh = init_device_mesh("cpu", (2,))
    weight = nn.Parameter(distribute_tensor(tokens(1, HIDDEN).detach(), mesh, [Shard(0)]))
    x, c = tokens(), kind()

    def columns(t):
        return F.silu(F.linear(DTensor.from_local(t, mesh, [Replicate()]), weight))

    def gathered(t):
        return columns(t).full_tensor()

    y = c.checkpoint(gathered, x)
    out, _ = finish(c, y.square())
    if kind is DiscardOutputCheckpoint:
        assert gone(y)
    out.sum().backward()

    c = kind()
    z = c.checkpoint(columns, x)  # a DTensor goes out: kept, and right
    out, _ = finish(c, z.square().full_tensor())
    out.sum().backward()
    return [x.grad, weight.grad.to_local()]


def compare_dtensor():
    assert_bitwise(dtensor_step(DiscardOutputCheckpoint), dtensor_step(Plain))


def test_dtensor_parameters_and_outputs():
    processes.run(compare_dtensor, 2)
