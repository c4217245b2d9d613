"""An evaluation, whenever it comes, leaves training as it is."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch.distributed.tensor import DTensor

from helpers.models import batch, full, qwen3_moe, relative_error
from helpers.processes import run
from helpers.training import Task, loader, my_share, trainer
from lightning_moe import ChunkedEPStrategy


def launched(**arguments) -> Fabric:
    fabric = Fabric(accelerator="cpu", devices=2, strategy=ChunkedEPStrategy(**arguments))
    fabric.launch()
    return fabric


def forward_between_backward_and_step(reshard_after_forward, context):
    fabric = launched(reshard_after_forward=reshard_after_forward)
    model = qwen3_moe(torch.float32)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 1.0))
    ids = batch(fabric.global_rank)
    fabric.backward(model(input_ids=ids, labels=ids).loss)
    with context():
        model(input_ids=ids)
    optimizer.step()
    plain = qwen3_moe(torch.float32)
    plain.load_state_dict({name: full(value) for name, value in model.module.state_dict().items()})
    return relative_error(model(input_ids=ids).logits.detach(), plain(input_ids=ids).logits.detach())


@pytest.mark.parametrize("context", [torch.no_grad, torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_no_stale_weights_after_a_step(reshard_after_forward, context):
    assert max(run(forward_between_backward_and_step, 2, reshard_after_forward, context, init=False)) < 1e-5


def optimizer_built_after_an_evaluation(reshard_after_forward, context):
    fabric = launched(reshard_after_forward=reshard_after_forward)
    model = fabric.setup_module(qwen3_moe(torch.float32))
    ids = batch(fabric.global_rank)
    with context():
        model(input_ids=ids)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), 1.0))
    before = {name: full(p).clone() for name, p in model.module.named_parameters()}
    fabric.backward(model(input_ids=ids, labels=ids).loss)
    optimizer.step()
    return [name for name, p in model.module.named_parameters() if torch.equal(full(p), before[name])]


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_an_optimizer_built_after_an_evaluation_trains_everything(reshard_after_forward, context):
    assert run(optimizer_built_after_an_evaluation, 2, reshard_after_forward, context, init=False) == [[], []]


def fit_after_a_validation_in_inference_mode():
    real = dist.get_backend
    runner = trainer(ChunkedEPStrategy(), 2)
    task = Task()
    batches = loader(my_share(1, runner.global_rank, 2))
    modes = []
    task.on_validation_batch_start = lambda *_: modes.append(torch.is_inference_mode_enabled())
    # Lightning evaluates under `no_grad` where the backend is gloo, and in inference mode everywhere else
    dist.get_backend = lambda *args, **kwargs: "other" if not args and not kwargs else real(*args, **kwargs)
    runner.validate(task, batches, verbose=False)
    runner.fit(task, batches)
    return modes, task.losses


def test_training_after_a_validation_in_inference_mode():
    for modes, losses in run(fit_after_a_validation_in_inference_mode, 2, init=False):
        assert all(modes)
        assert len(losses) == 5


def two_models_under_one_strategy():
    fabric = launched()
    sizes = []
    for num_experts in (8, 3, 8):
        model = fabric.setup(qwen3_moe(torch.float32, num_experts=num_experts, num_experts_per_tok=2)).module
        assert model.model.layers[0].mlp.experts.down_proj.shape[0] == num_experts
        model(input_ids=batch(fabric.global_rank)).logits.sum().backward()
        sizes.append(fabric.strategy.device_mesh.shape[1])
    return sizes


def test_auto_finds_a_size_for_each_model():
    assert run(two_models_under_one_strategy, 2, init=False) == [[2, 1, 2]] * 2
