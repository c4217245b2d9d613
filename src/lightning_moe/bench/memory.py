"""A training step under several recompute policies: memory, what a layer keeps for backward, and time.

The model is a stack of decoder layers with shared experts, set up as the strategy does it: experts over the expert-parallel
ranks, everything else with FSDP2. A step is a forward and a backward of one sequence on each rank, without an optimizer.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_moe.bench.decoder import Decoder, Widths
from lightning_moe.bench.processes import environment, launch
from lightning_moe.bench.report import machine, save
from lightning_moe.bench.storages import kept_bytes
from lightning_moe.dispatch import DISPATCHERS, select_dispatcher
from lightning_moe.dispatch.select import DispatcherName
from lightning_moe.layers import SharedExperts
from lightning_moe.parallel.apply import Parallelism, find_blocks, parallelize
from lightning_moe.parallel.mesh import MoEMesh
from lightning_moe.recompute import RecomputePolicy
from lightning_moe.recompute.policy import NAMES

SEED = 0
CHECKPOINT = "torch checkpoint"
"""Shared experts under ``torch.utils.checkpoint``, to compare with: it keeps their input and frees no output."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``bench memory``."""
    add_model_arguments(parser, ["none", "selective", "full"])
    parser.set_defaults(run=run)


def add_model_arguments(parser: argparse.ArgumentParser, policies: list[str]) -> None:
    """Declare what model is trained and how; the defaults are the width of Qwen3-30B-A3B, or a toy's on a CPU."""
    cuda = torch.cuda.is_available()
    defaults = {"layers": 16, "hidden": 2048, "ffn": 768, "shared-ffn": 768, "experts": 128, "top-k": 8, "tokens": 8192}
    toy = {"layers": 3, "hidden": 64, "ffn": 48, "shared-ffn": 48, "experts": 8, "top-k": 2, "tokens": 64}
    for name, value in (defaults if cuda else toy).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument(
        "--policies",
        nargs="+",
        default=policies,
        help=f"presets, names by commas, routed=MODE, or '{CHECKPOINT}' for shared experts under torch's own",
    )
    parser.add_argument("--chunks", type=int, default=2)
    parser.add_argument("--dispatcher", choices=DISPATCHERS, default="auto")
    parser.add_argument("--ep", type=int, default=1, help="expert-parallel ranks, one process each")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if cuda else "cpu")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--out", help="folder for the JSON and the chart")


def run(arguments: argparse.Namespace) -> None:
    """Measure, print, write."""
    for name in arguments.policies:
        policy_of(name)
    launch(_rank, arguments.ep, arguments.device, arguments)


def policy_of(name: str) -> RecomputePolicy:
    """A preset, names by commas, ``routed=MODE``, or ``CHECKPOINT``, which is none of ours.

    >>> policy_of("norm,shared_experts").norm
    True
    >>> policy_of("shared_experts") == RecomputePolicy(shared_experts=True)
    True

    """
    if name == CHECKPOINT:
        return RecomputePolicy()
    if name.startswith("routed="):
        return RecomputePolicy(routed=name.removeprefix("routed="))  # type: ignore[arg-type]
    names = name.split(",")
    return RecomputePolicy.of(names if set(names) <= set(NAMES) else name)


def formula_bytes(widths: Widths, policy: RecomputePolicy, itemsize: int) -> int:
    """What a decoder layer has to keep for backward, in bytes a token.

    In the model's dtype: the layer's input; the sum between its halves; the two norms' outputs; queries, keys, values and the
    attention's output; four times the shared experts' width; the routed experts' part, which stands at
    :class:`~lightning_moe.recompute.RecomputePolicy`. Under every policy, the routing: E probabilities (float32); of each of
    the K slots its expert (int64), its weight (float32, in the order of tokens and of experts) and the place of its row
    (int32); the sum of the weights. The inverse lengths of norms and attention's log-sum-exp are left out.

    Args:
        widths: The model's.
        policy: What is recomputed.
        itemsize: Bytes of an element of the model's dtype.

    """
    hidden, ffn, top_k = widths.hidden, widths.ffn, widths.top_k
    elements = (
        hidden
        + {
            "none": top_k * (hidden + 3 * ffn),
            "act": top_k * (hidden + 2 * ffn),
            "dispatch": 2 * top_k * ffn,
            "full": 0,
        }[policy.routed]
    )
    if not (policy.norm and policy.attention):
        elements += hidden
    if not policy.norm:
        elements += 2 * hidden
    if not policy.attention:
        elements += 2 * hidden + hidden // 2
    if not policy.shared_experts:
        elements += 4 * widths.shared_ffn
    return elements * itemsize + 4 * widths.experts + 20 * top_k + 4


def _rank(device: torch.device, arguments: argparse.Namespace) -> None:
    rows = [_measure(name, device, arguments) for name in arguments.policies]
    if dist.get_rank() == 0:
        result = {
            "benchmark": "memory",
            "layers": arguments.layers,
            "tokens": arguments.tokens,
            **asdict(widths_of(arguments)),
            "expert_parallel_size": dist.get_world_size(),
            "chunks": arguments.chunks,
            "repeats": arguments.repeats,
            "seed": SEED,
            "environment": environment(device),
            "rows": rows,
        }
        print(table(result), flush=True)
        save(result, f"memory-ep{dist.get_world_size()}", arguments.out, chart)


def widths_of(arguments: argparse.Namespace) -> Widths:
    """The model's."""
    return Widths(arguments.hidden, arguments.ffn, arguments.shared_ffn, arguments.experts, arguments.top_k)


def build(name: str, device: torch.device, arguments: argparse.Namespace) -> tuple[nn.Module, Tensor]:
    """The model, set up under a policy, and its input ``[1, S, H]``; bfloat16, or float32 on a CPU."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(SEED)
    with device:
        model = Decoder(arguments.layers, widths_of(arguments)).to(dtype)
        x = torch.randn(1, arguments.tokens, arguments.hidden, dtype=dtype, requires_grad=True)
    if name == CHECKPOINT:
        for shared in [module for module in model.modules() if isinstance(module, SharedExperts)]:
            shared.forward = partial(checkpoint, shared.forward, use_reentrant=False)  # type: ignore[method-assign]
    distribute(model, policy_of(name), arguments.chunks, arguments.dispatcher, device)
    return model, x


def distribute(
    model: nn.Module, policy: RecomputePolicy, num_chunks: int, dispatcher: DispatcherName, device: torch.device
) -> None:
    """Shard a model in place as the strategy does it, its experts over all ranks."""
    size = dist.get_world_size()
    blocks, mesh = find_blocks(model), MoEMesh.build(device.type, size, size)
    dtype = blocks[0].layer.experts.gate_up_proj.dtype
    choice = select_dispatcher(dispatcher, mesh.expert_parallel_group, device, dtype=dtype)
    parallelize([model], blocks, Parallelism(mesh, choice, num_chunks, policy, None, True))


def _measure(name: str, device: torch.device, arguments: argparse.Namespace) -> dict[str, Any]:
    """One policy's row."""
    counted = replace(policy_of(name), shared_experts=True) if name == CHECKPOINT else policy_of(name)
    model, x = build(name, device, arguments)
    step(model, x)
    # the first layer's input was there before; an op may have made a view of it
    kept = kept_bytes(partial(model, x), model, x) + x.untyped_storage().nbytes()
    formula = formula_bytes(widths_of(arguments), counted, x.element_size())
    times, peaks = _steps(model, x, arguments.repeats)
    del model, x
    gc.collect()  # a model that is set up holds itself
    return {
        "policy": name,
        "kept_bytes": kept / arguments.layers / arguments.tokens,
        "formula_bytes": formula,
        "ms": statistics.median(times),
        **peaks,
    }


def _steps(model: nn.Module, x: Tensor, repeats: int) -> tuple[list[float], dict[str, float]]:
    """Milliseconds of each step on this rank, and the peaks over all of them, everything included; zeros on a CPU."""
    step(model, x)
    if x.is_cuda:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    times = [timed(model, x) for _ in range(repeats)]
    peaks = (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()) if x.is_cuda else (0, 0)
    return times, {"allocated_gib": peaks[0] / 2**30, "reserved_gib": peaks[1] / 2**30}


def step(model: nn.Module, x: Tensor) -> None:
    """A forward and a backward; gradients add up."""
    model(x).float().square().mean().backward()


def timed(model: nn.Module, x: Tensor) -> float:
    """Milliseconds of a step on this rank; all begin together."""
    dist.barrier()
    synchronize(x.device)
    begin = time.perf_counter()
    step(model, x)
    synchronize(x.device)
    return (time.perf_counter() - begin) * 1e3


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def table(result: dict[str, Any]) -> str:
    """The rows as text."""
    lines = [
        f"{result['layers']} layers: H {result['hidden']}, F {result['ffn']}, shared {result['shared_ffn']},"
        f" E {result['experts']}, K {result['top_k']}; {result['tokens']} tokens a rank, EP {result['expert_parallel_size']},"
        f" {result['chunks']} chunks; {machine(result)}",
        f"{'policy':<28} {'kept a token and layer':>22} {'formula':>12} {'alloc GiB':>9} {'reserved':>9} {'ms':>9}",
    ]
    lines += [
        f"{row['policy']:<28} {row['kept_bytes']:>20.0f} B {row['formula_bytes']:>10.0f} B {row['allocated_gib']:>9.2f}"
        f" {row['reserved_gib']:>9.2f} {row['ms']:>9.1f}"
        for row in result["rows"]
    ]
    return "\n".join(lines)


def chart(result: dict[str, Any], figure: Any) -> None:
    """Bytes kept beside the formula, peak memory, and time, a bar for each policy."""
    rows = result["rows"]
    names = [row["policy"].replace(",", ",\n") for row in rows]
    figure.set_size_inches(11, 3.8)
    kept, peak, step = figure.subplots(1, 3)
    places = range(len(rows))
    kept.bar([i - 0.2 for i in places], [row["kept_bytes"] / 1024 for row in rows], 0.4, label="measured")
    kept.bar([i + 0.2 for i in places], [row["formula_bytes"] / 1024 for row in rows], 0.4, label="formula")
    kept.set_title("kept for backward, KiB a token and layer", fontsize=9)
    kept.legend(fontsize=7)
    peak.bar(places, [row["allocated_gib"] for row in rows])
    peak.set_title("peak allocated, GiB", fontsize=9)
    step.bar(places, [row["ms"] for row in rows])
    step.set_title("a step, ms", fontsize=9)
    for axis in (kept, peak, step):
        axis.set_xticks(list(places), names, fontsize=7, rotation=40, ha="right", rotation_mode="anchor")
