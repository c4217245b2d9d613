"""Whole training steps of a Qwen3-MoE, in chunks against native expert parallelism: time, memory, and the course of training.

Three arms train the same model from the same weights on the same batches: one chunk, several, and one again. What the two
native arms differ by is noise. Steps are real ones: micro-batches whose gradients add up, clipping, AdamW with a learning rate
that rises at first: without that, training from weights at random blows up what arms differ by.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sysconfig
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lightning_moe.bench.memory import distribute, synchronize
from lightning_moe.bench.processes import environment, launch
from lightning_moe.bench.report import machine, save
from lightning_moe.dispatch import DISPATCHERS
from lightning_moe.models.rotary import keep_rotary_in_float32
from lightning_moe.parallel.apply import reshard
from lightning_moe.parallel.gradients import clip_grad_norm_
from lightning_moe.parallel.materialize import materialize
from lightning_moe.recompute import RecomputePolicy
from lightning_moe.strategies.core import no_gradient_sync

SEED = 0
MAX_NORM = 1.0
RISE = 20
"""Steps over which the learning rate rises."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``bench step``; the defaults are Qwen3-30B-A3B with fewer layers, or a toy on a CPU."""
    cuda = torch.cuda.is_available()
    defaults = {
        "layers": 16,
        "hidden": 2048,
        "ffn": 768,
        "experts": 128,
        "top-k": 8,
        "vocabulary": 151936,
        "tokens": 16384,
        "sequence": 4096,
    }
    toy = {
        "layers": 2,
        "hidden": 64,
        "ffn": 32,
        "experts": 8,
        "top-k": 2,
        "vocabulary": 256,
        "tokens": 64,
        "sequence": 32,
    }
    for name, value in (defaults if cuda else toy).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--microbatches", type=int, default=4, help="of so many tokens a rank, in a step")
    parser.add_argument("--chunks", type=int, default=2, help="to compare with one")
    parser.add_argument("--dispatcher", choices=DISPATCHERS, default="auto")
    parser.add_argument("--recompute", default="full", help="a preset")
    parser.add_argument("--ep", type=int, default=2, help="expert-parallel ranks, one process each")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if cuda else "cpu")
    parser.add_argument("--warmup", type=int, default=3, help="steps before those that are timed")
    parser.add_argument("--repeats", type=int, default=5, help="steps that are timed")
    parser.add_argument("--steps", type=int, default=50, help="steps of each arm, these included")
    parser.add_argument("--learning-rate", type=float, default=3e-4, help=f"reached after {RISE} steps")
    parser.add_argument("--out", help="folder for the JSON and the chart")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Measure, print, write."""
    if arguments.tokens % arguments.sequence:
        raise SystemExit("`--tokens` must be a multiple of `--sequence`.")
    if arguments.steps < arguments.warmup + arguments.repeats or arguments.repeats < 1:
        raise SystemExit(
            "`--steps` must not be less than `--warmup` and `--repeats` together, and these at least 0 and 1."
        )
    RecomputePolicy.of(arguments.recompute)
    launch(_rank, arguments.ep, arguments.device, arguments)


def _rank(device: torch.device, arguments: argparse.Namespace) -> None:
    arms = [
        {"arm": arm, **_train(chunks, device, arguments)}
        for arm, chunks in (("native", 1), ("chunked", arguments.chunks), ("native again", 1))
    ]
    native = statistics.median(arms[0]["times"] + arms[2]["times"])
    for arm in arms:
        arm["speedup"] = native / arm["ms"]
        for what in ("losses", "norms"):
            arm[f"{what}_apart"] = max(abs(a - b) for a, b in zip(arm[what], arms[0][what], strict=True))
    if dist.get_rank() == 0:
        result = {
            "benchmark": "step",
            **{name: value for name, value in vars(arguments).items() if name not in ("run", "out", "device")},
            "seed": SEED,
            "environment": environment(device),
            "rows": arms,
        }
        print(table(result), flush=True)
        save(result, f"step-ep{arguments.ep}", arguments.out, chart)


def _train(chunks: int, device: torch.device, arguments: argparse.Namespace) -> dict[str, Any]:
    """One arm: its curves, and the time and memory of the steps after the warm-up."""
    model = _build(chunks, device, arguments)
    optimizer = AdamW(model.parameters(), arguments.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = LambdaLR(optimizer, lambda number: min(1.0, (number + 1) / RISE))
    batches = _batches(device, arguments)
    losses, norms, times = [], [], []
    measured = range(arguments.warmup, arguments.warmup + arguments.repeats)
    peaks: dict[str, float] = {}
    for number in range(arguments.steps):
        if number == measured.start and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        dist.barrier()
        synchronize(device)
        begin = time.perf_counter()
        loss, norm = _step(model, optimizer, list(islice(batches, arguments.microbatches)))
        synchronize(device)
        if number in measured:
            times.append((time.perf_counter() - begin) * 1e3)
        if number == measured.stop - 1:
            peaks = _peaks(device)
        dist.all_reduce(loss)
        losses.append(loss.item() / dist.get_world_size())
        norms.append(norm.item())
        schedule.step()
    del model, optimizer, schedule
    gc.collect()  # a model that is set up holds itself
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return {"chunks": chunks, "ms": statistics.median(times), "times": times, **peaks, "losses": losses, "norms": norms}


def _build(chunks: int, device: torch.device, arguments: argparse.Namespace) -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    heads = max(arguments.hidden // 64, 1)
    config = Qwen3MoeConfig(  # type: ignore[call-arg]
        vocab_size=arguments.vocabulary,
        hidden_size=arguments.hidden,
        num_hidden_layers=arguments.layers,
        num_attention_heads=heads,
        num_key_value_heads=max(heads // 8, 1),
        head_dim=128 if arguments.hidden >= 1024 else 16,
        num_experts=arguments.experts,
        num_experts_per_tok=arguments.top_k,
        moe_intermediate_size=arguments.ffn,
        norm_topk_prob=True,
        tie_word_embeddings=False,
        use_cache=False,
    )
    torch.manual_seed(SEED)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.device("meta"):
        model: nn.Module = Qwen3MoeForCausalLM(config)  # type: ignore[no-untyped-call]
    model.to(dtype)
    keep_rotary_in_float32(model)
    distribute(model, RecomputePolicy.of(arguments.recompute), chunks, arguments.dispatcher, device)
    materialize(model, device)
    return model.train()


def _step(model: nn.Module, optimizer: Optimizer, micro_batches: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The loss of this rank, a mean over its micro-batches, and the norm of all gradients."""
    total = torch.zeros((), device=micro_batches[0].device)
    for number, ids_BS in enumerate(micro_batches):
        with no_gradient_sync(model, enabled=number + 1 < len(micro_batches)):
            loss = model(input_ids=ids_BS, labels=ids_BS).loss / len(micro_batches)
            loss.backward()
        total += loss.detach()
    norm = clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    optimizer.zero_grad()
    reshard(model)
    return total, norm


def _batches(device: torch.device, arguments: argparse.Namespace) -> Iterator[Tensor]:
    """Bytes of Python's standard library as ids ``[B, S]``, others on each rank, the same for each arm."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    count, length = arguments.tokens // arguments.sequence, arguments.sequence
    generator = torch.Generator().manual_seed(SEED + dist.get_rank())
    while True:
        starts = torch.randint(len(text) - length, (count, 1), generator=generator)
        yield text[starts + torch.arange(length)].long().to(device)


def _peaks(device: torch.device) -> dict[str, float]:
    """Largest over ranks: GiB, and how often the allocator had to free memory to find some."""
    if device.type != "cuda":
        return dict.fromkeys(("allocated_gib", "reserved_gib", "alloc_retries"), 0.0)
    figures = [
        torch.cuda.max_memory_allocated() / 2**30,
        torch.cuda.max_memory_reserved() / 2**30,
        float(torch.cuda.memory_stats()["num_alloc_retries"]),
    ]
    largest = torch.tensor(figures, device=device, dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return dict(zip(("allocated_gib", "reserved_gib", "alloc_retries"), largest.tolist(), strict=True))


def table(result: dict[str, Any]) -> str:
    """The arms as text."""
    lines = [
        f"{result['layers']} layers: H {result['hidden']}, F {result['ffn']}, E {result['experts']}, K {result['top_k']};"
        f" {result['microbatches']} x {result['tokens']} tokens a rank and step, EP {result['ep']}, recompute"
        f" {result['recompute']}; {machine(result)}",
        f"{'arm':<14} {'chunks':>6} {'ms':>9} {'range':>17} {'speedup':>8} {'alloc GiB':>9} {'reserved':>9} {'retries':>7}"
        f" {'last loss':>10} {'max |loss|':>11} {'max |norm|':>11}",
    ]
    lines += [
        f"{row['arm']:<14} {row['chunks']:>6} {row['ms']:>9.1f} {min(row['times']):>8.1f}-{max(row['times']):<8.1f}"
        f" {row['speedup']:>8.3f} {row['allocated_gib']:>9.2f} {row['reserved_gib']:>9.2f} {row['alloc_retries']:>7.0f}"
        f" {row['losses'][-1]:>10.5f} {row['losses_apart']:>11.2e} {row['norms_apart']:>11.2e}"
        for row in result["rows"]
    ]
    return "\n".join([*lines, "speedup: over the median of both native arms; max: largest distance from the first arm"])


def chart(result: dict[str, Any], figure: Any) -> None:
    """Loss and gradient norm of the three arms, and the time of a step."""
    figure.set_size_inches(11, 3.4)
    loss, norm, step = figure.subplots(1, 3)
    for axis, what, title in ((loss, "losses", "loss"), (norm, "norms", "gradient norm")):
        for row in result["rows"]:
            axis.plot(row[what], label=row["arm"], linewidth=1)
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("step", fontsize=8)
        axis.legend(fontsize=7)
    step.bar([row["arm"] for row in result["rows"]], [row["ms"] for row in result["rows"]])
    step.set_title("a step, ms", fontsize=9)
    step.tick_params(labelsize=7)
