"""The bias after each step, against its formula on a count of every decision one by one."""

from __future__ import annotations

import pickle

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import nn

from callbacks.routed import LAYERS, Task, batches, counts, decoder, loader, write_down
from helpers.models import qwen3_moe
from helpers.processes import run
from helpers.training import trainer
from lightning_moe import ChunkedEPStrategy, GroupedExperts, MoELayer, TopKRouter
from lightning_moe.callbacks import ExpertLoadMonitor, RouterBiasBalancer
from lightning_moe.metrics import load_imbalance
from lightning_moe.models import swap_blocks

SPEED = 0.02


def formula(steps) -> torch.Tensor:
    """``[LAYERS, EXPERTS]`` float32, step by step."""
    bias = torch.zeros(LAYERS, 8)
    for total in steps:
        for layer, row in zip(bias, total.tolist(), strict=True):
            mean = sum(row) / len(row)
            for expert, tokens in enumerate(row):
                layer[expert] += SPEED * ((tokens < mean) - (tokens > mean))
    return bias


def biases(model) -> torch.Tensor:
    found = [module.selection_bias for module in model.modules() if isinstance(module, TopKRouter)]
    assert {bias.dtype for bias in found} == {torch.float32}
    return torch.stack(found).clone()


def fit(name, world_size, ep_size, precision, folder, max_steps, resume):
    """Micro-batches of which two make a step, with a validation in between, which does not count."""
    strategy = ChunkedEPStrategy(ep_size, recompute="selective") if name == "chunked" else name
    options = {"accumulate_grad_batches": 2, "max_steps": max_steps, "max_epochs": -1, "precision": precision}
    runner = trainer(strategy, world_size, callbacks=[RouterBiasBalancer(SPEED)], **options)
    task = Task()
    held_out = loader(batches(runner.global_rank, 1, seed=1))
    runner.fit(
        task,
        loader(batches(runner.global_rank, 6)),
        held_out,
        ckpt_path=f"{folder}/checkpoint" if resume else None,
    )
    if not resume:
        runner.save_checkpoint(f"{folder}/checkpoint")
    return task.decisions, biases(task.model)


def steps_of(by_rank, accumulate=2):
    micro_batches = list(counts([decisions for decisions, _ in by_rank]))
    return [sum(micro_batches[i : i + accumulate]) for i in range(0, len(micro_batches), accumulate)]


@pytest.mark.parametrize(("name", "precision"), [("chunked", "bf16-true"), ("ddp", "32-true")])
def test_it_follows_the_formula_over_ranks_and_survives_another_layout(name, precision, tmp_path):
    first = run(fit, 2, name, 2, 2, precision, str(tmp_path), 3, False, init=False)
    expected = formula(steps_of(first))
    assert expected.abs().max() > SPEED
    for _, bias in first:
        torch.testing.assert_close(bias, expected)
    if name == "chunked":
        again = run(fit, 1, name, 1, 1, precision, str(tmp_path), 5, True, init=False)
        torch.testing.assert_close(again[0][1], expected + formula(steps_of(again)))


def with_fabric():
    fabric = Fabric(accelerator="cpu", devices=2, strategy=ChunkedEPStrategy(2), callbacks=[RouterBiasBalancer(SPEED)])
    fabric.launch()
    model, decisions = decoder(), []
    write_down(model, decisions)
    halves = [list(model.layers.parameters()), [*model.embedding.parameters(), *model.head.parameters()]]
    model, *optimizers = fabric.setup(model, *(torch.optim.SGD(half, 0.1) for half in halves))
    for ids in batches(fabric.global_rank, 3):
        fabric.backward(model(ids).square().mean())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return decisions, biases(model.module)


def test_fabric_updates_by_itself_once_for_several_optimizers():
    by_rank = run(with_fabric, 2, init=False)
    for _, bias in by_rank:
        torch.testing.assert_close(bias, formula(steps_of(by_rank, accumulate=1)))


def test_it_evens_out_a_skewed_load():
    """Without an optimizer: only the bias moves, and a router that preferred a few experts shares out evenly."""
    torch.manual_seed(0)
    router = TopKRouter(16, 8, 2, init_std=1.0, score_function="sigmoid", selection_bias=True)
    layer, tokens = MoELayer(router, GroupedExperts(8, 16, 8)), torch.randn(512, 16) + 0.5

    def imbalance():
        return load_imbalance(torch.bincount(router(tokens).ids_TK.flatten(), minlength=8)[None]).item()

    before, balancer = imbalance(), RouterBiasBalancer(0.01)
    with torch.no_grad(), balancer.watch(layer):
        for step in range(150):
            if step == 100:
                balancer.update_speed = 0.001
            layer(tokens)
            balancer.update()
        held = biases(layer)
        layer.eval()(tokens)
        balancer.update()
        assert torch.equal(biases(layer), held), "evaluation does not count"
    assert before > 1.5
    assert imbalance() < 1.05
    weights_TK, ids_TK = router(tokens)[1:]
    scores_TK = (tokens @ router.weight.t()).sigmoid().gather(1, ids_TK)
    torch.testing.assert_close(weights_TK, scores_TK / scores_TK.sum(1, keepdim=True))


def test_a_second_model_in_fabric_leaves_the_first_one_watched():
    class Critic(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(4, 1)

        def forward(self, features):
            return self.head(features)

    balancer, monitor = RouterBiasBalancer(SPEED), ExpertLoadMonitor(log_every_n_steps=1)
    fabric = Fabric(accelerator="cpu", devices=1, callbacks=[balancer, monitor])
    with pytest.warns(UserWarning, match="watches nothing so far. `Critic` has no MoE layer"):
        critic, of_critic = fabric.setup(*with_optimizer(Critic()))
    model, optimizer = fabric.setup(*with_optimizer(decoder()))
    other, of_other = fabric.setup(*with_optimizer(Critic()))
    fabric.backward(model(batches(0, 1)[0]).square().mean())
    for stranger, its in ((critic, of_critic), (other, of_other)):
        fabric.backward(stranger(torch.ones(1, 4)).sum())
        its.step()
    assert not biases(model).any()
    assert monitor._steps == 0
    optimizer.step()
    assert biases(model).any()
    assert monitor._steps == 1
    for callback in (balancer, monitor):
        with pytest.raises(ValueError, match=r"watches a `Decoder` and cannot watch a `Decoder` as well.*detach\(\)"):
            callback.attach(decoder())
        assert callback._model is model.module
    fabric.call("on_train_end")
    pickle.dumps(balancer)


def with_optimizer(model):
    return model, torch.optim.SGD(model.parameters(), 0.1)


def on_one_rank_alone():
    model, balancer, monitor = decoder(), RouterBiasBalancer(SPEED), ExpertLoadMonitor()
    numbers = []
    with balancer.watch(model), monitor.watch(model):
        for stage in ("train", "val"):
            model.train(stage == "train")
            if dist.get_rank() == 1:
                model(batches(1, 1)[0])
            numbers.append(monitor.compute(stage))
            balancer.update()
            assert monitor.compute(stage) == {}
    return numbers, biases(model)


def test_ranks_without_a_batch_take_part():
    (numbers, bias), other = run(on_one_rank_alone, 2)
    assert len(numbers) == len(list(filter(None, numbers))) == 2
    assert numbers == other[0]
    assert bias.any()
    assert torch.equal(bias, other[1])


def test_what_cannot_be_balanced_is_refused():
    model = qwen3_moe(torch.float32)
    swap_blocks(model)
    with pytest.raises(ValueError, match="no router with a `selection_bias`.*selection_bias=True"):
        RouterBiasBalancer().attach(model)
    with pytest.raises(ValueError, match="`update_speed` not to be negative but got -1"):
        RouterBiasBalancer(-1)
