"""The callbacks under Trainer and Fabric: training is the same to the bit, also after errors and from checkpoints."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch import Callback, LightningModule
from torch import nn

from helpers.decoder import Decoder
from helpers.lanes import CountingLane
from helpers.models import batch
from helpers.processes import run
from helpers.training import loader, trainer
from lightning_moe import ChunkedEPStrategy, RecomputePolicy
from lightning_moe.callbacks import ActivationOffload, ModelOffload
from lightning_moe.offload import activations
from lightning_moe.offload.copies import CopyLane
from lightning_moe.ops.local import local_part

# --- under the strategy, in real processes


def gradients(device, policy, precision, offload):
    """One rank's shards of the gradients of two accumulated micro-batches, twice; and what was moved."""
    strategy = ChunkedEPStrategy(2, 2, recompute=policy, reshard_after_forward=True)
    callback = ActivationOffload(min_bytes=1)
    fabric = Fabric(
        accelerator=device, strategy=strategy, devices=2, precision=precision, callbacks=[callback] if offload else []
    )
    fabric.launch()
    rank, model = fabric.global_rank, fabric.setup(Decoder(layers=3))
    torch.manual_seed(5 + rank)
    result = []
    for step in range(2):
        model.zero_grad()
        for micro in range(2):
            with fabric.no_backward_sync(model, enabled=micro == 0):
                loss = model(batch(rank, seed=2 * step + micro).to(fabric.device)).square().sum()
                fabric.backward(loss)
        result += [loss.detach(), *(local_part(p.grad).clone() for p in model.parameters())]
    callback.detach()
    return result, callback.offloader.moved_bytes


def differing_with_activation_offload(device):
    """For each case, the positions that differ, and the bytes that were moved."""
    cases = [
        ("none", "32-true"),
        ("selective", "bf16-mixed"),
        ("full", "32-true"),
        (RecomputePolicy(routed="dispatch"), "bf16-true"),
    ]
    result = {}
    for policy, precision in cases:
        expected, _ = gradients(device, policy, precision, False)
        actual, moved = gradients(device, policy, precision, True)
        where = [i for i, (a, e) in enumerate(zip(actual, expected, strict=True)) if not torch.equal(a, e)]
        result[str(policy), precision] = where, moved, sum(t.abs().sum().item() for t in expected)
    return result


def train_with_model_offload(offload):
    """Weights and optimizer state after four steps with a validation after each, in which the model is away."""
    sizes = []

    class Watch(Callback):
        def on_validation_batch_start(self, trainer, pl_module, *args):
            sizes.extend(local_part(p).untyped_storage().nbytes() for p in pl_module.parameters())

    callbacks = [ModelOffload("on_validation_start", "on_validation_end"), Watch()] if offload else []
    task = Task(Decoder(layers=2, dropout=0.2))
    runner = trainer(ChunkedEPStrategy(2), 2, callbacks=callbacks, val_check_interval=1, num_sanity_val_steps=1)
    torch.manual_seed(3)
    ids = torch.stack([batch(runner.global_rank, seed=seed) for seed in range(4)])
    runner.fit(task, loader(ids), loader(ids[:1]))
    assert set(sizes) <= {0}
    assert bool(sizes) == offload
    state = [t for s in runner.optimizers[0].state.values() for t in s.values()]
    return [local_part(t).detach() for t in (*task.model.parameters(), *state)]


def sizes_moved_by_attention():
    """What calls of sharded attentions move, in bytes: multiples of 21 tokens; and the sizes of their parameters."""
    lanes = []
    activations.CopyLane = lambda device: lanes.append(CountingLane(device)) or lanes[-1]
    offload = ActivationOffload("layers.*.attention", min_bytes=64)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=ChunkedEPStrategy(2), callbacks=[offload])
    fabric.launch()
    plain = Decoder()
    parameters = {p.numel() * 4 for p in plain.layers[0].attention.parameters()}
    model = fabric.setup(plain)
    model(batch(0)).sum().backward()
    activations.CopyLane = CopyLane
    return set(lanes[0].sizes), parameters


def in_two_processes():
    moved, parameters = sizes_moved_by_attention()
    assert 21 * 16 * 4 in moved
    assert not moved & parameters  # FSDP frees what it gathered: nobody else may touch it
    expected, actual = train_with_model_offload(False), train_with_model_offload(True)
    same = [torch.equal(a, e) for a, e in zip(actual, expected, strict=True)]
    return differing_with_activation_offload("cpu"), same


def assert_same_and_moved(by_case):
    for case, (where, moved, weight) in by_case.items():
        assert (case, where) == (case, [])
        assert moved > 0
        assert weight > 0


def test_training_is_bitwise_the_same_with_experts_and_shards_on_two_ranks():
    for by_case, same in run(in_two_processes, 2, init=False):
        assert_same_and_moved(by_case)
        assert len(same) > 20
        assert all(same)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_gradients_are_bitwise_the_same_on_two_gpus():
    for by_case in run(differing_with_activation_offload, 2, "cuda", device="cuda", init=False):
        assert_same_and_moved(by_case)


# --- any strategy, one process


class Task(LightningModule):
    """Fails on purpose where it is told to."""

    def __init__(self, model: nn.Module, fail_at: int | None = None, fail_in: str = "forward") -> None:
        super().__init__()
        self.model, self.fail_at, self.fail_in = model, fail_at, fail_in

    def training_step(self, ids, batch_idx):
        if batch_idx == self.fail_at and self.fail_in == "forward":
            self.model.layers[1].register_forward_hook(_fail)
        out = self.model(ids)
        if batch_idx == self.fail_at and self.fail_in == "backward":
            out.register_hook(_fail)
        return out.square().sum()

    def on_train_batch_end(self, outputs, ids, batch_idx):
        if batch_idx == self.fail_at and self.fail_in == "between":
            _fail()

    def validation_step(self, ids, batch_idx):
        pass  # by another engine

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2)


def _fail(*_):
    raise ZeroDivisionError


def fit(callbacks, seeds=range(4), task=None, ckpt_path=None, **options):
    task = Task(Decoder(layers=2, dropout=0.0)) if task is None else task
    runner = trainer("auto", 1, callbacks=callbacks, **options)
    runner.fit(task, loader(torch.stack([batch(0, seed=seed) for seed in seeds])), ckpt_path=ckpt_path)
    return runner, [p.detach() for p in task.model.parameters()]


def hooks_of(module):
    return [(len(m._forward_hooks), len(m._forward_pre_hooks), len(m._state_dict_pre_hooks)) for m in module.modules()]


def offloading():
    return [
        ActivationOffload("model.layers.*", min_bytes=1),
        ModelOffload("on_train_batch_end", "on_train_batch_start"),
    ]


def test_a_run_that_fails_leaves_nothing_and_trains_again():
    _, expected = fit([])
    callbacks = offloading()
    for fail_in in ("forward", "backward", "between"):  # in the last the model is away
        task = Task(Decoder(layers=2, dropout=0.0), fail_at=2, fail_in=fail_in)
        hooks = hooks_of(task.model.embedding), hooks_of(task.model.layers[0])
        pools = []
        task.on_train_start = lambda p=pools: p.append(
            weakref.ref(callbacks[0].offloader._attached[0].traffic._lanes.pool)
        )
        with pytest.raises(ZeroDivisionError):
            fit(callbacks, task=task)
        assert callbacks[0].offloader.moved_bytes > 0
        assert (hooks_of(task.model.embedding), hooks_of(task.model.layers[0])) == hooks
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
        assert all(p.untyped_storage().nbytes() for p in task.model.parameters())
        del task
        gc.collect()
        assert pools[0]() is None
        _, actual = fit(callbacks)
        assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))


def test_resumed_from_a_checkpoint(tmp_path):
    _, expected = fit([], range(2), max_epochs=2)
    runner, _ = fit(offloading(), range(2))
    runner.save_checkpoint(tmp_path / "half.ckpt")
    _, actual = fit(offloading(), range(2), ckpt_path=tmp_path / "half.ckpt", max_epochs=2)
    assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))


def test_fabric_calls_attach_and_name_the_hooks():
    def train(away):
        torch.manual_seed(0)
        callbacks = (
            [ActivationOffload(min_bytes=1), ModelOffload("on_generate_start", "on_generate_end")] if away else []
        )
        fabric = Fabric(accelerator="cpu", devices=1, callbacks=callbacks)
        model = Decoder(layers=2)
        model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
        for seed in range(3):
            loss = model(batch(0, seed=seed)).square().sum()
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            fabric.call("on_generate_start", seed)
            if away:
                state = [t for s in optimizer.state.values() for t in s.values()]
                assert len(state) > 10
                assert all(t.untyped_storage().nbytes() == 0 for t in (*model.parameters(), *state))
                with pytest.raises(RuntimeError, match="Call `reload\\(\\)` first"):
                    model(batch(0))
            fabric.call("on_generate_end", seed)
        fabric.call("on_before_backward")  # others may need it
        fabric.call("on_train_end")
        assert not away or callbacks[0].offloader.moved_bytes > 0
        assert all(not layer._forward_pre_hooks for layer in model.layers)
        return [p.detach() for p in model.parameters()]

    assert all(torch.equal(a, e) for a, e in zip(train(True), train(False), strict=True))


def test_fabric_sets_up_a_second_model_and_one_with_nothing_to_offload():
    activations, away = ActivationOffload("layers.*", min_bytes=1), ModelOffload()
    fabric = Fabric(accelerator="cpu", devices=1, callbacks=[activations, away])
    models, optimizers = [], []
    for model in (Decoder(layers=2), Decoder(layers=1), nn.Linear(4, 4)):
        plain = isinstance(model, nn.Linear)
        with pytest.warns(UserWarning, match=r"a model over: .*'layers.\*' fits none" if plain else "saves no memory"):
            model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
        models.append(model)
        optimizers.append(optimizer)
    moved = [0]
    for model, optimizer in zip(models, optimizers, strict=True):
        fabric.backward(model(torch.ones(2, 4) if model is models[2] else batch(0)).square().sum())
        optimizer.step()
        moved.append(activations.offloader.moved_bytes)
    assert 0 == moved[0] < moved[1] < moved[2] == moved[3]
    states = [t for o in optimizers for s in o.state.values() for t in s.values()]
    tensors = [p for model in models for p in model.parameters()]
    tensors += [p.grad for p in tensors] + states
    away.offload()
    assert {t.untyped_storage().nbytes() for t in tensors} == {0}
    away.reload()
    assert all(t.untyped_storage().nbytes() for t in tensors)
    fabric.call("on_train_end")
    assert not models[0].layers[0]._forward_pre_hooks
    fabric.setup(nn.Tanh())  # no parameters: nothing is away, and nothing refused
    away.offload()
    assert nn.Tanh()(torch.zeros(1)) == 0


def test_a_device_that_fails_does_not_keep_an_exception_from_others(monkeypatch):
    callbacks = offloading()

    def fail(*_):
        raise torch.AcceleratorError("the device failed")

    monkeypatch.setattr(activations._Traffic, "close", fail)
    monkeypatch.setattr(ModelOffload, "detach", fail)
    with pytest.raises(ZeroDivisionError):
        fit(callbacks, task=Task(Decoder(layers=2, dropout=0.0), fail_at=1))
    assert callbacks[0].offloader._attached == []


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ActivationOffload("model.layer.*"), "'model.layer.*' fits none"),
        (lambda: ActivationOffload(fraction=-0.1), "`fraction` to be a number from 0 to 1 but got -0.1"),
        (lambda: ModelOffload("on_generate_start"), "'on_generate_start', but the Trainer has no such hook"),
        (lambda: ModelOffload("on_train_start", ["on_train_start"]), "cannot offload or reload at 'on_train_start'"),
        (lambda: ModelOffload("on_exception"), "cannot offload or reload at 'on_exception'"),
    ],
)
def test_bad_arguments_are_errors_before_the_first_step(make, message):
    task = Task(Decoder(layers=2), fail_at=0)
    with pytest.raises(ValueError) as error:  # noqa: PT011
        fit([make()], task=task)
    assert message in str(error.value)


def test_a_model_is_needed():
    with pytest.raises(RuntimeError, match="`ModelOffload` knows no model yet"):
        ModelOffload().offload()
