"""Averages of weights beside Lightning's own callbacks on one device, across resumes under other layouts and strategies."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, WeightAveraging

from helpers.models import computing_in, full, relative_error
from helpers.processes import run
from helpers.training import LEARNING_RATE, Task, loader, my_share, trainer
from lightning_moe import ChunkedEPStrategy
from strategies.test_meta_device import LazyTask

BATCHES = 3


class Averaged(Task):
    """Tied weights, and evaluations between the micro-batches of a step: averages answer, and training goes on."""

    def __init__(self):
        super().__init__(tie_word_embeddings=True)
        self.model.set_experts_implementation("eager")
        self.evaluations = []

    def validation_step(self, ids):
        self.evaluations.append(self.all_gather(self.model(input_ids=ids, labels=ids).loss).mean().item())


def fit(strategy, world_size, folder, epochs, resume=None):
    """The last epoch's losses and evaluations, the averages at the end, and what a checkpoint shows without the callback."""
    saving = ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    options = {"precision": "64-true", "accumulate_grad_batches": 2, "val_check_interval": 1}
    callbacks = [EMAWeightAveraging(decay=0.7, use_buffers=False), saving]
    new = partial(trainer, strategy(), world_size, enable_checkpointing=True, **options)
    runner, task, shown = new(callbacks=callbacks, max_epochs=epochs), Averaged(), Averaged()
    if isinstance(strategy(), str):  # there averages have the dtype of the model before the Trainer converts it
        task.double(), shown.double()
    batches = my_share(1, runner.global_rank, world_size, BATCHES)
    held_out = loader(batches[:1])
    with computing_in(torch.float64):
        runner.fit(task, loader(batches), held_out, ckpt_path=resume)
        trainer(strategy(), world_size, precision="64-true").validate(
            shown, held_out, ckpt_path=saving.best_model_path, verbose=False
        )
    averages = {name: full(p) for name, p in task.model.named_parameters()}
    return task.losses[-BATCHES:], task.evaluations[-BATCHES:], averages, shown.evaluations


def sharded(ep_size, is_folder, *options):
    return fit(partial(ChunkedEPStrategy, ep_size, save_distributed_checkpoint=is_folder), *options)


def test_averages_are_those_of_one_device_and_go_on_under_any_layout(tmp_path):
    """A folder of two ranks goes on with one, whose file goes on without this package's strategy."""
    folders = [str(tmp_path / name) for name in ("plain", "first", "second", "third")]
    last = [f"{folder}/epoch={epoch}.ckpt" for epoch, folder in enumerate(folders[1:])]
    plain = [fit(lambda: "auto", 1, f"{folders[0]}-{epochs}", epochs) for epochs in (1, 2, 3)]
    first = run(sharded, 2, 2, True, 2, folders[1], 1, init=False)
    second = run(sharded, 1, 1, False, 1, folders[2], 2, last[0], init=False)
    third = [fit(lambda: "auto", 1, folders[3], 3, last[1])]
    for expected, results in zip(plain, (first, second, third), strict=True):
        for losses, evaluations, averages, shown in results:
            assert losses == pytest.approx(expected[0], rel=1e-9)
            assert evaluations == pytest.approx(expected[1], rel=1e-9)
            assert shown == pytest.approx(expected[3], rel=1e-9)
            errors = {name: relative_error(averages[name], value) for name, value in expected[2].items()}
            assert max(errors.values()) < 1e-8, errors
        assert expected[1][-1] != pytest.approx(expected[0][-1], rel=1e-3), "averages are not the weights in training"


class Noting(LazyTask):
    """On the meta device until it is sharded; keeps the weights after every step."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), LEARNING_RATE)

    def on_train_batch_end(self, *_):
        self.seen.append({name: full(p).double() for name, p in self.named_parameters()})


def of_shards_alone(folder):
    """In bfloat16, where the mean of weights is none of their values; then from a checkpoint without an average."""
    checkpoint, found = f"{folder}/plain.ckpt", []
    runner = trainer(ChunkedEPStrategy(), 2, precision="bf16-true")
    batches = loader(my_share(1, runner.global_rank, 2, BATCHES))
    runner.fit(Noting(), batches)
    runner.save_checkpoint(checkpoint)
    for resume in (None, checkpoint):
        callback, task = WeightAveraging(), Noting()
        runner = trainer(ChunkedEPStrategy(), 2, precision="bf16-true", callbacks=[callback], max_epochs=2)
        runner.fit(task, batches, ckpt_path=resume)
        kept = {name: full(p).double() for name, p in callback._average_model.module.named_parameters()}
        model = {name: full(p).double() for name, p in task.named_parameters()}
        found.append((task.seen, kept, model))
    return found


def test_averages_of_bfloat16_are_float32_and_no_rank_copies_a_model(tmp_path):
    for found in run(of_shards_alone, 2, str(tmp_path), init=False):
        assert [len(seen) for seen, *_ in found] == [2 * BATCHES, BATCHES]
        for seen, kept, model in found:
            for name, average in kept.items():
                exact = torch.stack([weights[name] for weights in seen]).mean(0)
                assert relative_error(average, exact) < 1e-6
                assert torch.equal(model[name], average.bfloat16().double())
