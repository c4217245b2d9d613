"""The offload benchmark at toy size, as a user starts it."""

from __future__ import annotations

import json
import subprocess
import sys


def test_three_ways_stand_beside_what_the_link_allows(tmp_path):
    command = [sys.executable, "-m", "lightning_moe.bench", "offload", "--device", "cpu", "--repeats", "1"]
    options = ["--policies", "none", "full", "--layers", "2", "--out", str(tmp_path)]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "offload-ep1.json").read_text())
    ways = ["without", "ActivationOffload", "save_on_cpu"]
    assert [(row["policy"], row["way"]) for row in result["rows"]] == [(p, w) for p in ("none", "full") for w in ways]
    none, full = (row["moved_gib"] for row in result["rows"] if row["way"] == "ActivationOffload")
    assert none > full > 0
    assert all(speed > 0 for speed in result["link_gb_s"].values())
    assert all(row["ms"] > 0 for row in result["rows"])
    assert "GB/s" in done.stdout
