"""`MemoryMonitor` where people use it: in the Trainer and in Fabric, over ranks, resumed, and after an error."""

from __future__ import annotations

import importlib.util

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers.logger import DummyLogger
from torch import nn
from torch.optim import optimizer as torch_optimizer

from helpers.decoder import VOCABULARY, Decoder
from helpers.processes import run
from helpers.training import loader, trainer
from lightning_moe import ChunkedEPStrategy
from lightning_moe.callbacks import MemoryMonitor
from lightning_moe.callbacks.memory import _MOST_ROWS, _halved
from lightning_moe.memory.summary import GIB
from lightning_moe.overlap import primitives
from lightning_moe.overlap.function import watchers

DRAWS = importlib.util.find_spec("matplotlib") is not None
BATCHES = torch.randint(VOCABULARY, (8, 2, 12), generator=torch.Generator().manual_seed(5))


class Recorder(DummyLogger):
    group_separator = "."

    def __init__(self):
        super().__init__()
        self.logged: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics, step=None):
        if any(name.startswith("memory") for name in metrics):
            self.logged.append((step, metrics))


class Task(LightningModule):
    def __init__(self):
        super().__init__()
        self.model = Decoder(dropout=0.0)
        self.losses: list[float] = []

    def training_step(self, ids):
        loss = nn.functional.cross_entropy(self.model(ids).flatten(0, 1), ids.flatten())
        self.losses.append(loss.item())
        return loss

    def validation_step(self, ids):
        self.model(ids)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2)


class ByHand(Task):
    """Two microbatches a step, by manual optimization."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, ids):
        for part in ids:
            self.manual_backward(super().training_step(part[None]))
        self.optimizers().step()
        self.optimizers().zero_grad()


def hooks_of(model):
    hooks = [[*m._forward_hooks.values(), *m._forward_pre_hooks.values()] for m in model.modules()]
    return sum(map(len, hooks)), len(watchers), len(torch_optimizer._global_optimizer_pre_hooks)


def test_trainer_logs_and_resumes_and_draws(tmp_path):
    recorder, monitor = Recorder(), MemoryMonitor(2, tmp_path)
    first = Task()
    runner = trainer("auto", 1, callbacks=[monitor], logger=[recorder], accumulate_grad_batches=2, max_steps=2)
    runner.fit(first, loader(BATCHES), loader(BATCHES[:1]))
    (step, metrics), *more = recorder.logged
    assert (step, more) == (1, [])  # the second step, where Lightning logs its own metrics of it
    size = sum(p.numel() * 4 for p in first.parameters()) / GIB
    for phase in ("forward", "backward", "optimizer"):
        assert metrics[f"memory.{phase}.parameters"] == size
        assert metrics["memory.peak_rss"] >= metrics[f"memory.{phase}.peak_rss"] > 0.05
    # a second microbatch begins with the first one's gradients
    assert metrics["memory.optimizer.gradients"] == size
    assert metrics["memory.expert_rows"] == BATCHES[0].numel() * 3
    assert not DRAWS or (tmp_path / "timeline.png").read_bytes()[:4] == b"\x89PNG"
    assert hooks_of(first) == (0, 0, 0)

    runner.save_checkpoint(tmp_path / "last.ckpt")
    again = MemoryMonitor(2, None)
    runner = trainer("auto", 1, callbacks=[again], accumulate_grad_batches=2, max_steps=4, max_epochs=2)
    runner.fit(Task(), loader(BATCHES), ckpt_path=tmp_path / "last.ckpt")
    assert [row["step"] for row in again.history] == [1, 3]
    assert again.history[0] == {"step": 1} | {name[7:].replace(".", "/"): value for name, value in metrics.items()}


def test_manual_optimization_and_losses_are_as_without_it():
    losses = []
    for callbacks in ([], [MemoryMonitor(1, None)]):
        task = ByHand()
        trainer("auto", 1, callbacks=callbacks).fit(task, loader(BATCHES[:3]))
        losses.append(task.losses)
    assert losses[0] == losses[1]
    assert len(losses[0]) == 6
    assert [row["step"] for row in callbacks[0].history] == [0, 1, 2]
    assert all(row[f"{phase}/peak_rss"] > 0 for row in callbacks[0].history for phase in ("forward", "backward"))


def out_of_memory_in_attention(task, _):
    calls = []

    def allocate(*_):
        calls.append(None)
        if len(calls) == 4:
            torch.empty(1 << 60, dtype=torch.uint8)

    task.model.layers[1].attention.out.register_forward_hook(allocate)
    return "in forward, in `model.layers.1`, after 3 steps"


def out_of_memory_in_backward(task, monkeypatch):
    backward, calls = primitives.backward, []

    def allocate(*args):
        calls.append(None)
        if len(calls) == 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1024.00 GiB.")
        return backward(*args)

    monkeypatch.setattr(primitives, "backward", allocate)
    return "in backward, in `model.layers.0.moe.experts`, after 1 steps"


@pytest.mark.parametrize("fail", [out_of_memory_in_attention, out_of_memory_in_backward])
def test_running_out_of_memory_is_explained_and_leaves_nothing_behind(fail, monkeypatch, tmp_path):
    task, monitor = Task(), MemoryMonitor(1, tmp_path)
    place = fail(task, monkeypatch)
    before = hooks_of(task)
    with pytest.raises(RuntimeError) as caught:
        trainer("auto", 1, callbacks=[monitor]).fit(task, loader(BATCHES))
    (note,) = caught.value.__notes__
    assert place in note
    assert "to change" in note
    assert ("tokens: 24 on this rank; its experts here had 72 rows" in note) == ("experts" in place)
    assert hooks_of(task) == before
    assert (tmp_path / "timeline.png").exists() == DRAWS

    monkeypatch.undo()
    other = Task()
    trainer("auto", 1, callbacks=[monitor]).fit(other, loader(BATCHES))
    plain = Task()
    trainer("auto", 1).fit(plain, loader(BATCHES))
    assert other.losses == plain.losses
    assert monitor.history[-1]["step"] == len(BATCHES) - 1


def test_other_errors_get_no_note(tmp_path):
    model, monitor = Decoder(), MemoryMonitor(1, tmp_path)

    def fail():
        with monitor.watch(model):
            assert hooks_of(model) != (0, 0, 0)
            raise ValueError("not memory")

    with pytest.raises(ValueError, match="^not memory$") as caught:
        fail()
    assert not hasattr(caught.value, "__notes__")
    assert hooks_of(model) == (0, 0, 0)


def test_a_history_of_another_device_is_kept_and_left_out_of_the_chart(tmp_path):
    model, monitor = Decoder(), MemoryMonitor(1, tmp_path)
    on_gpu = [{"step": i, "peak_allocated": 1.0, "forward/peak_allocated": 1.0} for i in range(_MOST_ROWS)]
    monitor.load_state_dict({"step": _MOST_ROWS, "history": on_gpu})
    optimizer = torch.optim.SGD(model.parameters())
    with monitor.watch(model):
        model(BATCHES[0]).sum().backward()
        optimizer.step()
    assert len(monitor.history) == _MOST_ROWS // 2 + 1
    assert monitor.history[-1]["step"] == _MOST_ROWS + 1
    assert (tmp_path / "timeline.png").exists() == DRAWS
    pairs = [{"step": i, "peak_rss": peak} for i, peak in enumerate([1.0, 2.0, 2.0, 1.0, 0.5])]
    assert [row["step"] for row in _halved([*pairs[:3], {"step": 9}, pairs[4]], "peak_rss")] == [1, 2, 4]


def test_no_timeline_is_no_error(tmp_path):
    (tmp_path / "file").touch()
    monitor = MemoryMonitor(1, tmp_path / "file" / "folder")
    with pytest.warns(UserWarning, match="draws no timeline.*that can be written to"):
        trainer("auto", 1, callbacks=[monitor]).fit(Task(), loader(BATCHES[:1]))


def test_arguments():
    for wrong in (0, 1.5, True, "2"):
        with pytest.raises(ValueError, match="`every_n_steps` to be an integer of at least 1"):
            MemoryMonitor(wrong)
    with pytest.raises(ValueError, match="`record_history=True` needs a `folder`"):
        MemoryMonitor(folder=None, record_history=True)
    with pytest.raises(ValueError, match="parameters are none.*that is set up"):
        MemoryMonitor().attach(nn.ReLU())
    with torch.device("meta"), pytest.raises(ValueError, match="on the meta device"):
        MemoryMonitor().attach(nn.Linear(2, 2))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_allocators_history_is_recorded_only_where_it_is_asked_for(tmp_path):
    for asked in (False, True):
        monitor = MemoryMonitor(1, tmp_path, record_history=asked)
        with monitor.watch(nn.Linear(2, 2, device="cuda")):
            assert torch._C._cuda_isHistoryEnabled() == asked
        assert not torch._C._cuda_isHistoryEnabled()


# --- over ranks


def rows_by_rank(model, ids, num_experts=8):
    """Of each rank's fullest layer, counted from what the routers say: rank r holds the r-th part of the experts."""
    chosen = []
    handles = [
        layer.moe.router.register_forward_hook(lambda *args: chosen.append(args[2].ids_TK)) for layer in model.layers
    ]
    with torch.no_grad():
        model(ids)
    for handle in handles:
        handle.remove()
    size, (counts,) = (
        dist.get_world_size(),
        [torch.stack([torch.bincount(i.flatten(), minlength=num_experts) for i in chosen])],
    )
    dist.all_reduce(counts)
    return counts.unflatten(1, (size, -1)).sum(-1).amax(0).tolist()


def two_ranks(folder):
    recorder, monitor = Recorder(), MemoryMonitor(2, None)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=ChunkedEPStrategy(2), callbacks=[monitor])
    fabric.launch()
    rank = fabric.global_rank
    fabric._loggers = [recorder] if rank == 0 else []
    model = Decoder(dropout=0.0)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.0, momentum=0.9))
    ids = BATCHES[rank]
    for _ in range(3):
        for last in (False, True):
            with fabric.no_backward_sync(model, enabled=not last):
                fabric.backward(nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()))
        optimizer.step()
        optimizer.zero_grad()
    fabric.save(folder / "checkpoint", {"model": model, "optimizer": optimizer, "memory": monitor})
    resumed = MemoryMonitor(2, None)
    state = {"model": model, "optimizer": optimizer, "memory": None}
    fabric.load(folder / "checkpoint", state)
    resumed.load_state_dict(state["memory"])
    fabric.call("on_train_end")
    local = [sum(p.to_local().nbytes for p in model.parameters())] * 2
    dist.all_gather_object(local, local[0])
    expected = {"local": local, "rows": rows_by_rank(model.module, ids), "hooks": hooks_of(model)[1:]}

    data_parallel = MemoryMonitor(1, None)
    runner = trainer("ddp", 2, callbacks=[data_parallel], logger=[Recorder()] if rank == 0 else False)
    runner.fit(Task(), loader(BATCHES[rank::2]))
    return monitor.history, resumed.history, recorder.logged, expected, data_parallel.history


def test_over_ranks_and_through_checkpoints(tmp_path):
    ranks = run(two_ranks, 2, tmp_path, init=False)
    for history, resumed, logged, expected, data_parallel in ranks:
        (row,) = history
        assert history == resumed == ranks[0][0]
        assert len(logged) == (expected is ranks[0][3])
        assert (row["expert_rows"], row["expert_rows_spread"]) == (
            max(expected["rows"]),
            max(expected["rows"]) - min(expected["rows"]),
        )
        # the root's parameters stay gathered between forward and backward, the others are shards everywhere
        assert row["optimizer/parameters"] * GIB in expected["local"]
        assert row["optimizer/optimizer_state"] == row["optimizer/gradients"] == row["optimizer/parameters"]
        assert row["forward/gradients"] > row["optimizer/gradients"]  # the first microbatch's are not reduced yet
        assert expected["hooks"] == (0, 0)
        whole = sum(p.numel() * 4 for p in Decoder().parameters()) / GIB
        assert [r["step"] for r in data_parallel] == [0, 1, 2, 3]
        assert {r["optimizer/parameters"] for r in data_parallel} == {whole}
        assert data_parallel[0]["expert_rows_spread"] == 0  # every rank has all experts
