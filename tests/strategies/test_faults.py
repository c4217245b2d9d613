"""One rank fails, or all are asked to end: everybody ends, in time, with a message, and the last checkpoint resumes exactly."""

from __future__ import annotations

import os
import signal
import sys
import traceback

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment

from helpers.models import full, qwen3_moe
from helpers.processes import run
from helpers.training import LEARNING_RATE, Task, loader, my_share, trainer
from lightning_moe import ChunkedEPStrategy
from lightning_moe.buffers import held_bytes
from lightning_moe.strategies import failure, pytorch

STEPS = 6


def weights_of(module):
    return {name: full(p) for name, p in module.named_parameters()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def count_releases():
    """A list that grows by one whenever buffers are given back, which takes all ranks."""
    released = []
    pytorch.release_buffers = lambda: released.append(1)
    return released


# --- a rank is killed, in Fabric


def train(fabric, folder, resume=False, killed=None):
    """Train to the last step, with a checkpoint every two; one rank may be killed in the fourth."""
    model = qwen3_moe(torch.float32)
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), LEARNING_RATE))
    state = {"model": model, "optimizer": optimizer, "step": 0}
    if resume:
        fabric.load(f"{folder}/checkpoint", state)
    for step, ids in enumerate(my_share(1, fabric.global_rank, 2, STEPS)):
        if step < state["step"]:
            continue
        loss = model(input_ids=ids, labels=ids).loss
        if step == 3 and fabric.global_rank == killed:
            os.kill(os.getpid(), signal.SIGKILL)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=0.3)
        optimizer.step()
        optimizer.zero_grad()
        state["step"] += 1
        if folder and step % 2:
            fabric.save(f"{folder}/checkpoint", state)
    return weights_of(model.module)


def launched():
    fabric = Fabric(accelerator="cpu", devices=2, strategy=ChunkedEPStrategy())
    fabric.launch()
    return fabric


def killed_in_a_step(folder, rank):
    fabric = launched()
    try:
        train(fabric, folder, killed=rank)
    except RuntimeError as error:
        sys.excepthook(type(error), error, error.__traceback__)  # what Python does where nobody catches
        return traceback.format_exc()


def resumed_and_uninterrupted(folder):
    fabric = launched()
    return train(fabric, folder, resume=True), train(fabric, None)


def test_a_killed_rank(tmp_path):
    exit_code, message = run(killed_in_a_step, 2, str(tmp_path), 0, init=False, killed=(0,), timeout=90)
    assert exit_code == -signal.SIGKILL
    assert "Rank 0 has ended" in message, "it kept what ranks tell each other"
    message, exit_code = run(killed_in_a_step, 2, str(tmp_path), 1, init=False, killed=(1,), timeout=90)
    assert exit_code == -signal.SIGKILL
    assert "Nothing was heard of rank 1: killed from outside" in message
    for resumed, uninterrupted in run(resumed_and_uninterrupted, 2, str(tmp_path), init=False):
        assert same(resumed, uninterrupted)


# --- an exception on one rank, in the Trainer


class Failing(Task):
    def training_step(self, ids):
        if self.global_step == 2 and self.trainer.global_rank == 1:
            raise KeyError("a sample that is not there")
        return super().training_step(ids)


def exception_on_one_rank(folder):
    released = count_releases()
    callback = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_on_exception=True)
    runner = trainer(ChunkedEPStrategy(), 2, callbacks=[callback], enable_checkpointing=True)
    try:
        runner.fit(Failing(), loader(my_share(1, runner.global_rank, 2, STEPS)))
    except Exception:
        return traceback.format_exc(), released
    return None


def test_an_exception_on_one_rank(tmp_path):
    (lost, released), (failed, also_released) = run(exception_on_one_rank, 2, str(tmp_path), init=False, timeout=90)
    assert "KeyError: 'a sample that is not there'" in failed
    assert "This rank lost a peer, since rank 1 failed with KeyError: 'a sample that is not there'." in lost
    assert released == also_released == [], "peers would not take part"
    assert [path.name for path in tmp_path.iterdir()] == ["step=2.ckpt"], "nothing was saved after the exception"


# --- SLURM: launch, requeue at the end of a job's time, SIGTERM; resume


class Signalled(Task):
    """At these steps, in the middle of one, signals reach one rank."""

    def __init__(self, signals=()):
        super().__init__()
        self.signals = dict(signals)

    def training_step(self, ids):
        # a batch for each step, also after a resume, which starts the loader anew
        loss = super().training_step(my_share(1, self.trainer.global_rank, 2, STEPS)[self.global_step])
        rank, signum = self.signals.pop(self.global_step, (None, None))
        if rank == self.trainer.global_rank:
            os.kill(os.getpid(), signum)
        return loss

    def validation_step(self, ids):
        super().validation_step(ids)
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("an evaluation ends at once")


def under_slurm(folder):
    rank = os.environ["RANK"]
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RUN_ID"):
        del os.environ[name]
    os.environ.update(
        SLURM_NTASKS="2",
        SLURM_NTASKS_PER_NODE="2",
        SLURM_PROCID=rank,
        SLURM_LOCALID=rank,
        SLURM_NODEID="0",
        SLURM_NODELIST="127.0.0.1",
        SLURM_JOB_ID="12345",
        SLURM_JOB_NAME="train",
        PATH=f"{folder}/bin:{os.environ['PATH']}",
    )
    released = count_releases()

    def fit(signals=(), root=folder, ckpt_path=None, **options):
        runner = trainer(ChunkedEPStrategy(), 2, default_root_dir=root, **options)
        assert isinstance(runner._accelerator_connector.cluster_environment, SLURMEnvironment)
        task, released[:] = Signalled(signals), []
        ended = False
        try:
            runner.fit(task, loader(my_share(1, runner.global_rank, 2, STEPS)), ckpt_path=ckpt_path)
        except SystemExit:
            ended = True
        return ended, runner.global_step, len(released), weights_of(task.model)

    # rank 0 hears of the end of the job's time in step 1, and rank 1 of SIGTERM in step 3
    signals = {1: (0, signal.SIGUSR1), 3: (1, signal.SIGTERM)}
    callback = ModelCheckpoint(f"{folder}/saved", filename="{step}", save_on_exception=True)
    interrupted = fit(signals, callbacks=[callback], enable_checkpointing=True)
    requeued = fit()  # Lightning finds what it saved for this
    resumed = fit(root=f"{folder}/elsewhere", ckpt_path=f"{folder}/saved/step=4.ckpt")
    uninterrupted = fit(root=f"{folder}/elsewhere")
    with pytest.raises(SystemExit):
        trainer(ChunkedEPStrategy(), 2, default_root_dir=f"{folder}/elsewhere").validate(
            Signalled(), loader(my_share(1, int(rank), 2))
        )
    equal = [same(run[3], uninterrupted[3]) for run in (interrupted, requeued, resumed)]
    return interrupted[:3], requeued[:3], resumed[:3], uninterrupted[:3], equal


def test_slurm_requeues_and_ends_a_job(tmp_path):
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f"#!/bin/sh\necho $* >> {tmp_path}/requeued\n")
    scontrol.chmod(0o755)
    for interrupted, *others, equal in run(under_slurm, 2, str(tmp_path), init=False, timeout=150):
        assert interrupted == (True, 4, 0), "all ranks end after the step in which one was asked to"
        assert others == [(False, STEPS, 1)] * 3
        assert equal == [False, True, True]
    assert (tmp_path / "requeued").read_text() == "requeue 12345\n"
    assert (tmp_path / "hpc_ckpt_1.ckpt").is_dir()
    assert [path.name for path in (tmp_path / "saved").iterdir()] == ["step=4.ckpt"]


# --- buffers between GPUs


class Watching(Task):
    def on_train_batch_end(self, *_):
        self.held = held_bytes().get("communication", 0)


def held_and_given_back():
    found = []
    for _ in range(2):  # what was given back is taken anew
        runner = trainer(ChunkedEPStrategy(), 2, accelerator="cuda", precision="bf16-true")
        task = Watching()
        runner.fit(task, loader(my_share(1, runner.global_rank, 2, STEPS)))
        found.append((task.held > 0, held_bytes().get("communication", 0), len(task.losses)))
    return found


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_buffers_are_given_back_at_the_end_of_a_fit():
    for found in run(held_and_given_back, 2, device="cuda", init=False):
        assert found == [(True, 0, STEPS)] * 2


def lose_a_peer_after(run_begins: bool) -> str:
    """Rank 1 had an error that somebody caught; then rank 0 loses it for another reason."""
    if dist.get_rank() == 1:
        failure.explain(ValueError("of an earlier run"))
        if run_begins:
            failure.forget()
    dist.barrier()
    if dist.get_rank() == 0:
        failure.explain(error := TimeoutError("no counts"))
        return error.__notes__[0]
    return ""


def test_an_error_of_an_earlier_run_is_not_blamed():
    assert "rank 1 failed with ValueError: of an earlier run" in run(lose_a_peer_after, 2, False)[0]
    assert "Nothing was heard of rank 1" in run(lose_a_peer_after, 2, True)[0]
