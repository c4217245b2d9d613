"""A recompute policy under the strategy, in real processes: gradients to the bit, whatever is sharded and how."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch
from lightning.fabric import Fabric

from helpers.decoder import Decoder
from helpers.models import batch, loss_of, qwen3_moe
from helpers.processes import run
from helpers.training import Task, loader, my_share, trainer
from lightning_moe import ChunkedEPStrategy, RecomputePolicy
from lightning_moe.ops.local import local_part

POLICIES = [
    "selective",
    "full",
    ["norm"],
    ["attention"],
    ["shared_experts"],
    ["norm", "attention"],
    RecomputePolicy(norm=True, shared_experts=True, routed="dispatch"),
]


def hugging_face():
    return qwen3_moe(torch.float32, attention_dropout=0.2, num_hidden_layers=3, mlp_only_layers=[1])


def gradients(make, ep_size, world_size, num_chunks, precision, policy, empty_rank):
    """One rank's shards of the gradients of two accumulated micro-batches, twice: each layer is resharded in between."""
    strategy = ChunkedEPStrategy(ep_size, num_chunks, recompute=policy, reshard_after_forward=True)
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy=strategy, precision=precision)
    fabric.launch()
    rank, model = fabric.global_rank, fabric.setup(make())
    torch.manual_seed(5 + rank)
    result = []
    for step in range(2):
        model.zero_grad()
        for micro in range(2):
            with fabric.no_backward_sync(model, enabled=micro == 0):
                ids = batch(rank, seed=2 * step + micro)
                if make is hugging_face:
                    loss = loss_of(model, ids, rank)
                else:
                    loss = model(ids[:0] if rank == empty_rank else ids).square().sum()
                fabric.backward(loss)
        result += [loss.detach(), *(local_part(p.grad).clone() for p in model.parameters())]
    return result


def differing(make, ep_size, world_size, num_chunks, precision="32-true", policies=POLICIES, empty_rank=None):
    """For each policy, the positions where it differs from ``"none"``, and how much the gradients weigh at all."""
    arguments = (make, ep_size, world_size, num_chunks, precision)
    expected = gradients(*arguments, "none", empty_rank)
    result = {}
    for policy in policies:
        actual = gradients(*arguments, policy, empty_rank)
        assert len(actual) == len(expected)
        result[str(policy)] = [
            i for i, (a, e) in enumerate(zip(actual, expected, strict=True)) if not torch.equal(a, e)
        ]
    return result, sum(tensor.abs().sum().item() for tensor in expected)


def check(world_size, *arguments) -> None:
    for by_policy, weight in run(differing, world_size, *arguments, init=False):
        assert weight > 0
        assert {policy: where for policy, where in by_policy.items() if where} == {}


@pytest.mark.parametrize("num_chunks", [1, 2])
@pytest.mark.parametrize("ep_size", [1, 2])
@pytest.mark.parametrize("make", [hugging_face, Decoder], ids=["Hugging Face", "own layers"])
def test_gradients_are_bitwise_those_under_none(make, ep_size, num_chunks):
    """On two ranks: with dropout, accumulation, and parameters that are freed after each layer's forward."""
    check(2, make, ep_size, 2, num_chunks)


@pytest.mark.parametrize("ep_size", [2, 4])
def test_on_four_ranks(ep_size):
    check(4, Decoder, ep_size, 4, 2, "32-true", ["selective", "full"])


@pytest.mark.parametrize("make", [hugging_face, Decoder], ids=["Hugging Face", "own layers"])
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_bfloat16_is_bitwise_too(make, precision):
    check(2, make, 2, 2, 2, precision, ["selective", "full"])


@pytest.mark.parametrize("num_chunks", [1, 2])
def test_a_rank_without_tokens(num_chunks):
    check(2, Decoder, 2, 2, num_chunks, "32-true", ["selective", "full", ["shared_experts"]], 1)


# --- set-up


def hooks_of(module):
    return len(module._forward_hooks), len(module._forward_pre_hooks), vars(module).get("forward")


def fit_validate_and_fit_again(policy):
    strategy = ChunkedEPStrategy(2, recompute=policy)
    task = Task(num_hidden_layers=3, mlp_only_layers=[1], attention_dropout=0.2)
    first = trainer(strategy, 2)
    batches = my_share(1, first.global_rank, 2)
    torch.manual_seed(3)
    first.fit(task, loader(batches))
    before = [hooks_of(module) for module in task.model.modules()]
    first.validate(task, loader(batches), verbose=False)
    trainer(ChunkedEPStrategy(2, recompute=policy), 2).fit(task, loader(batches))
    assert [hooks_of(module) for module in task.model.modules()] == before
    table = [row for row in str(strategy.report).splitlines() if row.startswith("recompute")]
    return task.losses, [local_part(p).detach() for p in task.model.parameters()], table


def test_setting_up_again_changes_nothing_and_the_table_says_what_is_recomputed():
    none, full = (run(fit_validate_and_fit_again, 2, policy, init=False)[0] for policy in ("none", "full"))
    assert full[0] == none[0]
    assert len(full[0]) == 10
    assert all(map(torch.equal, full[1], none[1]))
    assert [line.split(None, 1)[1] for line in none[2] + full[2]] == [
        "routed experts: none",
        "norm (6), attention (3), shared_experts (1), routed experts: full",
    ]


def tables():
    result = []
    for make, policy in ((qwen3_moe, "selective"), (Decoder, "selective"), (Decoder, ["attention"])):
        strategy = ChunkedEPStrategy(1, recompute=policy)
        fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy)
        fabric.launch()
        fabric.setup(make().float())
        result.append(dict(fabric.strategy.report.rows)["recompute"])
    return result


def test_the_table_says_what_a_model_has_not():
    assert run(tables, 1, init=False)[0] == [
        "norm (4), shared_experts (this model has none), routed experts: act",
        "norm (4), shared_experts (2), routed experts: act",
        "attention (2), routed experts: none",
    ]


def refusals():
    messages = []
    checkpointed = hugging_face()
    checkpointed.gradient_checkpointing_enable()
    for model, policy in ((checkpointed, "full"), (qwen3_moe(torch.float32), ["shared_experts"])):
        fabric = Fabric(accelerator="cpu", devices=1, strategy=ChunkedEPStrategy(1, recompute=policy))
        fabric.launch()
        with pytest.raises(ValueError) as error:  # noqa: PT011
            fabric.setup(model)
        messages.append(str(error.value))
        assert not any(isinstance(p, torch.distributed.tensor.DTensor) for p in model.parameters())
    return messages


def test_what_a_model_cannot_do_is_refused_before_it_is_sharded():
    checkpointing, missing = run(refusals, 1, init=False)[0]
    assert "own gradient checkpointing is on" in checkpointing
    assert "names 'shared_experts', but no decoder layer has" in missing


def test_the_command_line_takes_a_list_or_a_policy(tmp_path):
    script = tmp_path / "cli.py"
    script.write_text(
        textwrap.dedent("""
        from lightning.pytorch.cli import LightningCLI
        from lightning.pytorch.demos.boring_classes import BoringModel

        print(LightningCLI(BoringModel, run=False).trainer.strategy._settings.recompute)
        """)
    )
    base = [sys.executable, str(script), "--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.logger=false"]
    base.append("--trainer.strategy=lightning_moe.ChunkedEPStrategy")
    given = {
        '["norm", "moe_act"]': RecomputePolicy(norm=True, routed="act"),
        '{"class_path": "lightning_moe.RecomputePolicy", "init_args": {"attention": true, "routed": "dispatch"}}': (
            RecomputePolicy(attention=True, routed="dispatch")
        ),
    }
    for text, policy in given.items():
        command = [*base, f"--trainer.strategy.recompute={text}"]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert str(policy) in shown.stdout, shown.stderr
