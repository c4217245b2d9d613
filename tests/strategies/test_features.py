"""What people expect of a Trainer and of Fabric, beside plain torch on one process with the same global batches."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn

from helpers.models import computing_in, full, qwen3_moe, relative_error
from helpers.processes import run
from helpers.training import LEARNING_RATE, STEPS, Task, global_batches, loader, my_share, trainer
from lightning_moe import ChunkedEPStrategy

PADDING = 2  # tokens at the end of each sequence


def loss_of(model: nn.Module, ids: Tensor, padded: bool) -> Tensor:
    if not padded:
        return model(input_ids=ids, labels=ids).loss
    mask = torch.ones_like(ids)
    mask[:, -PADDING:] = 0
    return model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss


def freeze(experts: bool, model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(("experts" in name) != experts)


def compile_dense_parts(model: nn.Module) -> None:
    model.model.layers[0].self_attn.compile(backend="aot_eager")
    model.model.layers[1].post_attention_layernorm.compile(backend="aot_eager")


def one_optimizer(model: nn.Module) -> tuple[list[Any], list[Any]]:
    return [torch.optim.AdamW(model.parameters(), LEARNING_RATE)], []


def with_a_scheduler(model: nn.Module) -> tuple[list[Any], list[Any]]:
    (optimizer,), _ = one_optimizer(model)
    return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)]


def one_for_experts_and_one_for_the_rest(model: nn.Module) -> tuple[list[Any], list[Any]]:
    halves: dict[bool, list[Tensor]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        halves["experts" in name].append(parameter)
    optimizers = [torch.optim.SGD(halves[True], 1.0), torch.optim.AdamW(halves[False], LEARNING_RATE)]
    return optimizers, [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7) for optimizer in optimizers]


@dataclass(frozen=True)
class Case:
    """One training: what is done to the model, the optimizers, and the Trainer's options."""

    prepare: Callable[[nn.Module], Any] = lambda model: None
    optimizers: Callable[[nn.Module], tuple[list[Any], list[Any]]] = one_optimizer
    clip: tuple[str, float] = ("norm", 0.3)
    padded: bool = False
    manual: bool = False
    model: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)


EVALUATING = {"val_check_interval": 1, "limit_val_batches": 1, "num_sanity_val_steps": 1}
CASES = {
    "frozen experts": Case(partial(freeze, True)),
    "all frozen but the experts": Case(partial(freeze, False), clip=("value", 1e-3)),
    "tied embeddings, padding": Case(padded=True, model={"tie_word_embeddings": True}),
    "compiled attention and norm, a scheduler, clipping by value, evaluations between steps": Case(
        compile_dense_parts, with_a_scheduler, ("value", 1e-3), trainer=EVALUATING
    ),
    "manual optimization with two optimizers and schedulers": Case(
        optimizers=one_for_experts_and_one_for_the_rest, manual=True
    ),
}


def prepared(case: Case) -> nn.Module:
    """The plain model, not compiled."""
    model = qwen3_moe(torch.float32, **case.model).double()
    model.set_experts_implementation("eager")
    if case.prepare is not compile_dense_parts:
        case.prepare(model)
    return model


def train_plainly(case: Case) -> tuple[list[float], dict[str, Tensor]]:
    model = prepared(case)
    optimizers, schedulers = case.optimizers(model)
    clips = {"norm": nn.utils.clip_grad_norm_, "value": nn.utils.clip_grad_value_}
    clip, limit = clips[case.clip[0]], case.clip[1]
    losses = []
    with computing_in(torch.float64):
        for ids in global_batches(1)[:, 0]:
            model.zero_grad()
            loss = loss_of(model, ids, case.padded)
            loss.backward()
            losses.append(loss.item())
            for optimizer in optimizers:
                clip([p for group in optimizer.param_groups for p in group["params"]], limit)
                optimizer.step()
            for scheduler in schedulers:
                scheduler.step()
    return losses, {name: p.detach() for name, p in model.named_parameters()}


class FeatureTask(Task):
    def __init__(self, case: Case) -> None:
        super().__init__(**case.model)
        case.prepare(self.model)
        self.case, self.automatic_optimization = case, not case.manual
        self.evaluations, self.logged = 0, []

    def training_step(self, ids):
        loss = loss_of(self.model, ids, self.case.padded)
        self.losses.append(self.all_gather(loss.detach()).mean().item())
        self.log("loss", loss)
        self.logged.append(loss.item())
        if self.case.manual:
            self._step(loss)
        return loss

    def _step(self, loss):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            self.clip_gradients(optimizer, self.case.clip[1], self.case.clip[0])
            optimizer.step()
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def validation_step(self, ids):
        super().validation_step(ids)
        self.evaluations += 1

    def configure_optimizers(self):
        optimizers, schedulers = self.case.optimizers(self.model)
        return optimizers, [{"scheduler": scheduler, "interval": "step"} for scheduler in schedulers]


def fit_cases(folder):
    found = {}
    for name, case in CASES.items():
        clipping = {"gradient_clip_algorithm": case.clip[0], "gradient_clip_val": case.clip[1]}
        options = case.trainer if case.manual else case.trainer | clipping
        runner = trainer(ChunkedEPStrategy(), 2, precision="64-true", **options)
        batches = loader(my_share(1, runner.global_rank, 2))
        task = FeatureTask(case)
        with computing_in(torch.float64):
            runner.fit(task, batches, batches)
        found[name] = task.losses, {key: full(p) for key, p in task.model.named_parameters()}, task.evaluations
    return found, limits_and_loggers(folder, runner.global_rank)


def limits_and_loggers(folder, rank):
    batches = loader(my_share(1, rank, 2))
    counts = []
    for options in ({"fast_dev_run": True}, {"limit_train_batches": 3, "limit_val_batches": 2, "max_epochs": 2}):
        task = FeatureTask(CASES["frozen experts"])
        trainer(ChunkedEPStrategy(), 2, **{"num_sanity_val_steps": 0} | options).fit(task, batches, batches)
        counts.append((len(task.losses), task.evaluations))
    loggers = [logger(folder, name=logger.__name__, version="0") for logger in (CSVLogger, TensorBoardLogger)]
    runner = trainer(
        ChunkedEPStrategy(), 2, logger=loggers, log_every_n_steps=1, callbacks=[LearningRateMonitor("step")]
    )
    task = FeatureTask(Case(optimizers=with_a_scheduler))
    runner.fit(task, batches)
    return counts, task.logged


def test_features_of_the_trainer_equal_plain_torch(tmp_path):
    results = run(fit_cases, 2, str(tmp_path), init=False, timeout=250)
    for name, case in CASES.items():
        losses, weights = train_plainly(case)
        start = prepared(case)
        for found, _ in results:
            rank_losses, rank_weights, evaluations = found[name]
            assert rank_losses == pytest.approx(losses, rel=1e-9), name
            errors = {key: relative_error(rank_weights[key], weights[key]) for key in weights}
            assert max(errors.values()) < 1e-8, (name, errors)
            assert evaluations == STEPS + (1 if case.trainer else 2), "and the sanity check before"
        for key, parameter in start.named_parameters():
            changed = not torch.equal(weights[key], parameter.detach())
            assert changed == parameter.requires_grad, f"{name}: {key}"
    for _, (counts, _) in results:
        assert counts == [(1, 1), (6, 4)]
    _, (_, logged) = results[0]  # rank 0 writes
    assert len(logged) == STEPS
    rows = list(csv.DictReader((tmp_path / "CSVLogger" / "0" / "metrics.csv").open()))
    events = EventAccumulator(str(tmp_path / "TensorBoardLogger" / "0")).Reload()
    for name, steps in {"lr-AdamW": [LEARNING_RATE * 0.7**step for step in range(STEPS)], "loss": logged}.items():
        assert [float(row[name]) for row in rows if row[name]] == pytest.approx(steps)
        assert [event.value for event in events.Scalars(name)] == pytest.approx(steps)


# --- gradients that are not finite


def not_finite():
    fabric = Fabric(accelerator="cpu", devices=2, strategy=ChunkedEPStrategy())
    fabric.launch()
    model = qwen3_moe(torch.float32)
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), LEARNING_RATE))
    batches = my_share(1, fabric.global_rank, 2)

    def backward(ids, factor=1.0):
        loss = model(input_ids=ids, labels=ids).loss
        fabric.backward(loss * factor)
        return fabric.all_reduce(loss.detach()).item()

    before = backward(batches[0], float("nan") if fabric.global_rank == 1 else 1.0)
    message = None
    try:
        fabric.clip_gradients(model, optimizer, max_norm=0.3)
    except RuntimeError as error:
        message = str(error)
    optimizer.zero_grad()  # skip the step
    losses = [before]
    for _ in range(3):
        losses.append(backward(batches[0]))
        fabric.clip_gradients(model, optimizer, clip_val=1e-2)
        optimizer.step()
        optimizer.zero_grad()

    runner = trainer(ChunkedEPStrategy(), 2, gradient_clip_val=0.3)
    task = Task()
    task.training_step = lambda ids: (
        task.model(input_ids=ids, labels=ids).loss
        * (float("nan") if runner.global_rank == 1 and runner.global_step == 1 else 1.0)
    )
    runner.fit(task, loader(batches))
    return message, losses, task.norms


def test_nan_on_one_rank_is_seen_by_all():
    for message, losses, norms in run(not_finite, 2, init=False, timeout=120):
        assert "The total norm of order 2.0 of the gradients is nan" in message
        assert losses[0] == losses[1], "nothing was changed"
        assert losses[3] < losses[1], "and training goes on"
        assert [norm == norm for norm in norms] == [True, False, False, False, False], "the Trainer does not stop"
