"""A run that goes on under another number of ranks and another expert-parallel size, again and again."""

from __future__ import annotations

import pytest
import torch

from helpers.models import full
from helpers.processes import run
from helpers.training import Task, loader, my_share, trainer
from lightning_moe import ChunkedEPStrategy

LINKS = [((1, 1), True), ((2, 1), True), ((2, 2), False), ((4, 1), True), ((1, 2), False), ((1, 1), True)]
"""(EP, EDP) of each stretch of the run, and whether it saves a folder."""


class Recorder(Task):
    """Keeps what it resumed with."""

    def on_train_start(self):
        self.restored = self.state()

    def state(self):
        (optimizer,) = self.trainer.optimizers
        names = {p: name for name, p in self.named_parameters()}
        state = {f"{names[p]}.{key}": v for p, entries in optimizer.state.items() for key, v in entries.items()}
        return {name: full(value).clone() for name, value in (*self.named_parameters(), *state.items())}


def stretch(world_size, ep_size, folder, number, sharded, epochs):
    strategy = ChunkedEPStrategy(ep_size, save_distributed_checkpoint=sharded)
    runner = trainer(strategy, world_size, max_epochs=number + epochs, gradient_clip_val=0.5)
    task = Recorder()
    batches = loader(my_share(1, runner.global_rank, world_size, 2))
    runner.fit(task, batches, ckpt_path=f"{folder}/{number - 1}.ckpt" if number else None)
    runner.save_checkpoint(f"{folder}/{number}.ckpt")
    return task.losses, task.restored, task.state(), [group["lr"] for group in runner.optimizers[0].param_groups]


def first_stretch_and_the_whole_run(*options):
    whole, *_ = stretch(*options, len(LINKS))
    return stretch(*options, 1), whole  # in this order: both save under one name


def test_a_run_goes_on_under_any_layout(tmp_path):
    """Weights and optimizer state are bitwise what was saved; the losses are those of the uninterrupted run."""
    losses, last = [], None
    for number, ((ep_size, edp_size), sharded) in enumerate(LINKS):
        world_size = ep_size * edp_size
        options = (world_size, world_size, ep_size, str(tmp_path), number, sharded)
        if number == 0:
            ((first, uninterrupted),) = run(first_stretch_and_the_whole_run, *options, init=False)
            results = [first]
        else:
            results = run(stretch, *options, 1, init=False)
        for _, restored, _, rates in results:
            assert rates == [1e-2]
            if last is not None:
                assert restored.keys() == last.keys()
                assert not [name for name in last if not torch.equal(restored[name], last[name])], number
        assert (tmp_path / f"{number}.ckpt").is_dir() == sharded
        losses += results[0][0]
        last = results[0][2]
    assert sum(name.endswith("exp_avg_sq") for name in last) == sum(name.endswith("weight.step") for name in last) + 4
    assert losses[-1] < losses[0] - 0.1
    assert losses == pytest.approx(uninterrupted, rel=2e-6)
