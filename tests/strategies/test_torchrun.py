"""A run under torchrun itself, which starts everybody again when a rank is killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import restarted
from helpers.training import train_plainly


def test_a_rank_is_killed_and_the_restarted_run_ends_as_if_nothing_had_been(tmp_path):
    tests = Path(restarted.__file__).parents[1]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent / "src")]),
        "OMP_NUM_THREADS": "1",
    }
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "--max-restarts", "1", restarted.__file__, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    assert "Nothing was heard of rank 1" in done.stderr or "SIGTERM" in done.stderr, "rank 0 was waiting for it"
    pids = [int(path.read_text()) for path in tmp_path.glob("*.pid")]
    assert len(pids) == 4
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert json.loads((tmp_path / "losses.json").read_text()) == pytest.approx(train_plainly(1)[0], rel=1e-9)
