"""The benchmark at toy size, as a user starts it."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys

import pytest

from lightning_moe.bench.__main__ import main


def test_it_measures_every_case_beside_the_floor(tmp_path):
    command = [
        sys.executable,
        "-m",
        "lightning_moe.bench",
        "op",
        "--device",
        "cpu",
        "--shape",
        "toy",
        "--out",
        str(tmp_path),
    ]
    options = [
        "--repeats",
        "3",
        "--dispatchers",
        "all_to_all",
        "--chunks",
        "1",
        "2",
        "--modes",
        "none",
        "full",
        "--layer",
    ]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "op-toy-ep2-balanced.json").read_text())
    rows = result["rows"]
    cases = [(row["what"], row["direction"], row["mode"], row["dispatcher"], row["chunks"]) for row in rows]
    assert cases == [
        (what, direction, mode, *case)
        for what in ("op", "layer")
        for direction, mode in [("forward", "none"), ("both", "none"), ("both", "full")]
        for case in [("floor", 1), ("all_to_all", 1), ("all_to_all", 2)]
    ]
    floors = {(row["what"], row["direction"], row["mode"]): row["ms"] for row in rows if row["dispatcher"] == "floor"}
    for row in rows:
        low, high = row["ms_quartiles"]
        assert 0 < low <= row["ms"] <= high
        assert row["times_floor"] == pytest.approx(row["ms"] / floors[row["what"], row["direction"], row["mode"]])
        passes = 3 if row["direction"] == "both" else 1
        assert row["tflops"] == pytest.approx(passes * 6 * 64 * 2 * 32 * 48 / row["ms"] / 1e9)
    assert {"device", "torch", "commit"} <= result["environment"].keys()
    assert done.stdout.count("all_to_all") >= 6


def test_a_trace_is_of_one_call(tmp_path):
    """Of each case and rank, whole, without the call before that started the profiler."""
    options = ["--shape", "toy", "--device", "cpu", "--chunks", "2", "--modes", "none", "--repeats", "1"]
    command = [sys.executable, "-m", "lightning_moe.bench", "op", *options, "--trace", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("trace-*.json.gz"))) == 8
    for rank in range(2):
        for name in ("forward-none-floor-n1", "both-none-auto-n2"):
            with gzip.open(tmp_path / f"trace-toy-balanced-op-{name}-rank{rank}.json.gz") as file:
                events = [event.get("name") for event in json.load(file)["traceEvents"]]
            assert events.count("_ChunkedExperts") == events.count("_ChunkedExpertsBackward") == name.count("both")
            assert any("mm" in event for event in events if event)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["op", "--trace"], "`--trace` needs a folder"),
        (["op", "--ep", "3"], "shared out"),
        (["op", "--chunks", "0"], "at least 1"),
        (["op", "--repeats", "0"], "at least 1"),
        (["memory", "--policies", "everything"], "'selective'.*'everything'"),
        (["step", "--tokens", "50"], "--sequence"),
        (["step", "--steps", "3"], "--warmup"),
        (["step", "--recompute", "x"], "'x'"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(options, said, monkeypatch):
    command, *rest = options
    monkeypatch.setattr(sys, "argv", ["bench", command, "--device", "cpu", *rest])
    with pytest.raises((SystemExit, ValueError), match=said):
        main()
