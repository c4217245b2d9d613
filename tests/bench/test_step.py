"""The benchmark of whole steps at toy size, as a user starts it."""

from __future__ import annotations

import json
import subprocess
import sys

COMMAND = [sys.executable, "-m", "lightning_moe.bench", "step", "--device", "cpu"]


def test_three_arms_train_alike_and_are_timed(tmp_path):
    options = ["--steps", "4", "--warmup", "1", "--repeats", "2", "--microbatches", "2", "--learning-rate", "0.01"]
    done = subprocess.run(
        [*COMMAND, *options, "--out", str(tmp_path)], capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "step-ep2.json").read_text())["rows"]
    assert [(row["arm"], row["chunks"]) for row in rows] == [("native", 1), ("chunked", 2), ("native again", 1)]
    for row in rows:
        assert (len(row["losses"]), len(row["norms"]), len(row["times"])) == (4, 4, 2)
        assert row["losses"][-1] < row["losses"][0]
        assert min(row["times"]) > 0
        # chunks change the order of some sums in float32, a repetition nothing
        assert max(row["losses_apart"], row["norms_apart"]) <= (1e-5 if row["chunks"] > 1 else 0)
    assert done.stdout.count("\nnative") == 2
