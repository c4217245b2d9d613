"""Offloaded activations beside plain torch: the same gradients to the bit, less memory, and nothing left behind."""

from __future__ import annotations

import gc
import random
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from helpers.decoder import Decoder
from helpers.devices import DEVICES
from helpers.lanes import CountingLane, LateLane, LateTicket, SleepingLane
from lightning_moe.dispatch import LocalDispatcher
from lightning_moe.offload import ActivationOffloader, activations
from lightning_moe.offload.copies import CopyLane, HostPool, empty_host_cache
from lightning_moe.offload.parcel import Lanes, Parcel
from lightning_moe.overlap.kept import KEPT
from lightning_moe.parallel.recompute import recompute_in_backward
from lightning_moe.recompute import DiscardOutputCheckpoint, RecomputePolicy

HIDDEN = 16


class Layer(nn.Module):
    """Saves a view of an input twice, an output, a mask, and three views of one storage."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 3 * width), nn.Linear(width, HIDDEN)

    def forward(self, x):
        a, b, c = self.up(self.norm(x)).chunk(3, -1)
        return x + F.dropout(self.down(a.tanh() * b.sigmoid() * c), 0.2)


class Stack(nn.Module):
    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for width in widths)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture
def counting(monkeypatch):
    """The lanes that are made: out, then back."""
    lanes: list[CountingLane] = []

    def make(device):
        lanes.append(CountingLane(device))
        return lanes[-1]

    monkeypatch.setattr(activations, "CopyLane", make)
    return lanes


# --- no stale read


def train_at_random(model: nn.Module, device: str, choose: random.Random, offloader=None) -> list:
    """Steps of different shape and order; what is drawn does not depend on the offloader."""
    result = []
    for step in range(12):
        torch.manual_seed(step)
        model.zero_grad()
        if offloader is not None and step == 6:  # between two steps it may go and come back
            offloader.detach()
            offloader.attach(model)
        graphs = []
        for _ in range(choose.randint(1, 3)):
            x = torch.randn(choose.randint(1, 40), HIDDEN).to(device).requires_grad_()
            graphs.append((x, model(x).square().sum()))
        choose.shuffle(graphs)
        without_backward = [graphs.pop()] if choose.random() < 0.3 else []
        for x, loss in graphs:
            if choose.random() < 0.3:
                loss.backward(retain_graph=True)
            loss.backward()
            result.append(x.grad)
        del graphs, without_backward
        result += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return result


@pytest.mark.parametrize("device", DEVICES)
def test_no_stale_read_however_late_copies_come(device, monkeypatch):
    monkeypatch.setattr(activations, "CopyLane", LateLane if device == "cpu" else SleepingLane)
    monkeypatch.setattr(LateLane, "freed_too_early", 0)
    random.seed(0)
    for trial in range(8):
        choose = random.Random(trial)
        torch.manual_seed(trial)
        model = Stack([choose.randint(1, 60) for _ in range(5)]).to(device)
        expected = train_at_random(model, device, random.Random(trial))
        offloader = ActivationOffloader(None, choose.choice([0, 2000]), choose.randint(0, 3), choose.choice([0.4, 1.0]))
        with offloader.attached(model):
            actual = train_at_random(model, device, random.Random(trial), offloader)
        assert offloader.moved_bytes > 0
        assert len(actual) == len(expected)
        assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True)), f"trial {trial}"
    assert LateLane.freed_too_early == 0


def test_every_copy_waits_for_the_one_before_it_on_the_same_host_memory():
    waited_for: dict[str, list] = {"out": [], "back": []}

    class Lane(CopyLane):
        def __init__(self, name):
            super().__init__(torch.device("cpu"))
            self.name = name

        def copy(self, target, source, after=None):
            waited_for[self.name].append(after)
            return super().copy(target, source, after)

    lanes = Lanes(Lane("out"), Lane("back"), HostPool(pinned=False))
    last = None
    for _ in range(3):
        parcel = Parcel(torch.ones(3), lanes, 0)
        parcel.let_go()
        parcel.load()
        assert waited_for["out"].pop() is last
        assert waited_for["back"].pop() is parcel.out
        last = parcel._loaded[1]
        del parcel
        assert lanes.pool.free_bytes() == 16


# --- what is moved


def moved_by(counting, model, x, **options) -> list[int]:
    """Sizes of what one forward and backward move."""
    with ActivationOffloader(min_bytes=0, **options).attached(model):
        model(x).sum().backward()
        return sorted(counting[0].sizes)


class Odd(nn.Module):
    """Saves, in float32: its input (a leaf), a weight, a buffer, a storage by three views, and a small one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.register_buffer("table", torch.randn(8))

    def forward(self, x):
        y = x @ self.weight  # saves x and the weight
        y = y * self.table  # saves the table (and not y)
        a, b = y.chunk(2, -1)  # y, twice
        return (a * b).sum(-1, keepdim=True).square()  # and the small sum


def test_each_storage_moves_once_and_what_would_free_nothing_stays(counting):
    model, leaf = Odd(), torch.randn(10, 8, requires_grad=True)
    assert moved_by(counting, model, leaf, modules=[""]) == [40, 320]
    counting.clear()
    assert moved_by(counting, model, leaf * 1, modules=[""]) == [40, 320, 320]
    counting.clear()
    shared = (leaf * 1).detach().share_memory_()
    assert moved_by(counting, model, shared, modules=[""]) == [40, 320]
    counting.clear()
    with ActivationOffloader([""], min_bytes=41).attached(model):
        model(leaf).sum().backward()
    assert counting[0].sizes == [320]


@pytest.mark.parametrize(("fraction", "expected"), [(0, 0), (0.25, 2), (0.5, 4), (1, 8)])
def test_a_fraction_is_spread_evenly(counting, fraction, expected):
    model = nn.ModuleDict({"layers": nn.ModuleList(nn.Tanh() for _ in range(8)), "head": nn.Linear(4, 4)})
    with ActivationOffloader(min_bytes=0, fraction=fraction).attached(model):
        for _ in range(2):
            x = torch.randn(3, 4, requires_grad=True)
            for layer in model["layers"]:
                x = layer(x)
            x.sum().backward()
    assert len(counting[0].sizes) == 2 * expected


def test_memory_goes_in_forward_and_comes_one_layer_ahead(counting):
    model = Stack([64] * 8)
    made: list[StorageWeakRef] = []
    for layer in model.layers:
        layer.up.register_forward_hook(lambda _m, _a, out: made.append(StorageWeakRef(out.untyped_storage())))
    with ActivationOffloader(min_bytes=0).attached(model):
        loss = model(torch.randn(32, HIDDEN, requires_grad=True)).sum()
        assert [ref.expired() for ref in made] == [True] * 8
        out, back = counting
        layer_bytes = sum(out.sizes) / 8
        loss.backward()
    assert sorted(back.sizes) == sorted(out.sizes)
    biggest = max(out.sizes)
    assert layer_bytes - biggest < back.most <= layer_bytes + 2 * biggest  # one layer ahead, beside what is read


def reloaded_before_the_first_layer(counting, drops: bool) -> tuple[int, int]:
    """Bytes that have come back, or are on their way, when backward reaches the first layer; and in the end."""
    model, back = Stack([64] * 4), []
    statistic = nn.Linear(HIDDEN, HIDDEN)

    def record(_):
        back.append(sum(counting[1].sizes))

    counting.clear()
    with ActivationOffloader(min_bytes=0, prefetch=1).attached(model):
        for layer in model.layers if drops else ():
            layer.up.register_forward_pre_hook(lambda _m, args: statistic(args[0]).exp().sum() and None)
        x = model.layers[0](torch.randn(32, HIDDEN, requires_grad=True))
        x.register_hook(record)
        for layer in model.layers[1:]:
            x = layer(x)
        x.sum().backward()
        record(None)
        assert len(counting[0].sizes) > (8 if drops else 4) * 3
    return back[0], back[1]


def test_what_a_dropped_branch_saved_does_not_end_prefetching(counting):
    expected = reloaded_before_the_first_layer(counting, drops=False)
    assert expected[0] == expected[1] > 0
    assert reloaded_before_the_first_layer(counting, drops=True) == expected


def test_what_is_dropped_is_forgotten():
    model, x = Stack([8, 8]), torch.randn(4, HIDDEN, requires_grad=True)
    offloader = ActivationOffloader(min_bytes=0)
    with offloader.attached(model):
        kept = model(x).sum()
        alive = len(offloader._attached[0].traffic._sent)
        for _ in range(20):
            model(x)
        assert alive < len(offloader._attached[0].traffic._sent) < 6 * alive
        kept.backward()


def test_what_has_left_by_the_end_of_a_call_is_free(monkeypatch):
    asked = []

    class Ticket:
        def wait(self):
            pass

        finish = wait

        def done(self):
            asked.append(self)
            return len(asked) > 1

    class Lane(CopyLane):
        def copy(self, target, source, after=None):
            super().copy(target, source, after)
            return Ticket()

    monkeypatch.setattr(activations, "CopyLane", Lane)
    model, made = nn.Sequential(nn.Tanh(), nn.Linear(4, 4)), []
    model[0].register_forward_hook(lambda _m, _a, out: made.append(StorageWeakRef(out.untyped_storage())))
    with ActivationOffloader("0", min_bytes=0).attached(model):
        loss = model[0](torch.randn(3, 4, requires_grad=True)).sum()
        assert len(asked) == 2
        assert made[0].expired()
        loss.backward()


# --- recompute


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("policy", ["none", "selective", "full", RecomputePolicy(routed="dispatch")], ids=str)
def test_under_recompute_policies_gradients_are_the_same(policy, device):
    policy, results, moved = RecomputePolicy.of(policy), [], []
    for offloads in (False, True):
        model = Decoder(layers=3).to(device)
        for layer in model.layers:
            layer.moe.experts.mode = policy.routed
        recompute_in_backward([model], policy)
        offloader = ActivationOffloader("layers.*", min_bytes=0)
        if offloads:
            offloader.attach(model)
        torch.manual_seed(1)
        with torch.autocast(device, torch.bfloat16):
            loss = model(torch.randint(32, (2, 7), device=device)).square().sum()
        loss.backward()
        offloader.detach()
        results.append([p.grad for p in model.parameters()])
        moved.append(offloader.moved_bytes)
    assert moved[1] > moved[0] == 0
    assert all(torch.equal(a, e) for a, e in zip(*results, strict=True))


def test_an_output_that_is_discarded_is_left_to_its_checkpoint(counting):
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.mlp = nn.LayerNorm(8), nn.Linear(8, 8)

        def forward(self, x):
            checkpoint = DiscardOutputCheckpoint()
            normed = checkpoint.checkpoint(self.norm, x)
            out = self.mlp(normed.view(-1, 8)).tanh()
            checkpoint.discard_output()
            checkpoint.register_recompute_hook(out)
            return out

    model, x = Half(), torch.randn(5, 8, requires_grad=True)
    model(x).sum().backward()
    expected, x.grad = x.grad, None
    assert moved_by(counting, model, x, modules=[""]) == [160]  # what tanh saves
    assert torch.equal(x.grad, expected)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_inside_a_checkpoint_of_torch_nothing_moves(counting, use_reentrant):
    model = Stack([8, 8])
    x = torch.randn(4, HIDDEN, requires_grad=True)
    with ActivationOffloader(min_bytes=0).attached(model):
        torch_checkpoint(model, x, use_reentrant=use_reentrant).sum().backward()
    assert counting[0].sizes == []
    assert x.grad is not None


@pytest.mark.parametrize("mode", KEPT)
def test_tensors_inside_the_routed_experts_are_named(counting, mode):
    """In three chunks, whose rows lie one behind the other."""
    model = Decoder(layers=1, experts=4, top_k=2, width=24, hidden=16, dropout=0.0)
    model.layers[0].moe.experts.distribute(LocalDispatcher(), 3, mode)
    ids, sizes = torch.randint(32, (1, 5)), {"rows": 10 * 16 * 4, "gate_up": 10 * 48 * 4, "act": 10 * 24 * 4}
    for name, size in sizes.items():
        offloader = ActivationOffloader(f"layers.*.moe.experts.{name}", min_bytes=0)
        counting.clear()
        if name in KEPT[mode]:
            with offloader.attached(model):
                model(ids).sum().backward()
            assert counting[0].sizes == [size]
        else:
            with pytest.raises(ValueError, match=rf"experts.{name}' names what the recompute policy discards"):
                offloader.attach(model)
    if mode == "none":
        counting.clear()
        with ActivationOffloader(["layers.*.moe.experts.[ra]*"], min_bytes=0).attached(model):
            model(ids).sum().backward()
        assert counting[0].sizes == [sizes["rows"], sizes["act"]]


# --- misuse and clean-up


def test_a_change_in_place_is_an_error_as_in_plain_torch():
    for offloaded in (True, False):
        model = nn.Sequential(nn.Sigmoid(), nn.Linear(4, 4))
        offloader = ActivationOffloader(["0"], min_bytes=0, fraction=float(offloaded))
        with offloader.attached(model):
            out = model[0](torch.randn(3, 4, requires_grad=True))
            loss = model[1](out).sum()
            with torch.no_grad():
                out.add_(1)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()


def test_an_output_that_is_read_before_it_came_back_is_named_too():
    checkpoint, norm, mlp = DiscardOutputCheckpoint(), nn.LayerNorm(8), nn.Linear(8, 8)
    with ActivationOffloader([""], min_bytes=0).attached(mlp):
        out = mlp(checkpoint.checkpoint(norm, torch.randn(5, 8, requires_grad=True)).view(-1, 8))
        checkpoint.discard_output()
        with pytest.raises(RuntimeError, match="or is an output that `discard_output\\(\\)` has freed"):
            out.sum().backward()


def test_nothing_is_left_after_an_interrupt():
    model, x = Stack([8, 8, 8]), torch.randn(4, HIDDEN, requires_grad=True)

    def interrupt(*_):
        raise KeyboardInterrupt

    boom = model.layers[1].down.register_forward_hook(interrupt)
    first, second = ActivationOffloader(min_bytes=0), ActivationOffloader(min_bytes=0)
    with pytest.raises(KeyboardInterrupt), first.attached(model):
        model(x)
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    boom.remove()
    moved = first.moved_bytes
    with second.attached(model):
        model(x).sum().backward()
    assert second.moved_bytes > moved == first.moved_bytes > 0


def test_an_error_of_the_device_leaves_no_hook(monkeypatch):
    monkeypatch.setattr(activations, "CopyLane", LateLane)
    monkeypatch.setattr(LateTicket, "done", lambda _: False)
    models, offloader = [Stack([8]), Stack([8])], ActivationOffloader(min_bytes=0)
    graphs = []
    for model in models:
        offloader.attach(model)
        graphs.append(model(torch.randn(4, HIDDEN, requires_grad=True)))
    monkeypatch.setattr(LateTicket, "finish", _fail)
    with pytest.raises(ZeroDivisionError):
        offloader.detach()
    assert all(not layer._forward_pre_hooks for model in models for layer in model.layers)
    offloader.detach()


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_is_left_after_an_error(device, monkeypatch):
    """Neither hooks nor host memory, which on a GPU is pinned."""
    pools = []
    monkeypatch.setattr(activations, "HostPool", lambda pinned: pools.append(HostPool(pinned)) or pools[-1])
    model = Stack([8, 8, 8]).to(device)
    boom = model.layers[1].down.register_forward_hook(_fail)
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    offloader = ActivationOffloader(min_bytes=0)
    gc.collect()
    empty_host_cache()
    before = pinned_bytes(device)
    with pytest.raises(ZeroDivisionError), offloader.attached(model):
        model(torch.randn(4, HIDDEN, device=device, requires_grad=True))
    assert [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()] == hooks
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    boom.remove()
    pool = weakref.ref(pools.pop())
    gc.collect()
    assert pool() is None
    assert pinned_bytes(device) == before
    with offloader.attached(model):
        model(torch.randn(4, HIDDEN, device=device, requires_grad=True)).sum().backward()
        assert pools[0].free_bytes() > 0
        assert device == "cpu" or pinned_bytes(device) > before
    assert model.layers[0].up.weight.grad is not None


def pinned_bytes(device: str) -> int:
    """What torch holds of pinned memory, used or not."""
    return torch.cuda.host_memory_stats()["allocated_bytes.current"] if device == "cuda" else 0


def _fail(*_):
    raise ZeroDivisionError


def test_a_graph_outlives_the_offloader():
    model, x = Stack([8, 8]), torch.randn(4, HIDDEN, requires_grad=True)
    torch.manual_seed(0)
    model(x).sum().backward()
    expected, x.grad = x.grad, None
    torch.manual_seed(0)
    with ActivationOffloader(min_bytes=0).attached(model):
        loss = model(x).sum()
    loss.backward()
    assert torch.equal(x.grad, expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fraction": 1.5}, r"`fraction` to be a number from 0 to 1 but got 1.5"),
        ({"fraction": float("nan")}, "`fraction`"),
        ({"min_bytes": -1}, "`min_bytes` to be an integer of at least 0 but got -1"),
        ({"prefetch": 0.5}, "`prefetch` to be an integer of at least 0 but got 0.5"),
        ({"modules": ["layer.*"]}, r"'layer.\*' fits none.*'layers.0'"),
        ({"modules": "layers.*.norm.rows"}, "fits none"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        ActivationOffloader(**options).attach(Stack([8]))


def test_models_that_cannot_be_attached():
    with pytest.raises(ValueError, match="has no `nn.ModuleList`"):
        ActivationOffloader().attach(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="still on the meta device, so there is no device to offload from"):
        ActivationOffloader().attach(Stack([8]).to("meta"))


def test_several_models_each_come_and_go(counting):
    actor, critic = Stack([8]), Stack([8, 8])
    offloader, x = ActivationOffloader(min_bytes=0), torch.randn(4, HIDDEN, requires_grad=True)
    with offloader.attached(actor):
        offloader.attach(actor)
        with offloader.attached(critic):
            for model in (actor, critic):
                model(x).sum().backward()
        of_actor, of_critic = (sum(lane.sizes) for lane in counting[::2])
        assert of_critic > of_actor > 0
        assert not critic.layers[0]._forward_hooks
        actor(x).sum().backward()
        critic(x).sum().backward()
    assert offloader.moved_bytes == 2 * of_actor + of_critic
