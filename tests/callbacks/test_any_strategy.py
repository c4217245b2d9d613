"""All callbacks together under other strategies, in the Trainer, in Fabric and by hand: training is the same to the bit."""

from __future__ import annotations

from contextlib import ExitStack

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy as FabricModelParallelStrategy
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from callbacks.routed import Task, batches, counts, decoder, loader, write_down
from helpers.decoder import Block
from helpers.processes import run
from helpers.training import trainer
from lightning_moe.callbacks import (
    ActivationOffload,
    ExpertLoadMonitor,
    MemoryMonitor,
    ModelOffload,
    RouterBiasBalancer,
)
from lightning_moe.callbacks.anywhere import Anywhere
from lightning_moe.ops.local import local_part

STEPS = 3
HALVES = {"data_parallel_size": 2, "tensor_parallel_size": 1}


def shard(model, mesh):
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


class Sharded(Task):
    def configure_model(self):
        shard(self.model, self.device_mesh)


class Watch(Anywhere):
    """Sees what the device has while the model is away."""

    def __init__(self):
        self.bytes_away: list[int] = []

    def on_train_batch_end(self, trainer, model, *_):
        self.bytes_away.append(sum(local_part(p).untyped_storage().nbytes() for p in model.parameters()))


def with_trainer(strategy, ids, others):
    runner = trainer(ModelParallelStrategy(**HALVES) if strategy == "fsdp2" else strategy, 2, callbacks=others)
    task = Sharded() if strategy == "fsdp2" else Task()
    runner.fit(task, loader(ids))
    return task.model, task.decisions


def with_fabric(strategy, ids, others):
    sharded = FabricModelParallelStrategy(shard, **HALVES)
    fabric = Fabric(
        accelerator="cpu", devices=2, strategy=sharded if strategy == "fsdp2" else strategy, callbacks=others
    )
    fabric.launch()
    plain, decisions = decoder(), []
    write_down(plain, decisions)
    if strategy == "fsdp2":  # Lightning sets up model and optimizer apart there, and calls nothing
        model = fabric.setup_module(plain)
        fabric.call("on_after_setup", fabric=fabric, module=model)
        optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), 0.1))
    else:
        model, optimizer = fabric.setup(plain, torch.optim.SGD(plain.parameters(), 0.1))
    for batch in ids:
        fabric.call("on_train_batch_start")
        fabric.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        fabric.call("on_train_batch_end", None, plain)
    fabric.call("on_train_batch_start")  # brings the model back
    fabric.call("on_train_end")
    return plain, decisions


def in_a_loop(_, ids, callbacks):
    """By calls and context managers, around what Lightning's `FSDPStrategy`, which wants a GPU, makes of a model."""
    plain, decisions = decoder(), []
    write_down(plain, decisions)
    model = FullyShardedDataParallel(
        plain, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu"), use_orig_params=True
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    balancer, *others = callbacks
    with ExitStack() as stack:
        stack.enter_context(balancer.watch(model))
        if others:
            activations, away, watch, memory, load = others
            stack.enter_context(activations.offloader.attached(model))
            stack.enter_context(memory.watch(model))
            stack.enter_context(load.watch(model))
            away.attach(model, [optimizer])
        for batch in ids:
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            balancer.update()
            if others:
                load.compute()
                away.offload()
                watch.on_train_batch_end(None, plain)
                away.reload()
    return plain, decisions


CASES = [
    (with_trainer, "ddp"),
    (with_trainer, "fsdp2"),
    (with_fabric, "ddp"),
    (with_fabric, "fsdp2"),
    (in_a_loop, "fsdp"),
]


def everything():
    """For each way and strategy: weights and biases without and with the callbacks, decisions, and what was seen."""
    result, ids = {}, batches(dist.get_rank(), STEPS)
    for train, strategy in CASES:
        offload, memory = ActivationOffload(min_bytes=1), MemoryMonitor(1, None)
        load, watch = ExpertLoadMonitor(log_every_n_steps=1), Watch()
        others = [offload, ModelOffload("on_train_batch_end", "on_train_batch_start"), watch, memory, load]
        tensors = []
        for callbacks in ([], others):
            model, decisions = train(strategy, ids, [RouterBiasBalancer(0.02), *callbacks])
            tensors.append([local_part(t).detach() for t in (*model.parameters(), *model.buffers())])
        logged = list(load.state_dict()["logged"].values())
        seen = watch.bytes_away, offload.offloader.moved_bytes, len(memory.history), torch.stack(logged)[:, 1:]
        result[train.__name__, strategy] = tensors, decisions, seen
    return result


def test_training_is_bitwise_the_same_with_all_of_them():
    by_rank = run(everything, 2)
    for case in by_rank[0]:
        total = sum(counts([result[case][1] for result in by_rank]))
        for result in by_rank:
            (plain, watched), _, (bytes_away, moved, rows, load) = result[case]
            assert all(map(torch.equal, watched, plain)), case
            assert len(plain) > 20
            assert bytes_away == [0] * STEPS
            assert moved > 0
            assert rows == STEPS
            assert torch.equal(load, total)
