"""The example scripts as a user starts them: they train, tell what they did, and resume where they stopped."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import Qwen3MoeForCausalLM

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = REPOSITORY / "examples"


@pytest.fixture
def text(monkeypatch):
    """The examples' module of that name."""
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module("text")


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    (folder / "text.txt").write_bytes(Path(argparse.__file__).read_bytes()[:20_000])
    return folder


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def train(way: str, text_folder: Path, folder: Path, steps: int, *options: str, launcher: tuple[str, ...] = ()) -> str:
    """Run a script on two CPU processes; return all it prints."""
    command = [
        sys.executable,
        *launcher,
        EXAMPLES / f"train_{way}.py",
        "--data",
        text_folder,
        "--checkpoint-dir",
        folder,
    ]
    command += ["--steps", str(steps), "--batch-size", "4", "--window", "64", *options]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY / "src")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=140, check=False)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    return output


def losses(output: str) -> list[float]:
    """What the progress bar showed."""
    return [float(loss) for loss in re.findall(r"\bloss=([\d.]+)", output)]


def validation_loss(output: str) -> float:
    return float(re.search(r"validation loss +([\d.]+)", output)[1])


@pytest.fixture(scope="module")
def at_once(text_folder, tmp_path_factory) -> str:
    """What a run prints that is not interrupted."""
    return train("fabric", text_folder, tmp_path_factory.mktemp("at_once"), 9)


@pytest.mark.parametrize("way", ["trainer", "fabric"])
def test_trains_and_resumes(way, text_folder, at_once, tmp_path):
    first = train(way, text_folder, tmp_path, 6)
    assert re.search(r"mesh +expert_data_parallel 1 x expert_parallel 2", first)
    assert re.search(r"dispatcher +all_to_all", first)
    assert re.search(r"tokens/s=\d", first)
    assert losses(first)[-1] < math.log(256) - 1  # the bar need not have shown the first steps
    assert validation_loss(first) < 4.5
    checkpoint = tmp_path / f"{way}-step=6.ckpt"
    assert (checkpoint / ".metadata").is_file()
    command = re.search(r"to train on +(.+)", first)[1]
    assert command.endswith(f"--resume {checkpoint}")

    resumed = train(way, text_folder, tmp_path, 9, "--resume", str(checkpoint))
    assert "9/9" in resumed
    assert losses(resumed)[0] < losses(first)[-1] + 0.5  # not from the start again
    assert (tmp_path / f"{way}-step=9.ckpt" / ".metadata").is_file()
    assert validation_loss(resumed) == validation_loss(at_once)


def test_torchrun_starts_the_processes_as_well(text_folder, at_once, tmp_path):
    output = train("fabric", text_folder, tmp_path, 9, launcher=TORCHRUN)
    assert validation_loss(output) == validation_loss(at_once)


def test_a_folder_without_text_is_refused(tmp_path, text):
    (tmp_path / "picture.png").write_bytes(bytes(100_000))
    with pytest.raises(SystemExit, match=r"holds 0 tokens of text .*`--data`"):
        text.windows(str(tmp_path), 64)
    with pytest.raises(SystemExit, match="is not a folder"):
        text.windows(str(tmp_path / "picture.png"), 64)


def test_windows_cover_the_files_in_order_and_hold_out_the_tail(tmp_path, text):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "second.py").write_bytes(b"b" * 500)
    (tmp_path / "first.txt").write_bytes(b"a" * 500)
    (tmp_path / "b" / "site-packages").mkdir()
    (tmp_path / "b" / "site-packages" / "other.py").write_bytes(b"c" * 500)
    train_windows, val_windows = text.windows(str(tmp_path), 50)
    assert (len(train_windows), len(val_windows)) == (18, 2)
    assert train_windows[9].tolist() == [ord("a")] * 50
    assert train_windows[10].tolist() == val_windows[1].tolist() == [ord("b")] * 50


@pytest.mark.parametrize("rank", [0, 1])
def test_a_step_draws_the_same_windows_wherever_the_run_began(rank, monkeypatch, text):
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    dataset = text.Windows(torch.arange(200, dtype=torch.uint8), 1)
    at_once = text.TrainLoader(dataset, batch_size=3, steps=5)
    batches = list(at_once)
    assert len(at_once) == len(batches) == at_once.state_dict()["step"] == 5
    later = text.TrainLoader(dataset, batch_size=3, steps=5)
    later.load_state_dict({"step": 2})
    torch.testing.assert_close(list(later), batches[2:])


def test_arms_that_recompute_differ_by_no_more_than_a_repetition(text_folder, tmp_path):
    """On CPUs in float32 by nothing at all."""
    command = [sys.executable, EXAMPLES / "compare_recompute.py", "--data", text_folder, "--out", tmp_path]
    command += ["--steps", "3", "--batch-size", "4", "--window", "64", "--arms", "full"]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY / "src")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=140, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    arms = json.loads((tmp_path / "recompute-arms-32-true.json").read_text())["arms"]
    assert [arm["recompute"] for arm in arms] == ["none", "full", "none"]
    for arm in arms:
        assert len(set(arm["losses"])) == len(set(arm["norms"])) == 3
        assert arm["distance"] == {"losses": 0.0, "norms": 0.0}


def test_finetunes_a_model_of_transformers(text_folder, tmp_path):
    """From `save_pretrained` to `from_pretrained`, and the logits are transformers' own."""
    command = [sys.executable, EXAMPLES / "finetune_hf.py", "--data", text_folder, "--out", tmp_path / "tuned"]
    command += ["--steps", "6", "--batch-size", "4", "--window", "64"]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY / "src")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=140, check=False)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert losses(output)[-1] < math.log(256) - 0.7
    assert float(re.search(r"differ by (\S+) from", output)[1]) < 1e-5
    base, tuned = (Qwen3MoeForCausalLM.from_pretrained(tmp_path / name) for name in ("tuned-base", "tuned"))
    changed = (base.lm_head.weight - tuned.lm_head.weight).norm() / base.lm_head.weight.norm()
    assert 0.1 < changed < 1, "what was loaded was trained on"
