"""Two ranks, bf16: chunks against native expert parallelism, repeats and modes against each other, all against float64."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from helpers.processes import run
from lightning_moe.dispatch import select_dispatcher
from lightning_moe.overlap import chunked_experts
from lightning_moe.recompute.policy import ROUTED_MODES
from overlap.dense import NUM_EXPERTS, make_case, reference

NAMES = ("out", "tokens", "weights", "gate_up", "down")
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def results_of_a_rank(name: str) -> dict[str, dict[str, float]]:
    """For each way: whether all repeats gave the same bits, and each result's relative error against float64."""
    rank, size = dist.get_rank(), dist.get_world_size()
    on_gpus = dist.get_backend() == "nccl"
    device = torch.device("cuda", rank) if on_gpus else torch.device("cpu")
    num_tokens, hidden, width, repeats = (1500, 256, 128, 20) if on_gpus else (120, 64, 32, 3)
    cases = [make_case(r, num_tokens + 7 * r, "slots", torch.bfloat16, hidden=hidden, width=width) for r in range(size)]
    mine = slice(rank * NUM_EXPERTS // size, (rank + 1) * NUM_EXPERTS // size)
    outs, tokens, weights, gate_up, down = reference(cases)
    exact = [outs[rank], tokens[rank], weights[rank], gate_up[mine], down[mine]]
    case = cases[rank]
    inputs = [case.tokens_TH, case.weights_TK, case.gate_up_E2FH[mine], case.down_EHF[mine]]
    inputs = [tensor.to(device).requires_grad_() for tensor in inputs]
    dispatcher = select_dispatcher(name, dist.group.WORLD, device).dispatcher
    found: dict[str, dict[str, float]] = {}
    native, keeping_all = None, []
    for num_chunks, mode in [(1, "none"), *((n, mode) for n in (2, 3, 4) for mode in ROUTED_MODES)]:
        first = None
        for _ in range(repeats if mode in ("none", "full") else 2):
            plans = dispatcher.plan(case.ids_TK.to(device), inputs[1].detach(), NUM_EXPERTS, num_chunks)
            out_TH = chunked_experts(*inputs, dispatcher, plans, mode)
            actual = [out_TH.detach(), *torch.autograd.grad(out_TH, inputs, case.grad_TH.to(device))]
            first = first or actual
            again = all(torch.equal(a, b) for a, b in zip(actual, first, strict=True))
            assert again, f"{num_chunks} chunks, {mode}: not the same bits twice"
        native = native or first
        keeping_all = first if mode == "none" else keeping_all
        same = all(torch.equal(a, b) for a, b in zip(first, keeping_all, strict=True))
        assert same, f"{num_chunks} chunks, {mode}: not the bits that it gives with everything kept"
        errors = [float((a.cpu().double() - e).norm() / e.norm()) for a, e in zip(first, exact, strict=True)]
        apart = [float((a - b).double().norm() / b.double().norm()) for a, b in zip(first, native, strict=True)]
        found[f"{num_chunks} {mode}"] = dict(zip(NAMES, errors, strict=True)) | {
            f"{name} from native": distance for name, distance in zip(NAMES, apart, strict=True)
        }
    return found


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("cpu", "all_to_all"),
        *(pytest.param("cuda", name, marks=two_gpus) for name in ("nvlink", "deep_ep", "all_to_all")),
    ],
)
def test_chunks_are_as_exact_as_native_expert_parallelism_and_every_mode_repeats_bit_for_bit(device, name):
    if name == "deep_ep":
        pytest.importorskip("deep_ep", exc_type=ImportError)
    for found in run(results_of_a_rank, 2, name, device=device):
        native = found["1 none"]
        for way, result in found.items():
            for what in NAMES:
                assert result[what] <= 1.02 * native[what], (way, what)
                assert 0 < native[what] < 1e-2
                # a different order of the same sums: less than what either is off
                assert result[f"{what} from native"] <= native[what], (way, what)
