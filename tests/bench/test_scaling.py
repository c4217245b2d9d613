"""The model of how the op grows: its rows against real routing, its pipeline by hand, its table against a file."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from lightning_moe.bench.__main__ import main
from lightning_moe.bench.scaling import Links, pipelined, rows_across, transfer
from lightning_moe.ops.routing import count_needs

RESULT = Path(__file__).parents[2] / "benchmarks/results/op-A-ep2-balanced.json"
MEASURED = sorted({row["dispatcher"] for row in json.loads(RESULT.read_text())["rows"]} - {"floor"})


@pytest.mark.parametrize(("experts", "top_k", "ranks"), [(16, 4, 4), (8, 2, 8), (12, 3, 2), (6, 2, 1)])
def test_rows_are_those_of_uniform_routing(experts, top_k, ranks):
    num_tokens = 40_000
    scores_TE = torch.rand(num_tokens, experts, generator=torch.Generator().manual_seed(0))
    counts_12P = torch.zeros(1, 2, ranks, dtype=torch.int64)
    count_needs(scores_TE.topk(top_k).indices, experts, counts_12P)
    others = counts_12P[0, 0].sum().item() * (ranks - 1) / ranks
    assert rows_across(num_tokens, experts, top_k, ranks) == pytest.approx(others, rel=0.01)


def test_the_slower_way_decides():
    links = Links(host=400.0, network=50.0, size=4, latency=0.5)
    assert transfer(1000, 1e6, 4, links) == pytest.approx(0.5 + 2.5)
    assert transfer(1000, 1e6, 7, links) == pytest.approx(0.5 + 10.0)  # half of it to other hosts
    assert transfer(1000, 1e6, 1, links) == transfer(0, 1e6, 4, links) == 0


def test_the_pipeline_by_hand():
    # own rows, two chunks of the peers', own rows: the second arrives beside the first one's work
    assert pipelined([2, 4, 4, 2], [0, 1, 1, 0], [0, 1, 1, 0]) == 12
    # arrivals take longer than the work that they are to hide behind: 6, 6, then 4 and 1
    assert pipelined([1, 4, 4, 1], [0, 6, 6, 0], [0, 0, 0, 0]) == 17
    # the last sums are not back when the own rows are done
    assert pipelined([2, 4, 2], [0, 1, 0], [0, 5, 0]) == 2 + 4 + 5
    assert pipelined([3], [2], [4]) == 9


def test_no_pipeline_beats_either_lane_or_loses_to_none():
    rng = random.Random(0)
    for _ in range(200):
        work, arrive, leave = ([rng.choice([0, 1, 2, 5]) for _ in range(5)] for _ in range(3))
        time = pipelined(work, arrive, leave)
        assert max(sum(work), sum(arrive) + sum(leave)) <= time <= sum(work) + sum(arrive) + sum(leave)


def scaling(monkeypatch, capsys, *options: str) -> list[list[str]]:
    monkeypatch.setattr("sys.argv", ["bench", "scaling", *options])
    main()
    return [line.split() for line in capsys.readouterr().out.splitlines()]


def test_the_table_is_fitted_to_the_first_file_and_shows_the_others(monkeypatch, capsys, tmp_path):
    result = json.loads(RESULT.read_text())
    ms = {
        (row["direction"], row["mode"], row["dispatcher"], row["chunks"]): row["ms"]
        for row in result["rows"]
        if row["what"] == "op"
    }
    other = tmp_path / "op-A-ep4.json"
    other.write_text(json.dumps(result | {"expert_parallel_size": 4}))
    _, _, two, four, eight = scaling(
        monkeypatch, capsys, "--results", str(RESULT), str(other), "--sizes", "2", "4", "8"
    )
    keys = [(*way, "auto", n) for way in (("forward", "none"), ("both", "full")) for n in (1, 2, 4)]
    assert two == ["2", two[1], *(word for key in keys for word in (f"{ms[key]:.2f}", f"({ms[key]:.2f})"))]
    assert four[3::2] == [f"({ms[key]:.2f})" for key in keys]
    assert (eight[0], len(eight)) == ("8", 2 + len(keys))
    native, chunked = float(eight[2]), float(eight[4])
    assert native > float(four[2]) > ms[keys[0]]  # one chunk waits for all that more ranks send
    assert chunked < native
    *_, free = scaling(monkeypatch, capsys, "--results", str(RESULT), "--sizes", "8", "--host", "1e9", "--latency", "0")
    assert free[2:] == [f"{ms[key]:.2f}" for key in keys]  # nothing grows where transfers take no time


@pytest.mark.parametrize(
    ("changed", "files", "options", "said"),
    [
        ({"shape": "B"}, ["result", "other"], [], "of one shape and one routing"),
        ({"routing": "zipf"}, ["other"], [], "of balanced routing"),
        ({}, ["result", "other"], [], r"different numbers of ranks, but are of \[2, 2\]"),
        ({}, ["result"], ["--sizes", "2", "3"], r"`--sizes` \[3\] do not share out 128 experts"),
        ({}, ["result"], ["--dispatcher", "nvlink"], f"one that was measured: {', '.join(MEASURED)}"),
    ],
)
def test_what_does_not_fit_is_refused(changed, files, options, said, monkeypatch, capsys, tmp_path):
    paths = {"result": RESULT, "other": tmp_path / "other.json"}
    paths["other"].write_text(json.dumps(json.loads(RESULT.read_text()) | changed))
    with pytest.raises(SystemExit, match=said):
        scaling(monkeypatch, capsys, "--results", *(str(paths[name]) for name in files), *options)
