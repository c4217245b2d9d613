"""How the routed experts' time grows with the number of ranks, by a model of it, beside what was measured.

Every rank has the same tokens in all sizes of the group, so its experts' products take as long in all of them: that is the
floor of ``bench op``. What grows is communication. A token travels to each other rank that holds any of its experts, so with
uniform routing (E experts, K of them a token, P ranks)

    rows(P) = T * (P - 1) * (1 - C(E - E / P, K) / C(E, K))

travel from each rank, and as many come to it. A row takes ``H`` elements, a routing weight and an id for each of K. Rows for
ranks of the same host move over its links, the others over the network, both at once. One chunk waits for all of it:

    native(P) = floor + rest + dispatch(P) + combine(P)

Several chunks run through the two lanes of :mod:`lightning_moe.overlap.lanes`, which :func:`pipelined` plays through. What
neither explains, the plan, the packing, products that lose by being cut, is taken from the first measurement and kept.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from math import comb
from pathlib import Path
from typing import Any, NamedTuple

from lightning_moe.dispatch.schedule import schedule

_DIRECTIONS = {"forward": ("forward", "none"), "full": ("both", "full")}
"""Column -> direction and mode in a result of ``bench op``."""


class Links(NamedTuple):
    """What moves rows.

    Args:
        host: 10^9 bytes a second that a GPU sends, and receives, within its host.
        network: Likewise to other hosts.
        size: GPUs of a host.
        latency: Milliseconds that a transfer takes beside its bytes.

    """

    host: float
    network: float
    size: int
    latency: float


class Pass(NamedTuple):
    """A forward, or a backward, of the layer.

    Args:
        floor: Milliseconds without communication.
        dispatched: Hidden states that travel with a row on its way out.
        combined: Likewise on its way back.
        is_backward: Whether the routing is known already.

    """

    floor: float
    dispatched: int
    combined: int
    is_backward: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``bench scaling``."""
    parser.add_argument(
        "--results", nargs="+", required=True, help="JSON files of `bench op`; the model is fitted to the first"
    )
    parser.add_argument("--sizes", nargs="+", type=int, default=[2, 4, 8, 16, 32, 64], help="expert-parallel ranks")
    parser.add_argument("--dispatcher", default="auto", help="whose rows of the results")
    parser.add_argument("--host", type=float, default=371.0, help="GB/s of a GPU to others of its host")
    parser.add_argument("--network", type=float, default=45.0, help="GB/s of a GPU to other hosts")
    parser.add_argument("--gpus", type=int, default=8, help="GPUs of a host")
    parser.add_argument("--latency", type=float, default=0.02, help="milliseconds of a transfer without bytes")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Predict and print."""
    results = [json.loads(Path(path).read_text()) for path in arguments.results]
    same = ("shape", "hidden", "ffn", "experts", "top_k", "tokens", "routing")
    if any(result[name] != results[0][name] for result in results for name in same):
        raise SystemExit("`--results` must be of one shape and one routing, with different numbers of ranks.")
    first, measured_sizes = results[0], [result["expert_parallel_size"] for result in results]
    if first["routing"] != "balanced":
        raise SystemExit("`--results` must be of balanced routing, which the model is made for.")
    if len(set(measured_sizes)) < len(measured_sizes):
        raise SystemExit(f"`--results` must be of different numbers of ranks, but are of {measured_sizes}.")
    if uneven := [size for size in arguments.sizes if size < 1 or first["experts"] % size]:
        raise SystemExit(f"`--sizes` {uneven} do not share out {first['experts']} experts evenly.")
    known = sorted({row["dispatcher"] for row in first["rows"]} - {"floor"})
    if arguments.dispatcher not in known:
        raise SystemExit(f"`--dispatcher` must be one that was measured: {', '.join(known)}.")
    links = Links(arguments.host, arguments.network, arguments.gpus, arguments.latency)
    print(table(results, arguments.sizes, arguments.dispatcher, links))


def rows_across(tokens: int, experts: int, top_k: int, ranks: int) -> float:
    """Rows that a rank sends to all others, with uniform routing."""
    elsewhere = comb(experts - experts // ranks, top_k) / comb(experts, top_k)  # no expert of a given rank is chosen
    return tokens * (ranks - 1) * (1 - elsewhere)


def transfer(rows: float, row_bytes: float, ranks: int, links: Links) -> float:
    """Milliseconds of one transfer from every rank to every other."""
    if ranks == 1 or rows == 0:
        return 0.0
    near = (min(links.size, ranks) - 1) / (ranks - 1)
    gigabytes = rows * row_bytes / 1e9
    return links.latency + 1e3 * max(gigabytes * near / links.host, gigabytes * (1 - near) / links.network)


def pipelined(work: Sequence[float], arrive: Sequence[float], leave: Sequence[float]) -> float:
    """When everything is done, if every chunk takes so long to arrive, to be worked on and to leave.

    The communication lane sees arrive(0), arrive(1), leave(0), arrive(2), leave(1), ..., of which 0 is nothing. The next chunk
    arrives no earlier than this one's work begins; this one leaves once its work is done and the last one has left.
    """
    lane = arrived = arrive[0]
    compute = left = 0.0
    for i, duration in enumerate(work):
        begin = max(compute, arrived)
        if i + 1 < len(work):
            arrived = begin
            if arrive[i + 1]:
                lane = arrived = max(lane, begin) + arrive[i + 1]
        compute = max(begin + duration, left)
        if leave[i]:
            lane = left = max(lane, compute) + leave[i]
    return max(compute, left)


def predicted(passes: Sequence[Pass], chunks: int, ranks: int, result: dict[str, Any], links: Links) -> float:
    """Milliseconds of some passes one after the other, without what the model does not explain."""
    rows = rows_across(result["tokens"], result["experts"], result["top_k"], ranks)
    hidden, slots = 2 * result["hidden"], 4 * result["top_k"]
    total = 0.0
    for floor, dispatched, combined, is_backward in passes:
        # forward sends weights and ids along, backward brings the weights' gradients back
        out, back = hidden * dispatched + (0 if is_backward else 2 * slots), hidden * combined + slots * is_backward
        if chunks == 1 or ranks == 1:
            total += floor + transfer(rows, out, ranks, links) + transfer(rows, back, ranks, links)
            continue
        plan = schedule(chunks, ranks)
        work, peers = [], []
        for chunk in plan.chunks:
            part = (chunk.units.stop - chunk.units.start) / plan.num_units
            work.append(floor * part * ((ranks - 1) / ranks if chunk.peers else 1 / ranks))
            peers.append(rows * part if chunk.peers else 0.0)
        total += pipelined(
            work,
            [transfer(count, out, ranks, links) for count in peers],
            [transfer(count, back, ranks, links) for count in peers],
        )
    return total


def measured(result: dict[str, Any], direction: str, mode: str, dispatcher: str, chunks: int) -> float | None:
    """Milliseconds in a result of ``bench op``, if it has them."""
    for row in result["rows"]:
        if (row["what"], row["direction"], row["mode"]) == ("op", direction, mode) and (
            (row["dispatcher"], row["chunks"]) == (dispatcher, chunks)
        ):
            return float(row["ms"])
    return None


def table(results: Sequence[dict[str, Any]], sizes: Sequence[int], dispatcher: str, links: Links) -> str:
    """A line for each number of ranks, direction and number of chunks; what was measured stands in brackets."""
    first = results[0]
    forward, full = (measured(first, *what, "floor", 1) for what in _DIRECTIONS.values())
    if forward is None:
        raise SystemExit("`--results` begins with a file that has no floor of a forward: it is not of `bench op`.")
    passes = {"forward": [Pass(forward, 1, 1)]}
    if full is not None:
        passes["full"] = [*passes["forward"], Pass(full - forward, 2, 1, is_backward=True)]
    by_size = {result["expert_parallel_size"]: result for result in results}
    all_chunks = sorted({row["chunks"] for row in first["rows"] if row["dispatcher"] == dispatcher})
    columns = [(name, chunks) for name in _DIRECTIONS for chunks in all_chunks]

    def cell(name: str, chunks: int, ranks: int) -> str:
        fitted = measured(first, *_DIRECTIONS[name], dispatcher, chunks)
        if fitted is None or name not in passes:
            return "-"
        here, there = (
            predicted(passes[name], chunks, size, first, links) for size in (first["expert_parallel_size"], ranks)
        )
        seen = measured(by_size[ranks], *_DIRECTIONS[name], dispatcher, chunks) if ranks in by_size else None
        return f"{fitted - here + there:.2f}" + ("" if seen is None else f" ({seen:.2f})")

    lines = [
        f"shape {first['shape']}, {first['tokens']} tokens a rank, fitted to EP {first['expert_parallel_size']};"
        f" {links.host:g} GB/s in a host of {links.size}, {links.network:g} between hosts; ms, measured ones in brackets",
        f"{'EP':>3} {'GB across':>9}  " + "".join(f"{f'{name} n={chunks}':>24}" for name, chunks in columns),
    ]
    for ranks in sizes:
        rows = rows_across(first["tokens"], first["experts"], first["top_k"], ranks)
        cells = "".join(f"{cell(name, chunks, ranks):>24}" for name, chunks in columns)
        lines.append(f"{ranks:>3} {rows * 2 * first['hidden'] / 1e9:>9.3f}  {cells}")
    return "\n".join(lines)
