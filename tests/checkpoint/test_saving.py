"""Saving: in place only once complete, beside training, filtered; and what becomes of it when it is loaded."""

from __future__ import annotations

import resource
import threading
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from helpers.models import full, qwen3_moe
from helpers.processes import run
from helpers.training import Task, loader, my_share, trainer
from lightning_moe import ChunkedEPStrategy
from lightning_moe.checkpoint import background, save
from lightning_moe.checkpoint.background import Saves
from lightning_moe.checkpoint.load import load_checkpoint, load_weights


class Counter:
    """Has a state that can be restored in place."""

    def __init__(self, count):
        self.count = count

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def weights_of(module):
    return {name: full(p).clone() for name, p in module.named_parameters()}


def same(weights, others):
    return all(torch.equal(weights[name], others[name]) for name in others)


def step(fabric, state):
    ids = my_share(1, fabric.global_rank, 2)[0]
    fabric.backward(state["model"](input_ids=ids, labels=ids).loss)
    state["optimizer"].step()
    state["optimizer"].zero_grad()


def new(sharded=True, asynchronously=False, seed=1):
    strategy = ChunkedEPStrategy(
        2,
        save_distributed_checkpoint=sharded,
        save_asynchronously=asynchronously,
        timeout=timedelta(minutes=1),
    )
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    model = qwen3_moe(torch.float32, seed=seed)
    model.model.layers[0].mlp.experts.requires_grad_(False)  # has no state
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    state = {"model": model, "optimizer": optimizer, "counter": Counter(seed), "epoch": seed}
    step(fabric, state)
    return fabric, state


def error_of(function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@contextmanager
def full_disk():
    """No file of this process may grow beyond a kilobyte: writing fails in the kernel, as where there is no space."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def no_space(*args, **kwargs):
    raise OSError(28, "No space left on device")


def restore_and_filter(folder, sharded):
    """Into objects and numbers; what a filter left out; and a bare state dict."""
    fabric, state = new(sharded)
    saved = weights_of(state["model"].module)
    fabric.save(folder / "all", state)
    fabric.save(folder / "some", state, filter={"model": lambda name, _: "lm_head" not in name})

    other, fresh = new(sharded, seed=2)
    counter = fresh["counter"]
    assert other.load(folder / "all", fresh | {"counter": counter}) == {}
    other.load(folder / "all", fresh)
    assert (fresh["counter"] is counter, counter.count, fresh["epoch"]) == (True, 1, 1)
    assert same(weights_of(fresh["model"].module), saved)
    step(fabric, state)
    step(other, fresh)
    assert same(weights_of(fresh["model"].module), weights_of(state["model"].module))

    _, fresh = new(sharded, seed=2)
    head = full(fresh["model"].module.lm_head.weight)
    assert "it lacks `lm_head.weight`" in error_of(other.load, folder / "some", fresh)
    assert "contains a key 'more'" in error_of(other.load, folder / "all", fresh | {"more": 0})
    rest = other.load(folder / "some", {"model": fresh["model"], "more": 0}, strict=False)
    assert rest["epoch"] == 1
    weights = weights_of(fresh["model"].module)
    assert torch.equal(weights.pop("lm_head.weight"), head)
    assert all(torch.equal(value, saved[name]) for name, value in weights.items())

    fabric.barrier()
    torch.save(saved, folder / f"raw-{fabric.global_rank}")
    _, fresh = new(sharded, seed=2)
    other.load_raw(folder / f"raw-{fabric.global_rank}", fresh["model"])
    assert same(weights_of(fresh["model"].module), saved)
    assert "There is no file at" in error_of(other.load_raw, folder / "nothing", fresh["model"])


def fail_to_save(folder, sharded, asynchronously):
    """A disk that is full leaves the checkpoint that was there, and all ranks hear of it."""
    fabric, state = new(sharded, asynchronously)
    path = folder / f"kept-{asynchronously}"
    fabric.save(path, state)
    fabric.strategy.wait_for_save()
    saved = weights_of(state["model"].module)
    step(fabric, state)
    failing = 1 if sharded else 0
    with full_disk() if fabric.global_rank == failing else nullcontext():
        said = error_of(fabric.save, path, state)
        if asynchronously:
            assert said == "no error"
            said = error_of(fabric.strategy.wait_for_save)
    assert f"{path} could not be saved: " in said
    assert said.endswith("OSError: [Errno 27] File too large"), said
    assert sharded or said.startswith("RuntimeError: Rank 0 failed: ") == (fabric.global_rank == 1)
    _, fresh = new(sharded, seed=2)
    fabric.load(path, fresh)
    assert same(weights_of(fresh["model"].module), saved)
    fabric.save(path, state)  # and the next time there is space
    fabric.load(path, fresh)
    assert same(weights_of(fresh["model"].module), weights_of(state["model"].module))

    (folder / "mine").mkdir(exist_ok=True)
    (folder / "mine" / "notes").write_text("")
    said = error_of(fabric.save, folder / "mine", state)
    if asynchronously:
        said = error_of(fabric.strategy.wait_for_save)
    assert "is a folder, and no checkpoint" in said
    assert (folder / "mine" / "notes").exists()


def save_beside(folder, sharded):
    """What is saved is what was there when `save` was called, whatever training does until it is written."""
    gate = threading.Event()

    def waiting(write):
        def gated(*args):
            assert threading.current_thread() is not threading.main_thread()
            assert gate.wait(60)
            write(*args)

        return gated

    names = ("save_folder", "on_first_rank")
    originals = [getattr(background, name) for name in names]
    for name, original in zip(names, originals, strict=True):
        setattr(background, name, waiting(original))
    fabric, state = new(sharded, asynchronously=True)
    saved = weights_of(state["model"].module)
    fabric.save(folder / "beside", state)
    assert not (folder / "beside").exists()
    step(fabric, state)  # its collectives and those of the save meet nowhere
    gate.set()
    _, fresh = new(sharded, seed=2)
    fabric.load(folder / "beside", fresh)  # waits
    assert same(weights_of(fresh["model"].module), saved)
    assert not same(weights_of(state["model"].module), saved)
    for name, original in zip(names, originals, strict=True):
        setattr(background, name, original)


def all_of(folder, sharded):
    folder = Path(folder)
    restore_and_filter(folder, sharded)
    for asynchronously in (False, True):
        fail_to_save(folder, sharded, asynchronously)
    save_beside(folder, sharded)
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))


@pytest.mark.parametrize("sharded", [True, False], ids=["folder", "file"])
def test_fabric(sharded, tmp_path):
    for left in run(all_of, 2, str(tmp_path), sharded, init=False):
        assert left == [], "nothing half-written is left behind"


class Stateless(Task):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def keep_the_last(folder, sharded, save_last):
    strategy = ChunkedEPStrategy(2, save_distributed_checkpoint=sharded, save_asynchronously=True)
    saving = ModelCheckpoint(folder, "{epoch}", save_top_k=1, save_last=save_last)
    runner = trainer(strategy, 2, max_epochs=3, enable_checkpointing=True, callbacks=[saving])
    batches = loader(my_share(1, runner.global_rank, 2, 2))
    task = Stateless()
    runner.fit(task, batches)
    assert not strategy._saves._jobs
    torch.distributed.barrier()  # rank 0 removes
    names = sorted(path.name for path in Path(folder).iterdir())
    strategy = ChunkedEPStrategy(2, save_distributed_checkpoint=sharded)
    later = trainer(
        strategy, 2, max_epochs=4, enable_checkpointing=True, callbacks=[ModelCheckpoint(folder, save_last=True)]
    )
    resumed = Stateless()
    later.validate(resumed, batches, ckpt_path="last", verbose=False)
    equal = same(weights_of(resumed.model), weights_of(task.model))
    later.fit(resumed, batches, ckpt_path="last")
    with full_disk():
        said = error_of(later.save_checkpoint, f"{folder}/epoch=2.ckpt")
    assert "epoch=2.ckpt could not be saved: " in said
    assert "OSError: [Errno 27] File too large" in said
    later.strategy._save_distributed_checkpoint = not sharded  # one format in the place of the other
    later.save_checkpoint(f"{folder}/epoch=2.ckpt")
    assert Path(folder, "epoch=2.ckpt").is_dir() != sharded
    later.validate(resumed, batches, ckpt_path=f"{folder}/epoch=2.ckpt", verbose=False)
    return names, equal, later.global_step, len(resumed.losses)


@pytest.mark.parametrize(("sharded", "save_last"), [(True, "link"), (False, True)])
def test_model_checkpoint_keeps_the_last(sharded, save_last, tmp_path):
    """Beside training too, an old checkpoint goes when the new one is there; and an optimizer without state resumes."""
    for names, equal, steps, resumed_steps in run(keep_the_last, 2, str(tmp_path), sharded, save_last, init=False):
        assert names == ["epoch=2.ckpt", "last.ckpt"]
        assert equal
        assert (steps, resumed_steps) == (8, 2)


def test_after_a_failure_nothing_runs_until_it_was_told():
    saves, ran = Saves(beside=True, timeout=None), []
    saves.then(lambda: ran.append("first"))
    saves.then(no_space)
    saves.then(lambda: ran.append("removed the old one"))
    with pytest.raises(OSError, match="No space left"):
        saves.wait()
    saves.then(lambda: ran.append("next"))
    saves.wait()
    assert ran == ["first", "next"]


def test_an_old_checkpoint_that_cannot_be_removed_is_no_failure(tmp_path, caplog):
    """It would be one on rank 0 alone."""
    strategy = ChunkedEPStrategy(save_asynchronously=True)
    task = trainer(strategy, 1)
    assert task.strategy is strategy

    def refuse(path):
        raise PermissionError(13, "Permission denied")

    strategy.checkpoint_io.remove_checkpoint = refuse
    strategy.remove_checkpoint(tmp_path / "old")
    strategy.wait_for_save()
    assert "old could not be removed: PermissionError" in caplog.text


def test_the_thread_works_on_this_ranks_device(monkeypatch):
    """A new thread of torch is on device 0, and what it asks CUDA for would open a context there."""
    asked = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: asked.append((threading.current_thread().name, device))
    )
    saves = Saves(beside=True, timeout=None)
    saves.then(lambda: None)
    saves.wait()
    assert asked == [("checkpoint_0", 3)]


class Scaled(nn.Linear):
    """Has state beside parameters and buffers."""

    def __init__(self):
        super().__init__(3, 3)
        self.scale = torch.rand(2)

    def get_extra_state(self):
        return self.scale.clone()

    def set_extra_state(self, state):
        self.scale = state


class PartlyCompiled(nn.Module):
    def __init__(self):
        super().__init__()
        self.plain = Scaled()
        self.compiled = torch.compile(Scaled())
        self.again = self.compiled


@pytest.mark.filterwarnings("ignore:.*single process")
def test_submodules_that_torch_compile_wrapped(tmp_path):
    """Their names in checkpoints are not those that they load under."""
    saved = PartlyCompiled()
    state, rest = save.state_dicts({"model": saved}, False, {})
    save.save_folder(tmp_path / "folder", state, save.packed(rest))
    save.save_file(tmp_path / "file", state)
    save.save_file(tmp_path / "weights", state["model"])
    loads = {
        "folder": lambda path, model: load_checkpoint(path, {"model": model}, {}),
        "file": lambda path, model: load_checkpoint(path, {"model": model}, {}),
        "weights": load_weights,
    }
    for name, load in loads.items():
        model = PartlyCompiled()
        load(tmp_path / name, model)
        assert all(map(torch.equal, model.parameters(), saved.parameters())), name
        assert torch.equal(model.plain.scale, saved.plain.scale), name
        assert torch.equal(model.compiled._orig_mod.scale, saved.compiled._orig_mod.scale), name
