"""Models built on the meta device: no process holds more than its shards, and values do not depend on the layout."""

from __future__ import annotations

import resource

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn

from helpers.models import full, qwen3_moe
from helpers.processes import run
from helpers.training import STEPS, Task, loader, my_share, trainer
from lightning_moe import ChunkedEPStrategy


class LazyTask(Task):
    """Builds its model in ``configure_model``, where Lightning wants large models built."""

    def __init__(self, **overrides):
        nn.Module.__init__(self)
        super().__init__(**overrides)
        del self.model
        self.model = None
        self.overrides = overrides

    def configure_model(self):
        if self.model is None:
            with torch.device("meta"):
                self.model = qwen3_moe(torch.float32, **self.overrides)


def in_fabric(world_size, ep_size, seed, overrides):
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy=ChunkedEPStrategy(ep_size))
    fabric.launch()
    with fabric.init_module(empty_init=True):
        model = qwen3_moe(torch.float32, **overrides)
    assert all(p.is_meta for p in model.parameters())
    torch.manual_seed(seed + fabric.global_rank)
    model = fabric.setup(model).module
    local = sum(p.to_local().numel() for p in model.parameters())
    ids = my_share(1, fabric.global_rank, world_size)[0]
    logits = model(input_ids=ids).logits
    fabric.backward(logits.square().mean())
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return {name: full(p) for name, p in model.named_parameters()}, buffers, local


def in_trainer(world_size, ep_size, precision):
    runner = trainer(ChunkedEPStrategy(ep_size), world_size, precision=precision)
    task = LazyTask()
    one_batch = my_share(1, runner.global_rank, world_size)[:1]  # and no other, so that the loss falls
    batches = loader(one_batch.repeat(STEPS, 1, 1))
    runner.fit(task, batches)
    (metrics,) = runner.validate(task, batches, verbose=False)
    return task.losses, metrics["val_loss"], {p.dtype for p in task.parameters()}


def test_values_depend_on_rank_zeros_seed_and_on_nothing_else():
    (single, buffers, _), *_ = run(in_fabric, 1, 1, 1, 5, {}, init=False)
    for world_size, ep_size in [(2, 1), (2, 2), (4, 2)]:
        for weights, _, local in run(in_fabric, world_size, world_size, ep_size, 5, {}, init=False):
            assert all(torch.equal(weights[name], single[name]) for name in single)
            total = sum(value.numel() for value in single.values())
            assert local <= 1.1 * total / world_size, "a rank holds more than its shards"
    (other, _, _), *_ = run(in_fabric, 1, 1, 1, 6, {}, init=False)
    assert not torch.equal(single["lm_head.weight"], other["lm_head.weight"])

    plain = qwen3_moe(torch.float32)
    for name, parameter in plain.named_parameters():
        assert single[name].std().item() == pytest.approx(parameter.std().item(), rel=0.25, abs=1e-6), name
    assert buffers.keys() == dict(plain.named_buffers()).keys()
    assert all(torch.equal(buffers[name], buffer) for name, buffer in plain.named_buffers())


def test_tied_embeddings_stay_tied():
    for weights, _, _ in run(in_fabric, 2, 2, 2, 5, {"tie_word_embeddings": True}, init=False):
        assert "lm_head.weight" not in weights
        assert weights["model.embed_tokens.weight"].std() > 0.1


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed"])
def test_configure_model_trains(precision):
    for losses, val_loss, dtypes in run(in_trainer, 2, 2, 2, precision, init=False):
        assert losses[-1] < losses[0]
        assert val_loss < losses[0]
        assert dtypes == {torch.bfloat16 if precision == "bf16-true" else torch.float32}


class Scale(nn.Module):
    """Nothing initializes it."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x * self.scale


def with_an_uninitialized_module():
    fabric = Fabric(accelerator="cpu", devices=1, strategy=ChunkedEPStrategy())
    fabric.launch()
    with torch.device("meta"):
        model = qwen3_moe(torch.float32)
        model.model.layers[0].scale = Scale()
    fabric.setup(model)


def test_a_module_that_nothing_initializes_is_an_error():
    with pytest.raises(AssertionError, match=r"`model.layers.0.scale` \(`Scale`\).*reset_parameters"):
        run(with_an_uninitialized_module, 1, init=False)


class Counter(nn.Module):
    """A buffer that nothing initializes, and a layer with values of its own."""

    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.arange(10))
        self.register_buffer("scale", torch.full((3,), 2.5))
        self.loaded = nn.Linear(4, 4)
        nn.init.constant_(self.loaded.weight, 7.0)

    def forward(self, x):
        return x


class PartlyReal(LazyTask):
    def __init__(self):
        super().__init__()
        self.counter = Counter()


def partly_real():
    runner = trainer(ChunkedEPStrategy(), 2)
    task = PartlyReal()
    runner.validate(task, loader(my_share(1, runner.global_rank, 2)), verbose=False)
    return task.counter.steps.tolist(), task.counter.scale.tolist(), full(task.counter.loaded.weight).unique().tolist()


def test_what_is_real_already_stays_as_it_is():
    assert run(partly_real, 2, init=False) == [(list(range(10)), [2.5] * 3, [7.0])] * 2


LARGE = {"hidden_size": 256, "moe_intermediate_size": 1024, "num_experts": 16, "num_hidden_layers": 8}


def peak_of_set_up(world_size):
    """Bytes of the whole model, and by how much this process's peak rose while its share of it was built."""
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy=ChunkedEPStrategy())
    fabric.launch()
    fabric.setup(qwen3_moe(torch.float32))  # what is allocated once, for any model
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with fabric.init_module(empty_init=True):
        model = qwen3_moe(torch.float32, **LARGE)
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    fabric.setup(model)
    return total, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024


def test_no_process_ever_holds_the_whole_model():
    for total, rise in run(peak_of_set_up, 4, 4, init=False):
        assert total > 400e6
        assert total / 4 < rise < 0.6 * total, "a quarter of the model, and one module at a time"
