"""Save on one run, resume on another: bitwise equal to the uninterrupted run, in folders and in single files."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from lightning.fabric import Fabric

from helpers.models import full, qwen3_moe
from helpers.processes import run
from helpers.training import LEARNING_RATE, Task, loader, my_share, trainer
from lightning_moe import ChunkedEPStrategy

BATCHES = 3


def weights_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: full(p) for name, p in module.named_parameters()}


def fit(world_size, ep_size, folder, precision, sharded, epochs, resume, save):
    """Train some epochs of three batches; return the weights."""
    strategy = ChunkedEPStrategy(ep_size, save_distributed_checkpoint=sharded)
    runner = trainer(strategy, world_size, max_epochs=epochs, precision=precision, gradient_clip_val=0.5)
    task = Task()
    task.save_hyperparameters({"note": "kept"})
    batches = my_share(1, runner.global_rank, world_size, BATCHES)
    runner.fit(task, loader(batches), ckpt_path=f"{folder}/checkpoint" if resume else None)
    if save:
        runner.save_checkpoint(f"{folder}/checkpoint")
    return weights_of(task.model), runner.global_step


def train(world_size, ep_size, folder, precision, sharded, epochs, resume, save):
    """The same in Fabric; the epoch is part of the saved state."""
    strategy = ChunkedEPStrategy(ep_size, save_distributed_checkpoint=sharded)
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy=strategy, precision=precision)
    fabric.launch()
    model = qwen3_moe(torch.float32)
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), LEARNING_RATE))
    state = {"model": model, "optimizer": optimizer, "epoch": 0}
    if resume:
        fabric.load(f"{folder}/checkpoint", state)
    while state["epoch"] < epochs:
        for ids in my_share(1, fabric.global_rank, world_size, BATCHES):
            fabric.backward(model(input_ids=ids, labels=ids).loss)
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
        state["epoch"] += 1
    if save:
        fabric.save(f"{folder}/checkpoint", state)
    return weights_of(model.module), state["epoch"] * BATCHES


def save_resume_and_go_through(go, *options):
    go(*options, 1, False, True)
    return go(*options, 2, True, False), go(*options, 2, False, False)


@pytest.mark.parametrize("go", [fit, train], ids=["trainer", "fabric"])
@pytest.mark.parametrize(
    ("layout", "sharded", "precision"),
    [
        ((2, 2), True, "32-true"),
        ((2, 1), True, "bf16-mixed"),
        ((2, 1), True, "bf16-true"),
        ((2, 2), False, "32-true"),
        ((1, 1), False, "32-true"),
    ],
    ids=["folder-ep2-edp2", "folder-mixed", "folder-bf16", "file-ep2-edp2", "file-ep1-edp1"],
)
def test_resume_is_bitwise(go, layout, sharded, precision, tmp_path):
    ep_size, edp_size = layout
    options = (ep_size * edp_size, ep_size, str(tmp_path), precision, sharded)
    results = run(save_resume_and_go_through, options[0], go, *options, init=False)
    assert (tmp_path / "checkpoint").is_dir() == sharded
    for (weights, steps), (expected, _) in results:
        assert steps == 2 * BATCHES
        assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_a_single_file_is_a_hugging_face_state_dict(tmp_path):
    """Names and shapes are those of the plain model, so it loads one strictly."""
    (weights, _), *_ = run(fit, 2, 2, 2, str(tmp_path), "32-true", False, 1, False, True, init=False)
    checkpoint = torch.load(tmp_path / "checkpoint", weights_only=True)
    plain = qwen3_moe(torch.float32, seed=1)
    plain.load_state_dict({name.removeprefix("model."): value for name, value in checkpoint["state_dict"].items()})
    assert all(torch.equal(p, weights[name]) for name, p in plain.named_parameters())
    assert checkpoint["hyper_parameters"] == {"note": "kept"}


def test_a_folder_is_a_standard_distributed_checkpoint(tmp_path):
    """Lightning's own tool consolidates it into a file that plain torch reads."""
    (weights, _), *_ = run(fit, 2, 2, 2, str(tmp_path), "32-true", True, 1, False, True, init=False)
    tool = [sys.executable, "-m", "lightning.fabric.utilities.consolidate_checkpoint", str(tmp_path / "checkpoint")]
    subprocess.run(tool, check=True, timeout=120, capture_output=True)
    checkpoint = torch.load(tmp_path / "checkpoint.consolidated", weights_only=True)
    assert all(torch.equal(checkpoint["state_dict"][f"model.{name}"], value) for name, value in weights.items())


class Note:
    """An object that only pickle can save."""


def fit_with_pickled_hyperparameters(folder, weights_only):
    runner = trainer(ChunkedEPStrategy(weights_only=weights_only), 1)
    task = Task()
    task.save_hyperparameters({"note": Note()})
    batches = loader(my_share(1, 0, 1, 1))
    runner.fit(task, batches)
    runner.save_checkpoint(f"{folder}/checkpoint")
    runner.validate(task, batches, ckpt_path=f"{folder}/checkpoint", verbose=False)


def test_weights_only_false_loads_pickled_hyperparameters(tmp_path):
    run(fit_with_pickled_hyperparameters, 1, str(tmp_path), False, init=False)
    with pytest.raises(AssertionError, match="weights_only|Weights only"):
        run(fit_with_pickled_hyperparameters, 1, str(tmp_path), None, init=False)


def resume_from_weights(folder, sharded):
    runner = trainer(ChunkedEPStrategy(save_distributed_checkpoint=sharded), 1)
    task = Task()
    batches = loader(my_share(1, 0, 1, 1))
    runner.fit(task, batches)
    runner.save_checkpoint(f"{folder}/checkpoint", weights_only=True)
    runner.validate(task, batches, ckpt_path=f"{folder}/checkpoint", verbose=False)
    trainer(ChunkedEPStrategy(save_distributed_checkpoint=sharded), 1).fit(
        Task(), batches, ckpt_path=f"{folder}/checkpoint"
    )


@pytest.mark.parametrize("sharded", [True, False], ids=["folder", "file"])
def test_weights_alone_can_be_evaluated_and_not_resumed(sharded, tmp_path):
    with pytest.raises(AssertionError, match="holds no optimizer state.*`weights_only=True`"):
        run(resume_from_weights, 1, str(tmp_path), sharded, init=False)
