"""Starting one process a device, and what is known about the machine."""

from __future__ import annotations

import os
import platform
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

TIMEOUT = timedelta(minutes=5)


def launch(function: Callable[..., None], num_processes: int, device_type: str, *args: Any) -> None:
    """Call ``function(device, *args)`` in that many processes with a process group over them.

    Args:
        function: Defined at the top of a module.
        num_processes: Ranks.
        device_type: ``"cuda"`` or ``"cpu"``.
        args: Passed on; must be picklable.

    """
    if device_type == "cuda" and torch.cuda.device_count() < num_processes:
        raise SystemExit(
            f"{num_processes} GPUs are needed and {torch.cuda.device_count()} are here; choose a smaller `--ep`."
        )
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    # whoever ends this process, by `timeout` say, ends the others with it: daemons go with an orderly exit
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    arguments = (function, num_processes, device_type, port, args)
    spawn(_main, arguments, nprocs=num_processes, daemon=True)  # type: ignore[no-untyped-call]


def _main(
    rank: int, function: Callable[..., None], world_size: int, device_type: str, port: int, args: tuple[Any, ...]
) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world_size))
    if device_type == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", timeout=TIMEOUT, device_id=device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=TIMEOUT)
    try:
        function(device, *args)
    finally:
        dist.destroy_process_group()


def environment(device: torch.device) -> dict[str, str]:
    """Machine, versions and commit, to stand beside a result."""
    facts = {
        "device": torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if device.type == "cuda":
        facts["cuda"] = str(torch.version.cuda)
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    try:
        here = Path(__file__).parent
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=True)
        changed = subprocess.run(["git", "status", "--porcelain"], cwd=here, capture_output=True, text=True, check=True)
        facts["commit"] = commit.stdout.strip() + (" and changes" if changed.stdout.strip() else "")
    except (OSError, subprocess.CalledProcessError):
        facts["commit"] = "unknown"
    return facts
