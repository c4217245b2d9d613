"""A benchmark that is stopped leaves nothing behind."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "lightning_moe.bench", "step", "--device", "cpu", "--steps", "100000"]


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes by /proc")
def test_its_processes_end_with_it():
    with subprocess.Popen(COMMAND, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            wait_until(lambda: len(children(process.pid)) >= 2, 60)
            time.sleep(1)
            ranks = children(process.pid)
            process.terminate()
            assert process.wait(30) == 128 + 15
            wait_until(lambda: not any(map(is_running, ranks)), 30)
        finally:
            process.kill()
