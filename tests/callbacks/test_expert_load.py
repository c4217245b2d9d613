"""What `ExpertLoadMonitor` logs, against a count of every decision one by one, under three strategies and in Fabric."""

from __future__ import annotations

import copy
import csv
import sys
from pathlib import Path

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.loggers import CSVLogger as FabricCSVLogger
from lightning.pytorch.loggers import CSVLogger
from matplotlib.figure import Figure
from matplotlib.image import imread

from callbacks.routed import EXPERTS, LAYERS, Task, batches, counts, decoder, loader, write_down
from helpers.models import batch, qwen3_moe
from helpers.processes import run
from helpers.training import trainer
from lightning_moe import ChunkedEPStrategy
from lightning_moe.callbacks import ExpertLoadMonitor
from lightning_moe.callbacks.heatmap import draw
from lightning_moe.dispatch import LocalDispatcher
from lightning_moe.layers import MoELayer
from lightning_moe.models import swap_blocks

STEPS, ACCUMULATE, EVERY = 6, 2, 2


def strategy(name: str):
    return ChunkedEPStrategy(2, recompute="full") if name == "chunked" else name


def fit(name: str, folder: str):
    """Three epochs of four micro-batches: a log every two optimizer steps, a validation after each epoch, then a test."""
    monitor, logger = ExpertLoadMonitor(per_layer=True), CSVLogger(folder, version=0)
    options = {"accumulate_grad_batches": ACCUMULATE, "max_epochs": STEPS // 2, "log_every_n_steps": EVERY}
    options |= {"logger": logger, "num_sanity_val_steps": 1, "callbacks": [monitor]}
    runner = trainer(strategy(name), 2, **options)
    task = Task()
    held_out = loader(batches(runner.global_rank, 3, seed=1))
    runner.fit(task, loader(batches(runner.global_rank, 4)), held_out)
    runner.test(task, held_out, verbose=False)
    return task.decisions, {name: float(value) for name, value in runner.callback_metrics.items()}


def logged(folder) -> list[dict[str, float]]:
    with open(Path(folder) / "metrics.csv") as file:
        return [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(file)]


def numbers(total) -> dict[str, float]:
    """The table of the docstring, layer by layer."""
    imbalance = [max(layer) / (sum(layer) / EXPERTS) for layer in total.tolist()]
    return {
        "imbalance": sum(imbalance) / LAYERS,
        "imbalance_max": max(imbalance),
        "dead_experts": sum(layer.count(0) for layer in total.tolist()),
        "dropped_tokens": 0.0,
        "model.layers.1.moe/imbalance": imbalance[1],
    }


def assert_logged(row: dict[str, float], stage: str, total) -> None:
    for name, value in numbers(total).items():
        assert row[f"{stage}/expert_load/{name}"] == pytest.approx(value), name
    assert 0 < row[f"{stage}/expert_load/entropy_min"] <= row[f"{stage}/expert_load/entropy"] <= 1


@pytest.mark.parametrize("name", ["chunked", "ddp"])
def test_every_log_of_a_training_is_the_plain_count(name, tmp_path):
    by_rank = run(fit, 2, name, str(tmp_path), init=False)
    decisions = [result[0] for result in by_rank]
    folder = tmp_path / "lightning_logs" / "version_0"
    rows = logged(folder)
    micro_batches = list(counts(decisions))
    assert len(micro_batches) == STEPS * ACCUMULATE
    training = [row for row in rows if "train/expert_load/imbalance" in row]
    assert [row["step"] for row in training] == [1, 3, 5]
    size = EVERY * ACCUMULATE
    for i, row in enumerate(training):
        assert_logged(row, "train", sum(micro_batches[i * size : (i + 1) * size]))
    evaluated = list(counts(decisions, training=False))[1:]  # the first is the sanity check
    validations = [row for row in rows if "val/expert_load/imbalance" in row]
    assert len(validations) == STEPS // 2
    for i, row in enumerate(validations):
        assert_logged(row, "val", sum(evaluated[3 * i : 3 * i + 3]))
    (tested,) = (row for row in rows if "test/expert_load/imbalance" in row)
    assert_logged(tested, "test", sum(evaluated[9:]))
    assert all(
        result[1]["test/expert_load/imbalance"] == pytest.approx(tested["test/expert_load/imbalance"])
        for result in by_rank
    )
    for stage in ("train", "val", "test"):
        assert imread(folder / "expert_load" / f"{stage}.png").ndim == 3


def fit_save_and_resume(folder):
    """Two epochs of three steps and then one more, and the same without a stop; a log every four steps."""
    totals = []
    for version, (epochs, resume) in enumerate([(2, False), (3, True), (3, False)]):
        monitor, logger = ExpertLoadMonitor(log_every_n_steps=4), CSVLogger(folder, version=version)
        runner = trainer(strategy("chunked"), 2, logger=logger, callbacks=[monitor], max_epochs=epochs)
        ids = loader(batches(runner.global_rank, 3))
        runner.fit(Task(), ids, ckpt_path=f"{folder}/checkpoint" if resume else None)
        if version == 0:
            runner.save_checkpoint(f"{folder}/checkpoint")
        totals.append({name: slots.tolist() for name, slots in monitor.state_dict()["logged"].items()})
    return totals


def test_a_resumed_run_logs_what_an_uninterrupted_one_does(tmp_path):
    for first, resumed, uninterrupted in run(fit_save_and_resume, 2, str(tmp_path), init=False):
        assert resumed == uninterrupted
        steps = [sum(map(sum, totals.values())) / (2 * 10 * 3 * LAYERS) for totals in (first, resumed)]
        assert steps == [4, 8]
    rows = [logged(tmp_path / "lightning_logs" / f"version_{version}") for version in (1, 2)]
    assert rows[0][-1] == rows[1][-1]
    assert rows[0][-1]["step"] == 7


def hooks(model) -> list[int]:
    return [len(module._routing_hooks) for module in model.modules() if isinstance(module, MoELayer)]


def test_a_failed_run_leaves_nothing_behind_and_the_next_one_is_right(tmp_path):
    monitor = ExpertLoadMonitor(log_every_n_steps=1)
    task = Task(fail_at=2)
    options = {"default_root_dir": tmp_path, "callbacks": [monitor]}
    with pytest.raises(RuntimeError, match="on purpose"):
        trainer("auto", 1, **options).fit(task, loader(batches(0, 4)))
    assert hooks(task) == [0, 0]
    task.fail_at = None
    trainer("auto", 1, **options).fit(task, loader(batches(0, 4)), loader(batches(0, 1)))
    assert hooks(task) == [0, 0]
    total = sum(counts([task.decisions])) - list(counts([task.decisions]))[2]  # the step that failed was never logged
    assert [monitor._logged[True][f"model.layers.{i}.moe"][1:].tolist() for i in range(LAYERS)] == total.tolist()


def train_with_fabric(folder):
    monitor = ExpertLoadMonitor(log_every_n_steps=2)
    logger = FabricCSVLogger(folder, name="logs", version=0)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=ChunkedEPStrategy(2), callbacks=[monitor], loggers=[logger])
    fabric.launch()
    model, decisions = decoder(), []
    write_down(model, decisions)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.1))
    for i, ids in enumerate(batches(fabric.global_rank, 5)):
        fabric.backward(model(ids).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if i == 2:  # between two logs
            fabric.save(f"{folder}/checkpoint", {"model": model, "monitor": monitor})
    model.eval()
    with torch.no_grad():
        model(batches(fabric.global_rank, 1, seed=1)[0])
    fabric.call("on_validation_end")
    fabric.call("save_heatmap", f"{folder}/chart/train.png")
    logger.finalize("success")
    fabric.call("on_train_end")
    other = ExpertLoadMonitor()
    state = {"model": model, "monitor": None}
    fabric.load(f"{folder}/checkpoint", state)
    other.load_state_dict(state["monitor"])  # Lightning does not, from a folder
    with other.watch(model.module):
        restored = other.compute()
    return decisions, restored, [len(layer.moe._routing_hooks) for layer in model.module.layers]


def test_fabric_logs_by_itself(tmp_path):
    by_rank = run(train_with_fabric, 2, str(tmp_path), init=False)
    decisions = [result[0] for result in by_rank]
    micro_batches = list(counts(decisions))
    rows = logged(tmp_path / "logs" / "version_0")
    assert [row["step"] for row in rows] == [2, 4, 5]
    for i, row in enumerate(rows[:2]):
        row |= {
            "train/expert_load/model.layers.1.moe/imbalance": numbers(sum(micro_batches[2 * i : 2 * i + 2]))[
                "model.layers.1.moe/imbalance"
            ]
        }
        assert_logged(row, "train", sum(micro_batches[2 * i : 2 * i + 2]))
    (evaluated,) = counts(decisions, training=False)
    assert rows[2]["val/expert_load/imbalance"] == pytest.approx(numbers(evaluated)["imbalance"])
    assert imread(tmp_path / "chart" / "train.png").ndim == 3
    for _, restored, left in by_rank:
        assert restored["train/expert_load/imbalance"] == pytest.approx(numbers(micro_batches[2])["imbalance"])
        assert left == [1, 1]  # the strategy's own


def test_hugging_faces_routers_are_watched_once_where_layers_run_again():
    model = qwen3_moe(torch.float32)
    blocks, chosen = swap_blocks(model), []
    for block in blocks:
        block.layer.experts.distribute(LocalDispatcher(), 2, "full")
        block.layer.gate.register_forward_hook(lambda *call: chosen.append(call[-1][2]))
    model.train().gradient_checkpointing_enable({"use_reentrant": False})
    monitor = ExpertLoadMonitor()
    with monitor.watch(model):
        model(input_ids=batch(0), labels=batch(0), use_cache=False).loss.backward()
        logged = monitor.compute()
    assert len(chosen) == 4, "each router ran again in backward"
    imbalance = [torch.bincount(ids.flatten(), minlength=8).max().item() / (21 * 3 / 8) for ids in chosen[:2]]
    assert logged["train/expert_load/imbalance"] == pytest.approx(sum(imbalance) / 2)
    assert list(monitor.state_dict()["logged"]) == [block.name for block in blocks]


def test_the_heatmap_shows_loads_over_an_even_share():
    figure = Figure()
    draw({"one": torch.tensor([4, 0, 2, 2]), "two": torch.tensor([3, 1])}, "title", figure)
    image = figure.axes[0].images[0].get_array()
    assert image[0].tolist() == [2, 0, 1, 1]
    assert image[1, :2].tolist() == [1.5, 0.5]
    assert image.mask[1].tolist() == [False, False, True, True]
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["one", "two"]


def test_without_matplotlib_it_warns_and_goes_on(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monitor, model = ExpertLoadMonitor(), decoder()
    with monitor.watch(model):
        model(batches(0, 1)[0])
        with pytest.warns(UserWarning, match="pip install matplotlib"):
            monitor.save_heatmap(tmp_path / "train.png")
        assert monitor.compute()["train/expert_load/imbalance"] >= 1
        assert monitor.compute() == {}
        copy.deepcopy(model)(batches(0, 1)[0])
        assert monitor.compute() == {}, "copies are not watched"
    assert not list(tmp_path.iterdir())


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="`log_every_n_steps` to be positive but got 0"):
        ExpertLoadMonitor(0)
    with pytest.raises(ValueError, match="`Linear` has no MoE layer"):
        ExpertLoadMonitor().attach(torch.nn.Linear(2, 2))
