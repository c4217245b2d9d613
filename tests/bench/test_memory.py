"""The memory benchmark at toy size, as a user starts it."""

from __future__ import annotations

import json
import subprocess
import sys

POLICIES = ["torch checkpoint", "none", "selective", "full", "norm,shared_experts", "routed=dispatch"]
COMMAND = [sys.executable, "-m", "lightning_moe.bench", "memory", "--device", "cpu", "--repeats", "1", "--layers", "2"]


def test_it_measures_every_policy_beside_the_formula(tmp_path):
    options = ["--policies", *POLICIES, "--ep", "2", "--out", str(tmp_path)]
    done = subprocess.run([*COMMAND, *options], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "memory-ep2.json").read_text())
    rows = {row["policy"]: row for row in result["rows"]}
    assert list(rows) == POLICIES
    kept = {policy: row["kept_bytes"] for policy, row in rows.items()}
    assert kept["full"] < kept["selective"] < kept["norm,shared_experts"] < kept["routed=dispatch"] < kept["none"]
    width, hidden, top_k, shared = 48, 64, 2, 48
    # input, half-way sum, norms, attention, shared experts, routed experts; float32
    assert rows["none"]["formula_bytes"] == 4 * (
        2 * hidden + 2 * hidden + 5 * hidden // 2 + 4 * shared + top_k * (hidden + 3 * width)
    )
    for row in rows.values():
        # beside the formula: what router and order keep, and in float32 each norm its normalized input
        assert row["formula_bytes"] <= row["kept_bytes"] <= row["formula_bytes"] + 4 * (2 * hidden + 60)
        assert row["ms"] > 0
    assert done.stdout.count(" B ") == 2 * len(POLICIES)
