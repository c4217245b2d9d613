"""The strategy in the places where people use it."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import textwrap
from functools import partial

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import StrategyRegistry
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from helpers.models import VOCABULARY, full, qwen3_moe, relative_error
from helpers.processes import run
from helpers.training import Task, loader, my_share, trainer
from lightning_moe import (
    ChunkedEPStrategy,
    GroupedExperts,
    MoELayer,
    SharedExperts,
    TopKRouter,
    total_grad_norm,
)
from lightning_moe.strategies import fabric, pytorch

# --- one name, two frameworks


def test_it_becomes_the_flavour_of_its_owner():
    for owner, flavour, attribute in [(Trainer, pytorch, "strategy"), (Fabric, fabric, "_strategy")]:
        strategy = ChunkedEPStrategy(num_chunks=3)
        attached = getattr(owner(accelerator="cpu", devices=1, strategy=strategy), attribute)
        assert attached is strategy
        assert type(attached) is flavour.ChunkedEPStrategy
        assert isinstance(attached, ChunkedEPStrategy)
        assert attached._settings.num_chunks == 3


def test_strings_in_both_registries():
    assert type(Trainer(accelerator="cpu", strategy="chunked_ep").strategy) is pytorch.ChunkedEPStrategy
    assert type(Fabric(accelerator="cpu", strategy="chunked_ep")._strategy) is fabric.ChunkedEPStrategy
    assert "chunked_ep" in StrategyRegistry
    assert "chunked_ep" in STRATEGY_REGISTRY


def test_explicit_flavours():
    assert isinstance(Trainer(accelerator="cpu", strategy=pytorch.ChunkedEPStrategy()).strategy, ChunkedEPStrategy)
    assert isinstance(Fabric(accelerator="cpu", strategy=fabric.ChunkedEPStrategy())._strategy, ChunkedEPStrategy)
    assert not issubclass(pytorch.ChunkedEPStrategy, ChunkedEPStrategy)


def test_copies_before_it_is_attached():
    strategy = ChunkedEPStrategy(expert_parallel_size=2, recompute="full")
    for other in (copy.deepcopy(strategy), pickle.loads(pickle.dumps(strategy))):
        assert other._settings == strategy._settings
        Trainer(accelerator="cpu", devices=1, strategy=other)
    Fabric(accelerator="cpu", devices=1, strategy=strategy)
    with pytest.raises(ValueError, match="strategy"):
        Trainer(accelerator="cpu", devices=1, strategy=strategy)


def test_unattached_and_subclassed():
    with pytest.raises(RuntimeError, match="not attached yet.*Trainer.*Fabric"):
        ChunkedEPStrategy().barrier()
    with pytest.raises(TypeError, match=r"Subclass `lightning_moe.strategies.pytorch"):
        type("Mine", (ChunkedEPStrategy,), {})
    assert type("Mine", (pytorch.ChunkedEPStrategy,), {})().report is None


def test_lightning_cli(tmp_path):
    script = tmp_path / "main.py"
    script.write_text(
        textwrap.dedent("""
        import lightning_moe
        from lightning.pytorch.cli import LightningCLI
        from lightning.pytorch.demos.boring_classes import BoringModel

        cli = LightningCLI(BoringModel, run=False)
        print(type(cli.trainer.strategy), cli.trainer.strategy._settings, cli.trainer.strategy._timeout)
        """)
    )
    config = tmp_path / "config.yaml"
    config.write_text(
        textwrap.dedent("""
        trainer:
          accelerator: cpu
          devices: 1
          logger: false
          strategy:
            class_path: lightning_moe.ChunkedEPStrategy
            init_args:
              expert_parallel_size: 1
              num_chunks: 3
              recompute:
                class_path: lightning_moe.RecomputePolicy
                init_args: {routed: act}
              timeout: "0:01:00"
        """)
    )
    command = [sys.executable, str(script)]
    shown = subprocess.run(
        [*command, "--config", str(config)], capture_output=True, text=True, timeout=120, check=True
    ).stdout
    assert "pytorch.ChunkedEPStrategy" in shown
    assert "expert_parallel_size=1, num_chunks=3" in shown
    assert "routed='act'" in shown
    assert "0:01:00" in shown
    topic = "--trainer.strategy.help=lightning_moe.ChunkedEPStrategy"
    shown = subprocess.run([*command, topic], capture_output=True, text=True, timeout=120, check=True).stdout
    assert "num_chunks" in shown
    assert "part (one half, one third, ...) of an MoE layer" in " ".join(shown.split())


# --- what it does with a model


def everything_is_sharded(world_size, ep_size):
    strategy = ChunkedEPStrategy(ep_size, num_chunks=2)
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy=strategy)
    fabric.launch()
    model = fabric.setup(qwen3_moe(torch.float32)).module
    ids = my_share(1, fabric.global_rank, world_size)[0]
    with torch.no_grad():
        model(input_ids=ids)
    assert all(isinstance(p, DTensor) for p in model.parameters()), "also after an evaluation"
    assert [type(layer).__name__ for layer in model.model.layers] == ["FSDPQwen3MoeDecoderLayer"] * 2
    down = model.model.layers[0].mlp.experts.down_proj
    assert down.shape == (8, 16, 24)
    assert down.to_local().shape == (8 // ep_size, 16 // (world_size // ep_size), 24)
    return str(strategy.report), strategy.device_mesh.shape


def test_every_parameter_is_sharded_and_the_report_says_how():
    for report, shape in run(everything_is_sharded, 4, 4, 2, init=False):
        assert shape == (2, 2)
        for part in (
            "expert_data_parallel 2 x expert_parallel 2 (world 4)",
            "2 x Qwen3MoeSparseMoeBlock (model.layers.0.mlp .. model.layers.1.mlp)",
            "8 per block, 4 on each rank",
            "all_to_all over gloo",
            "chunks            2",
            "routed experts: none",
            "2 decoder layers",
        ):
            assert part in report


def auto_size(world_size, num_experts):
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy="chunked_ep")
    fabric.launch()
    fabric.setup(qwen3_moe(torch.float32, num_experts=num_experts))
    return fabric.strategy.device_mesh.shape[1]


@pytest.mark.parametrize(("world_size", "num_experts", "ep_size"), [(4, 8, 4), (4, 6, 2), (3, 8, 1), (2, 6, 2)])
def test_auto_is_the_largest_size_that_fits(world_size, num_experts, ep_size):
    assert run(auto_size, world_size, world_size, num_experts, init=False) == [ep_size] * world_size


class Block(nn.Module):
    skips = False

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(16)
        self.moe = MoELayer(TopKRouter(16, 8, 2), GroupedExperts(8, 16, 24), SharedExperts(16, 24, gated=True))

    def forward(self, x):
        return x if self.skips else x + self.moe(self.norm(x))


class OwnModel(nn.Module):
    """Somebody's own model, with this package's layers."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, ids):
        return self.head(self.blocks(self.embed(ids)))


def own_model_gradients(world_size, ep_size):
    strategy = ChunkedEPStrategy(ep_size, num_chunks=3, recompute="full")
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy=strategy, precision="64-true")
    fabric.launch()
    torch.manual_seed(0)
    model = fabric.setup(OwnModel())
    torch.set_default_dtype(torch.float64)
    ids = my_share(1, fabric.global_rank, world_size)[0]
    fabric.backward(nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten().roll(1)))
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    replicated = world_size > ep_size  # else there is nothing to gather of experts
    assert len(units) == (5 if replicated else 3), "two blocks, their experts, one root"
    return {name: full(p.grad) for name, p in model.module.named_parameters()}


@pytest.mark.parametrize("ep_size", [1, 2])
def test_a_model_of_own_layers(ep_size):
    torch.manual_seed(0)
    model = OwnModel().double()
    losses = []
    for rank in range(2):
        ids = my_share(1, rank, 2)[0]
        losses.append(nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten().roll(1)))
    torch.stack(losses).mean().backward()
    for gradients in run(own_model_gradients, 2, 2, ep_size, init=False):
        for name, parameter in model.named_parameters():
            assert relative_error(gradients[name], parameter.grad) < 1e-10, name


def loss_of(model, ids):
    return nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten().roll(1))


def gradients_of_layers_that_are_skipped(world_size, ep_size):
    """Of two micro-batches, the second of which goes around the first block; and their norm."""
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy=ChunkedEPStrategy(ep_size), precision="64-true")
    fabric.launch()
    torch.manual_seed(0)
    model = fabric.setup(OwnModel())
    torch.set_default_dtype(torch.float64)
    first, second = my_share(2, fabric.global_rank, world_size)[:2]
    with fabric.no_backward_sync(model):
        loss_of(model, first).backward()
    model.module.blocks[0].skips = True
    fabric.backward(loss_of(model, second))
    norm = total_grad_norm(model.parameters()).item()
    return {name: full(p.grad) for name, p in model.module.named_parameters()}, norm


class Skipping(LightningModule):
    """The same in the Trainer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.model = OwnModel()

    def training_step(self, ids, number):
        self.model.blocks[0].skips = number == 1
        return loss_of(self.model, ids) * 2  # Lightning's mean over micro-batches

    def on_after_backward(self):
        self.seen = {name: None if p.grad is None else full(p.grad) for name, p in self.model.named_parameters()}
        self.norm = total_grad_norm(self.model.parameters()).item()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.0)


def gradients_of_layers_that_are_skipped_in_a_trainer(world_size, ep_size):
    task = Skipping()
    torch.set_default_dtype(torch.float64)
    runner = trainer(ChunkedEPStrategy(ep_size), world_size, precision="64-true", accumulate_grad_batches=2)
    runner.fit(task, loader(my_share(2, runner.global_rank, world_size)[:2]))
    return task.seen, task.norm


@pytest.mark.parametrize("ep_size", [1, 2])
@pytest.mark.parametrize(
    "how", [gradients_of_layers_that_are_skipped, gradients_of_layers_that_are_skipped_in_a_trainer]
)
def test_experts_that_the_last_micro_batch_skips_have_the_gradients_of_those_before(how, ep_size):
    torch.manual_seed(0)
    model = OwnModel().double()
    for rank in range(2):
        for micro, ids in enumerate(my_share(2, rank, 2)[:2]):
            model.blocks[0].skips = micro == 1
            (loss_of(model, ids) / 2).backward()
    exact = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
    for gradients, norm in run(how, 2, 2, ep_size, init=False):
        for name, parameter in model.named_parameters():
            assert relative_error(gradients[name], parameter.grad) < 1e-10, name
        assert norm == pytest.approx(exact.item(), rel=1e-10)


class WithLooseExperts(nn.Module):
    """Experts outside of a layer, whose tokens somebody routes himself."""

    def __init__(self):
        super().__init__()
        self.model, self.loose = OwnModel(), GroupedExperts(4, 16, 8)

    def forward(self, ids):
        x = self.model.embed(ids).flatten(0, 1)
        first = torch.arange(len(x))[:, None] % 4
        return self.model(ids), self.loose(x, torch.ones_like(first, dtype=x.dtype), first)


def gradients_of_loose_experts(world_size):
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy=ChunkedEPStrategy(world_size), precision="64-true")
    fabric.launch()
    torch.manual_seed(0)
    model = fabric.setup(WithLooseExperts())
    torch.set_default_dtype(torch.float64)
    for micro, ids in enumerate(my_share(2, fabric.global_rank, world_size)[:2]):
        with fabric.no_backward_sync(model, enabled=micro == 0):
            logits, loose = model(ids)
            fabric.backward(logits.square().mean() + loose.square().mean())
    return {name: full(p.grad) for name, p in model.module.named_parameters()}


def test_experts_outside_of_a_layer_are_trained_like_any_parameter():
    torch.manual_seed(0)
    model = WithLooseExperts().double()
    for rank in range(2):
        for ids in my_share(2, rank, 2)[:2]:
            logits, loose = model(ids)
            ((logits.square().mean() + loose.square().mean()) / 2).backward()
    for gradients in run(gradients_of_loose_experts, 2, 2, init=False):
        for name, parameter in model.named_parameters():
            assert relative_error(gradients[name], parameter.grad) < 1e-10, name


# --- the Trainer's other ways


class ManualTask(Task):
    """Manual optimization with an optimizer for each half of the parameters."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, ids):
        loss = self.model(input_ids=ids, labels=ids).loss
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            self.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
            optimizer.step()
        self.losses.append(loss.item())

    def configure_optimizers(self):
        experts = [p for name, p in self.named_parameters() if "experts" in name]
        dense = [p for name, p in self.named_parameters() if "experts" not in name]
        return torch.optim.SGD(experts, 1.0), torch.optim.SGD(dense, 0.1)


def manual(world_size):
    runner = trainer(ChunkedEPStrategy(), world_size)
    task = ManualTask()
    before = {name: p.detach().clone() for name, p in task.model.named_parameters()}
    runner.fit(task, loader(my_share(1, runner.global_rank, world_size)))
    return {name: (full(p) - before[name]).abs().max().item() for name, p in task.model.named_parameters()}


def test_manual_optimization_updates_every_parameter():
    for changes in run(manual, 2, 2, init=False):
        assert min(changes.values()) > 0, changes


def whole_life(world_size):
    strategy = ChunkedEPStrategy()
    runner = trainer(strategy, world_size, precision="bf16-mixed", accumulate_grad_batches=2)
    task = Task()
    batches = loader(my_share(1, runner.global_rank, world_size))
    (before,) = runner.validate(task, batches, verbose=False)
    assert task.device_mesh.shape == (1, world_size)
    runner.fit(task, batches, batches)
    (after,) = runner.validate(task, batches, verbose=False)
    (tested,) = runner.test(task, batches, verbose=False)
    logits = runner.predict(task, batches)
    again = trainer(ChunkedEPStrategy(), world_size, precision="bf16-mixed", max_epochs=2)
    again.fit(task, batches)
    (later,) = again.validate(task, batches, verbose=False)
    assert logits[0].shape == (4 // world_size, 7, VOCABULARY)
    return before["val_loss"], after["val_loss"], tested["val_loss"], later["val_loss"]


def test_validate_fit_test_predict_and_fit_again():
    for before, after, tested, later in run(whole_life, 2, 2, init=False):
        assert later < after < before
        assert tested == after


def samplers(world_size):
    runner = trainer(ChunkedEPStrategy(1), world_size, use_distributed_sampler=True)
    runner.fit(Task(), torch.utils.data.DataLoader(list(my_share(1, 0, 1)[0]), batch_size=1))
    sampler = runner.train_dataloader.sampler
    return sampler.num_replicas, sampler.rank


def test_every_rank_has_its_own_data():
    assert run(samplers, 2, 2, init=False) == [(2, 0), (2, 1)]


def lightning_module_in_fabric():
    fabric = Fabric(accelerator="cpu", devices=2, strategy=ChunkedEPStrategy())
    fabric.launch()
    task = Task()
    optimizer = task.configure_optimizers()
    task.all_gather = lambda tensor: tensor
    task, optimizer = fabric.setup(task, optimizer)
    task.mark_forward_method("training_step")
    for _ in range(5):
        loss = task.training_step(my_share(1, fabric.global_rank, 2)[0])
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return task.losses


def test_a_lightning_module_in_fabric():
    for losses in run(lightning_module_in_fabric, 2, init=False):
        assert losses[-1] < losses[0]


# --- gradient sync


def count_reductions():
    fabric = Fabric(accelerator="cpu", devices=2, strategy=ChunkedEPStrategy(1))
    fabric.launch()
    model = fabric.setup(qwen3_moe(torch.float32))
    ids = my_share(1, fabric.global_rank, 2)[0]
    counts = []
    calls = []
    for name in ("reduce_scatter_tensor", "reduce_scatter_single"):  # FSDP2 calls the first, from torch 2.13 the second
        if function := getattr(dist, name, None):
            setattr(dist, name, partial(_counted, calls, function))

    def step(context):
        calls.clear()
        with context:
            fabric.backward(model(input_ids=ids, labels=ids).loss)
        counts.append(len(calls))

    step(fabric.no_backward_sync(model))
    step(fabric.no_backward_sync(model, enabled=False))
    step(fabric.no_backward_sync(model))
    with pytest.raises(KeyError), fabric.no_backward_sync(model):
        raise KeyError
    step(fabric.no_backward_sync(model, enabled=False))
    calls.clear()
    fabric.backward(model(input_ids=ids, labels=ids).loss)  # outside of any context
    counts.append(len(calls))
    return counts


def _counted(calls, function, *args, **kwargs):
    calls.append(1)
    return function(*args, **kwargs)


def test_no_communication_until_the_last_micro_batch():
    for counts in run(count_reductions, 2, init=False):
        assert counts[0] == counts[2] == 0
        assert counts[1] == counts[3] == counts[4] == 5, "two layers, two sets of experts, one root"
