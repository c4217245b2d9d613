"""A run as people start it: under torchrun a rank is killed; one process alone goes on, and transformers takes over."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import Qwen3MoeForCausalLM

from helpers import drill
from helpers.models import batch, computing_in, relative_error
from helpers.processes import _free_port
from helpers.training import train_plainly


def start(*command: object) -> subprocess.CompletedProcess:
    paths = [str(Path(drill.__file__).parents[1]), str(Path(drill.__file__).parents[2] / "src")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *map(str, command)], env=environment, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize(
    "accelerator",
    ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"))],
)
def test_killed_under_torchrun_resumed_alone_and_given_to_transformers(accelerator, tmp_path):
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", 2, "--master-port", _free_port()]
    killed = start(*torchrun, drill.__file__, accelerator, tmp_path, 1)
    assert killed.returncode == 1
    assert "Signal 9 (SIGKILL) received by PID" in killed.stderr
    for rank in range(2):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / f"{rank}.pid").read_text()), 0)
    assert not (tmp_path / "losses.json").exists()

    alone = start(drill.__file__, accelerator, tmp_path)
    assert alone.returncode == 0, alone.stderr
    losses, _, weights = train_plainly(1)
    assert json.loads((tmp_path / "losses.json").read_text()) == pytest.approx(losses, rel=1e-9)
    exported = Qwen3MoeForCausalLM.from_pretrained(tmp_path / "exported", experts_implementation="eager")
    errors = {name: relative_error(p, weights[name]) for name, p in exported.named_parameters()}
    assert max(errors.values()) < 1e-8, errors
    with computing_in(torch.float64), torch.no_grad():
        logits = exported(input_ids=batch(9)).logits
    assert relative_error(torch.load(tmp_path / "logits.pt"), logits) < 1e-9
