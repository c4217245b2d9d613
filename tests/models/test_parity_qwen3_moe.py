"""Loss and every gradient of a Qwen3-MoE under the strategy, against plain transformers on one process."""

from __future__ import annotations

import pytest
import torch
from lightning.fabric import Fabric

from helpers.models import batch, computing_in, full, loss_of, qwen3_moe, relative_error
from helpers.processes import run
from lightning_moe import ChunkedEPStrategy, RecomputePolicy

LAYOUTS = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (4, 2)]
CHUNKS = [1, 2, 3, 5]
MODES = ["none", "act", "dispatch", "full"]
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
PRECISION = {torch.float64: "64-true", torch.float32: "32-true"}


def reference(world_size: int, dtype: torch.dtype, **overrides):
    """What plain transformers computes: each rank's loss, and the gradients of their mean."""
    model = qwen3_moe(dtype, **overrides).double()
    with computing_in(torch.float64):
        model.set_experts_implementation("eager")  # the only one that serves float64
        losses = [loss_of(model, batch(rank), rank) for rank in range(world_size)]
        torch.stack(losses).mean().backward()
    return [loss.item() for loss in losses], {name: p.grad for name, p in model.named_parameters()}


def narrow_gradients(precision: str, world_size: int):
    """Gradients of a bfloat16 run; its weights are bfloat16 numbers, so that the reference can start from the same."""
    fabric = Fabric(
        accelerator="cpu", devices=world_size, strategy=ChunkedEPStrategy(num_chunks=3), precision=precision
    )
    fabric.launch()
    model = fabric.setup(qwen3_moe(torch.bfloat16).to(torch.float32))
    fabric.backward(loss_of(model, batch(fabric.global_rank), fabric.global_rank))
    return {name: full(p.grad) for name, p in model.module.named_parameters()}


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_bfloat16_is_no_worse_than_plain_transformers_in_bfloat16(precision):
    _, expected = reference(2, torch.bfloat16)
    plain = qwen3_moe(torch.bfloat16)
    plain.set_experts_implementation("eager")
    torch.stack([loss_of(plain, batch(rank), rank) for rank in range(2)]).mean().backward()
    gradients, *_ = run(narrow_gradients, 2, precision, 2, init=False)
    ours = {name: relative_error(gradients[name], expected[name]) for name in expected}
    theirs = {name: relative_error(p.grad, expected[name]) for name, p in plain.named_parameters()}
    assert sum(ours.values()) <= 1.25 * sum(theirs.values()), (ours, theirs)
    assert max(ours.values()) < 1.5 * max(theirs.values())


def sharded_gradients(accelerator: str, ep_size: int, edp_size: int, dtype: torch.dtype, cases: list, overrides: dict):
    """One rank's part of the same under the strategy, for each (number of chunks, mode)."""
    results = {}
    for num_chunks, mode in cases:
        policy = RecomputePolicy(routed=mode)
        strategy = ChunkedEPStrategy(expert_parallel_size=ep_size, num_chunks=num_chunks, recompute=policy)
        precision = PRECISION[dtype]
        fabric = Fabric(accelerator=accelerator, devices=ep_size * edp_size, strategy=strategy, precision=precision)
        fabric.launch()
        model = fabric.setup(qwen3_moe(dtype, **overrides))
        with computing_in(dtype):
            loss = loss_of(model, batch(fabric.global_rank).to(fabric.device), fabric.global_rank)
            fabric.backward(loss)
        gradients = {name: full(p.grad) for name, p in model.module.named_parameters()}
        results[num_chunks, mode] = loss.item(), gradients if fabric.global_rank == 0 else None
    return results


def check(layout, dtype: torch.dtype, cases: list, device: str = "cpu", **overrides) -> None:
    world_size = layout[0] * layout[1]
    arguments = (device, *layout, dtype, cases, overrides)
    by_rank = run(sharded_gradients, world_size, *arguments, device=device, init=False)
    losses, expected = reference(world_size, dtype, **overrides)
    for case in cases:
        for result, loss in zip(by_rank, losses, strict=True):
            assert abs(result[case][0] - loss) <= TOLERANCE[dtype] * abs(loss), case
        actual = by_rank[0][case][1]
        assert actual.keys() == expected.keys()
        errors = {name: relative_error(actual[name], expected[name]) for name in expected}
        assert max(errors.values()) <= TOLERANCE[dtype], (case, errors)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"ep{layout[0]}-edp{layout[1]}")
def test_gradients_equal_plain_transformers(layout):
    """Every number of chunks in every mode; 21 tokens a rank divide by 1 and 3, not by 2 and 5."""
    check(layout, torch.float64, [(num_chunks, mode) for num_chunks in CHUNKS for mode in MODES])


def test_gradients_in_float32_equal_plain_transformers():
    check((2, 2), torch.float32, [(num_chunks, mode) for num_chunks in CHUNKS for mode in MODES])


def test_router_logits_and_auxiliary_loss_are_hugging_faces():
    check((2, 1), torch.float64, [(2, "none"), (3, "full")], output_router_logits=True, router_aux_loss_coef=0.1)


def test_dense_layers_between_moe_layers():
    check((2, 1), torch.float64, [(2, "act")], num_hidden_layers=3, mlp_only_layers=[1])


def test_tied_embeddings():
    check((2, 1), torch.float64, [(2, "none")], tie_word_embeddings=True)


def test_more_chunks_than_tokens():
    check((2, 1), torch.float64, [(30, "none"), (30, "full")])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("layout", [(1, 1), (2, 1), (1, 2)], ids=lambda layout: f"ep{layout[0]}-edp{layout[1]}")
def test_gradients_on_gpus(layout, dtype):
    """The same over NCCL and CUDA streams."""
    if torch.cuda.device_count() < layout[0] * layout[1]:
        pytest.skip(f"needs {layout[0] * layout[1]} GPUs")
    check(layout, dtype, [(num_chunks, mode) for num_chunks in CHUNKS for mode in MODES], device="cuda")
