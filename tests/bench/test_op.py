"""The benchmark at toy size, as a user starts it."""

from __future__ import annotations

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
