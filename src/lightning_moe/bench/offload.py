"""A training step with activations offloaded, beside the same step without and with torch's ``save_on_cpu``.

The model and the step are those of ``bench memory``. The three take turns, step by step. Beside them stands what the link
allows: a forward lasts at least as long as its activations take to leave, a backward as long as they take to return.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu

from lightning_moe.bench.memory import SEED, add_model_arguments, build, policy_of, synchronize, timed, widths_of
from lightning_moe.bench.processes import environment, launch
from lightning_moe.bench.report import machine, save
from lightning_moe.offload import ActivationOffloader

LINK_BYTES = 1 << 28


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``bench offload``."""
    add_model_arguments(parser, ["none", "full"])
    parser.add_argument("--fraction", type=float, default=1.0, help="of the bytes, that is offloaded")
    parser.add_argument("--prefetch", type=int, default=1, help="layers that return ahead of their backward")
    parser.add_argument("--min-bytes", type=int, default=1 << 20 if torch.cuda.is_available() else 1)
    parser.set_defaults(run=run, repeats=5)


def run(arguments: argparse.Namespace) -> None:
    """Measure, print, write."""
    for name in arguments.policies:
        policy_of(name)
    launch(_rank, arguments.ep, arguments.device, arguments)


def _rank(device: torch.device, arguments: argparse.Namespace) -> None:
    link = link_speed(device)
    rows = [row for name in arguments.policies for row in _measure(name, link, device, arguments)]
    if dist.get_rank() == 0:
        result = {
            "benchmark": "offload",
            "layers": arguments.layers,
            "tokens": arguments.tokens,
            **asdict(widths_of(arguments)),
            "expert_parallel_size": dist.get_world_size(),
            "fraction": arguments.fraction,
            "prefetch": arguments.prefetch,
            "repeats": arguments.repeats,
            "seed": SEED,
            "environment": environment(device),
            "link_gb_s": link,
            "rows": rows,
        }
        print(table(result), flush=True)
        save(result, f"offload-ep{dist.get_world_size()}", arguments.out, chart)


def link_speed(device: torch.device) -> dict[str, float]:
    """10^9 bytes a second between pinned host memory and the device, each way alone; on a CPU, those of a copy."""
    here = torch.empty(LINK_BYTES, dtype=torch.uint8, device=device)
    host = torch.empty(LINK_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
    speeds = {}
    for way, target, source in (("out", host, here), ("back", here, host)):
        target.copy_(source)
        synchronize(device)
        begin = time.perf_counter()
        for _ in range(4):
            target.copy_(source, non_blocking=True)
        synchronize(device)
        speeds[way] = 4 * LINK_BYTES / (time.perf_counter() - begin) / 1e9
    return speeds


def _measure(
    name: str, link: dict[str, float], device: torch.device, arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """One policy's rows: without, with this package's offload, with torch's."""
    model, x = build(name, device, arguments)
    offloader = ActivationOffloader(None, arguments.min_bytes, arguments.prefetch, arguments.fraction)

    @contextmanager
    def enabled() -> Any:
        offloader.enabled = True
        try:
            yield
        finally:
            offloader.enabled = False

    ways: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "without": nullcontext,
        "ActivationOffload": enabled,
        "save_on_cpu": lambda: save_on_cpu(pin_memory=True),
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    peaks: dict[str, int] = dict.fromkeys(ways, 0)
    with offloader.attached(model):
        offloader.enabled = False
        forward, backward = _halves(model, x)
        for _ in range(arguments.repeats + 1):
            for way, entered in ways.items():
                before = offloader.moved_bytes
                with entered():
                    took, peak = _timed(model, x)
                times[way].append(took)
                peaks[way] = max(peaks[way], peak)
                if way == "ActivationOffload":
                    moved = offloader.moved_bytes - before
    del model, x
    gc.collect()  # a model that is set up holds itself
    milliseconds = {way: statistics.median(times[way][1:]) for way in ways}  # the first step allocates on the host
    bound = max(forward, moved / link["out"] / 1e6) + max(backward, moved / link["back"] / 1e6)
    return [
        {
            "policy": name,
            "way": way,
            "allocated_gib": peaks[way] / 2**30,
            "saved_gib": (peaks["without"] - peaks[way]) / 2**30,
            "moved_gib": moved / 2**30 if way == "ActivationOffload" else None,
            "ms": milliseconds[way],
            "times_without": milliseconds[way] / milliseconds["without"],
            "bound_ms": bound if way == "ActivationOffload" else None,
        }
        for way in ways
    ]


def _timed(model: nn.Module, x: Tensor) -> tuple[float, int]:
    """Milliseconds and peak bytes of a step on this rank, everything included; no bytes on a CPU."""
    if x.is_cuda:
        torch.cuda.reset_peak_memory_stats()
    return timed(model, x), torch.cuda.max_memory_allocated() if x.is_cuda else 0


def _halves(model: nn.Module, x: Tensor) -> tuple[float, float]:
    """Milliseconds of a forward and of a backward, the medians of three after a first."""
    halves = []
    for _ in range(4):
        dist.barrier()
        synchronize(x.device)
        begin = time.perf_counter()
        loss = model(x).float().square().mean()
        synchronize(x.device)
        middle = time.perf_counter()
        loss.backward()
        synchronize(x.device)
        halves.append(((middle - begin) * 1e3, (time.perf_counter() - middle) * 1e3))
    forward, backward = (statistics.median(times) for times in zip(*halves[1:], strict=True))
    return forward, backward


def table(result: dict[str, Any]) -> str:
    """The rows as text."""
    link = result["link_gb_s"]
    lines = [
        f"{result['layers']} layers: H {result['hidden']}, F {result['ffn']}, shared {result['shared_ffn']},"
        f" E {result['experts']}, K {result['top_k']}; {result['tokens']} tokens a rank, EP {result['expert_parallel_size']};"
        f" fraction {result['fraction']}, prefetch {result['prefetch']}; {machine(result)}",
        f"link: {link['out']:.1f} GB/s out, {link['back']:.1f} GB/s back",
        f"{'policy':<14} {'way':<18} {'alloc GiB':>9} {'saved':>7} {'moved':>7} {'ms':>9} {'x without':>9} {'bound ms':>9}",
    ]
    lines += [
        f"{row['policy']:<14} {row['way']:<18} {row['allocated_gib']:>9.2f} {row['saved_gib']:>7.2f}"
        f" {_number(row['moved_gib'], 2):>7} {row['ms']:>9.1f} {row['times_without']:>9.3f} {_number(row['bound_ms'], 1):>9}"
        for row in result["rows"]
    ]
    return "\n".join(lines)


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def chart(result: dict[str, Any], figure: Any) -> None:
    """Peak memory and time, a bar for each policy and way, and what the link allows as a line."""
    rows = result["rows"]
    names = [f"{row['policy']}\n{row['way']}" for row in rows]
    figure.set_size_inches(11, 3.4)
    places = range(len(rows))
    peak, steps = figure.subplots(1, 2)
    peak.bar(places, [row["allocated_gib"] for row in rows])
    peak.set_title("peak allocated, GiB", fontsize=9)
    steps.bar(places, [row["ms"] for row in rows])
    steps.set_title("a step, ms; the line is what the link allows", fontsize=9)
    for place, row in enumerate(rows):
        if row["bound_ms"] is not None:
            steps.hlines(row["bound_ms"], place - 0.4, place + 0.4, color="black")
    for axis in (peak, steps):
        axis.set_xticks(list(places), names, fontsize=7)
