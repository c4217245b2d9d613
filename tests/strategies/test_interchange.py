"""What Lightning's own suite asks of a sharded strategy's state: what is where, and that other strategies read it."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor

from helpers.models import qwen3_moe
from helpers.processes import run
from helpers.training import Task, loader, my_share, trainer
from lightning_moe import ChunkedEPStrategy


def plain_run(epochs, resume=None, save=None):
    """Lightning on one device, without this package's strategy."""
    runner = trainer("auto", 1, max_epochs=epochs, gradient_clip_val=0.5)
    task = Task()
    runner.fit(task, loader(my_share(1, 0, 1, 3)), ckpt_path=resume)
    if save:
        runner.save_checkpoint(save)
    return task.losses


def expert_parallel_run(epochs, resume, save):
    runner = trainer(
        ChunkedEPStrategy(2, save_distributed_checkpoint=False), 2, max_epochs=epochs, gradient_clip_val=0.5
    )
    task = Task()
    runner.fit(task, loader(my_share(1, runner.global_rank, 2, 3)), ckpt_path=resume)
    runner.save_checkpoint(save)
    kinds = {}
    for distributed in (True, False):
        runner.strategy._save_distributed_checkpoint = distributed
        state = runner.strategy.lightning_module_state_dict()
        moments = runner.strategy.optimizer_state(runner.optimizers[0])
        values = [v for entries in moments.get("state", {}).values() for k, v in entries.items() if k != "step"]
        kinds[distributed] = (
            [isinstance(value, DTensor) for value in (*state.values(), *values)],
            {name: tuple(value.shape) for name, value in state.items()},
        )
    return task.losses, kinds


def test_one_device_expert_parallel_and_back(tmp_path):
    """A file goes from Lightning's plain strategy to ours and back, with its optimizer: the losses are those of one run."""
    first, second = str(tmp_path / "plain.ckpt"), str(tmp_path / "ours.ckpt")
    losses = plain_run(1, save=first)
    results = run(expert_parallel_run, 2, 2, first, second, init=False)
    losses += results[0][0]
    losses += plain_run(3, resume=second)
    assert losses == pytest.approx(plain_run(3), rel=5e-6)

    shapes = {f"model.{name}": tuple(p.shape) for name, p in qwen3_moe(torch.float32).named_parameters()}
    for rank, (_, kinds) in enumerate(results):
        is_sharded, names = kinds[True]
        assert len(is_sharded) == 3 * len(shapes)
        assert all(is_sharded)
        assert names == shapes
        is_sharded, names = kinds[False]
        assert not any(is_sharded)
        assert names == (shapes if rank == 0 else {}), "whole values are on rank 0 alone"
