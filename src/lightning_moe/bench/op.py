"""One layer's routed experts: native, chunked, and the floor, interleaved in one run.

The op starts from expert ids and routing weights and ends with the combined output; *layer* rows time its router with it. The
forward and backward of a row share one timing. *Floor* is the same number of rows per rank on the ``local`` dispatcher, so
that communication is free: what remains is gather, grouped GEMMs, activation and reduce. With skewed routing a rank may have
more rows than that, so its time over the floor shows the imbalance too. A row's time is that of the slowest rank, the median
over repetitions in each of which all rows take turns, in an order drawn anew.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_moe.bench.processes import environment, launch
from lightning_moe.bench.report import chart, save, table
from lightning_moe.buffers import held_bytes, release_buffers
from lightning_moe.dispatch import DISPATCHERS, Dispatcher, LocalDispatcher, select_dispatcher
from lightning_moe.overlap import chunked_experts
from lightning_moe.recompute.policy import ROUTED_MODES


@dataclass(frozen=True)
class Shape:
    """One MoE layer: H hidden, F expert width, E experts, K experts a token, T tokens a rank."""

    hidden: int
    ffn: int
    experts: int
    top_k: int
    tokens: int


SEED = 0  # each rank adds its own number

SHAPES = {
    "A": Shape(2048, 768, 128, 8, 32768),  # Qwen3-30B-A3B
    "B": Shape(4096, 1536, 128, 8, 16384),  # Qwen3-235B-A22B
    "toy": Shape(32, 48, 8, 2, 64),
}


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Args:
        what: ``op``, or ``layer`` with its router.
        dispatcher: A name, or ``floor``.
        chunks: 1 is native expert parallelism.
        mode: What backward recomputes.
        direction: ``forward``, or ``both`` it and backward.

    """

    what: str
    dispatcher: str
    chunks: int
    mode: str
    direction: str

    def __str__(self) -> str:
        return f"{self.what} {self.direction} {self.mode} {self.dispatcher} n={self.chunks}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``bench op``."""
    cuda = torch.cuda.is_available()
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["A" if cuda else "toy"])
    parser.add_argument("--ep", type=int, default=2, help="expert-parallel ranks")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if cuda else "cpu")
    parser.add_argument("--dispatchers", nargs="+", choices=DISPATCHERS, default=["auto"])
    parser.add_argument("--chunks", nargs="+", type=int, default=[1, 2, 4], help="1 is native expert parallelism")
    parser.add_argument("--modes", nargs="+", choices=ROUTED_MODES, default=["none", "full"])
    parser.add_argument("--routing", nargs="+", choices=["balanced", "zipf"], default=["balanced"])
    parser.add_argument("--layer", action="store_true", help="time the whole layer with its router too")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", help="folder for the JSON and the chart")
    parser.add_argument("--trace", action="store_true", help="also write a profiler trace of each row to --out")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Measure, print, write."""
    if arguments.trace and not arguments.out:
        raise SystemExit("`--trace` needs a folder to write to: give `--out` too.")
    if min(*arguments.chunks, arguments.repeats) < 1:
        raise SystemExit("`--chunks` and `--repeats` must be at least 1.")
    for name in arguments.shape:
        if SHAPES[name].experts % arguments.ep:
            raise SystemExit(
                f"The {SHAPES[name].experts} experts of shape {name} cannot be shared out between `--ep` ranks evenly."
            )
    if arguments.out:
        Path(arguments.out).mkdir(parents=True, exist_ok=True)
    launch(_rank, arguments.ep, arguments.device, arguments)


def _rank(device: torch.device, arguments: argparse.Namespace) -> None:
    cases = [
        Case(what, dispatcher, chunks, mode, direction)
        for what in (["op", "layer"] if arguments.layer else ["op"])
        for direction, mode in [("forward", "none"), *(("both", mode) for mode in arguments.modes)]
        for dispatcher in ["floor", *arguments.dispatchers]
        for chunks in ([1] if dispatcher == "floor" else arguments.chunks)
    ]
    for shape, routing in product(arguments.shape, arguments.routing):
        if dist.get_rank() == 0:
            print(f"measuring shape {shape}, {routing} routing (on a GPU kernels are compiled first)", flush=True)
        setup = _Setup(SHAPES[shape], routing, device, arguments.dispatchers)
        rows = _measure(setup, cases, arguments.repeats)
        if arguments.trace:
            for case in cases:
                _trace(setup, case, f"{arguments.out}/trace-{shape}-{routing}")
        if dist.get_rank() == 0:
            result = {
                "benchmark": "op",
                "shape": shape,
                **asdict(SHAPES[shape]),
                "expert_parallel_size": dist.get_world_size(),
                "routing": routing,
                "repeats": arguments.repeats,
                "seed": SEED,
                "dispatchers": setup.reasons,
                "environment": environment(device),
                "rows": rows,
            }
            print(table(result), flush=True)
            save(result, f"op-{shape}-ep{dist.get_world_size()}-{routing}", arguments.out, chart)


class _Setup:
    """The tensors and dispatchers that all cases share."""

    def __init__(self, shape: Shape, routing: str, device: torch.device, dispatchers: list[str]) -> None:
        group = dist.group.WORLD
        assert group is not None
        self.shape, self.device, self.size = shape, device, dist.get_world_size()
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        generator = torch.Generator(device).manual_seed(SEED + dist.get_rank())
        options: dict[str, Any] = {"device": device, "generator": generator}
        local = shape.experts // self.size
        self.tokens_TH = torch.randn(shape.tokens, shape.hidden, **options).to(dtype).requires_grad_()
        self.grad_TH = torch.randn(shape.tokens, shape.hidden, **options).to(dtype)
        self.weights_TK = torch.rand(shape.tokens, shape.top_k, **options).requires_grad_()
        self.gate_up = (torch.randn(local, 2 * shape.ffn, shape.hidden, **options) * 0.02).to(dtype).requires_grad_()
        self.down = (torch.randn(local, shape.hidden, shape.ffn, **options) * 0.02).to(dtype).requires_grad_()
        popularity = torch.ones(shape.experts) if routing == "balanced" else 1 / torch.arange(1.0, shape.experts + 1)
        if routing == "zipf":  # popular experts should not all live on rank 0
            popularity = popularity[torch.randperm(shape.experts, generator=torch.Generator().manual_seed(SEED))]
        self.ids_TK = _draw(popularity, shape, **options)
        self.local_ids_TK = (
            self.ids_TK // self.size if shape.top_k > local else _draw(popularity[:local], shape, **options)
        )
        self.router_EH = (torch.randn(shape.experts, shape.hidden, **options) * 0.02).to(dtype).requires_grad_()
        choices = {name: select_dispatcher(name, group, device) for name in dispatchers}
        self.reasons = {name: f"{choice.name}: {'; '.join(choice.reasons)}" for name, choice in choices.items()}
        self.dispatchers: dict[str, Dispatcher] = {name: choice.dispatcher for name, choice in choices.items()}
        self.dispatchers["floor"] = LocalDispatcher()

    def call(self, case: Case) -> list[Tensor]:
        """Run one case once; returns what it is for: the output or the gradients."""
        floor = case.dispatcher == "floor"
        dispatcher = self.dispatchers[case.dispatcher]
        num_experts = self.gate_up.shape[0] if floor else self.shape.experts
        inputs = [self.tokens_TH, self.weights_TK, self.gate_up, self.down]
        with torch.set_grad_enabled(case.direction == "both"):
            weights_TK, ids_TK = self.weights_TK, self.local_ids_TK if floor else self.ids_TK
            if case.what == "layer":
                router_EH = self.router_EH[:num_experts]
                scores_TE = (self.tokens_TH @ router_EH.t()).softmax(-1, dtype=torch.float32)
                weights_TK, ids_TK = scores_TE.topk(self.shape.top_k, dim=-1)
                inputs[1] = self.router_EH
            plans = dispatcher.plan(ids_TK, weights_TK.detach(), num_experts, case.chunks)
            out_TH = chunked_experts(
                self.tokens_TH,
                weights_TK,
                self.gate_up,
                self.down,
                dispatcher,
                plans,
                case.mode,  # type: ignore[arg-type]
            )
            if case.direction == "both":
                return list(torch.autograd.grad(out_TH, inputs, self.grad_TH))
        return [out_TH]

    def flops(self, case: Case) -> float:
        """Useful floating-point operations a rank: three matrices a row, twice more in backward; recompute does not count."""
        rows = self.shape.tokens * self.shape.top_k
        forward = 2 * 3 * rows * self.shape.hidden * self.shape.ffn
        return forward * (3 if case.direction == "both" else 1)


def _draw(popularity_E: Tensor, shape: Shape, device: torch.device, generator: torch.Generator) -> Tensor:
    """Ids ``[T, K]`` without repetition, by popularity (Gumbel top-k)."""
    noise_TE = torch.rand(shape.tokens, len(popularity_E), device=device, generator=generator)
    scores_TE = popularity_E.to(device).log() - (-noise_TE.log()).log()
    return scores_TE.topk(shape.top_k, dim=1).indices


def _measure(setup: _Setup, cases: list[Case], repeats: int) -> list[dict[str, Any]]:
    memory = [_memory(setup, case) for case in cases]  # the first calls, so they warm up too
    for case in cases:
        setup.call(case)
    times: list[list[float]] = [[] for _ in cases]
    turns = random.Random(SEED)  # the same on every rank
    for _ in range(repeats):
        # in another order each time: what ran just before heats the device or lets it rest, and shows in the next one's time
        for i in turns.sample(range(len(cases)), len(cases)):
            times[i].append(_milliseconds(setup, cases[i]))
    floors = {
        (case.what, case.direction, case.mode): statistics.median(t)
        for case, t in zip(cases, times, strict=True)
        if case.dispatcher == "floor"
    }
    rows = []
    for case, case_times, case_memory in zip(cases, times, memory, strict=True):
        median = statistics.median(case_times)
        quartiles = statistics.quantiles(case_times, n=4) if len(case_times) > 1 else [median] * 3
        rows.append(
            {
                **asdict(case),
                "ms": median,
                "ms_quartiles": [quartiles[0], quartiles[2]],
                "times_floor": median / floors[case.what, case.direction, case.mode],
                "tflops": setup.flops(case) / median / 1e9,
                **case_memory,
            }
        )
    return rows


def _milliseconds(setup: _Setup, case: Case) -> float:
    """The slowest rank's time for one call."""
    dist.barrier()
    if setup.device.type == "cuda":
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        start.record()
        setup.call(case)
        stop.record()
        torch.cuda.synchronize()
        elapsed = start.elapsed_time(stop)
    else:
        begin = time.perf_counter()
        setup.call(case)
        elapsed = (time.perf_counter() - begin) * 1e3
    slowest = torch.tensor(elapsed, device=setup.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


_MEMORY = ("allocated_gib", "result_gib", "reserved_gib", "communication_gib", "alloc_retries")


def _memory(setup: _Setup, case: Case) -> dict[str, float]:
    """Of one call: the allocated peak above what was there before, and what of it is the result; the reserved peak in all.

    Beside it, the buffers of communication that the dispatcher holds afterwards, which the allocator may not know of. Largest
    over ranks, in GiB.
    """
    if setup.device.type != "cuda":
        setup.call(case)
        return dict.fromkeys(_MEMORY, 0.0)
    release_buffers()  # of the case before
    setup.call(case)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    retries = torch.cuda.memory_stats()["num_alloc_retries"]
    result = setup.call(case)
    torch.cuda.synchronize()
    peaks = [
        (torch.cuda.max_memory_allocated() - before) / 2**30,
        sum(tensor.untyped_storage().nbytes() for tensor in result) / 2**30,
        torch.cuda.max_memory_reserved() / 2**30,
        held_bytes().get("communication", 0) / 2**30,
        float(torch.cuda.memory_stats()["num_alloc_retries"] - retries),
    ]
    largest = torch.tensor(peaks, device=setup.device, dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return dict(zip(_MEMORY, largest.tolist(), strict=True))


def _trace(setup: _Setup, case: Case, prefix: str) -> None:
    # of the second call: in the first the profiler starts, on each rank at another time
    with torch.profiler.profile(schedule=torch.profiler.schedule(wait=0, warmup=1, active=1)) as profiler:
        _milliseconds(setup, case)
        profiler.step()
        _milliseconds(setup, case)
    name = "-".join(str(case).split()).replace("=", "")
    profiler.export_chrome_trace(f"{prefix}-{name}-rank{dist.get_rank()}.json.gz")
