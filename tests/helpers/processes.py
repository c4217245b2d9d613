"""Real processes for tests of distributed code.

Each call starts fresh processes from a fork server that has torch, Lightning and transformers imported already, so a run
costs its own work and little else. A run that does not end in time is killed, and its processes' stacks are shown.
"""

from __future__ import annotations

import faulthandler
import io
import multiprocessing as mp
import os
import queue
import random
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_CONTEXT = mp.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["torch", "torch.distributed.fsdp", "lightning.pytorch", "transformers.models.qwen3_moe"]
)


def run(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 120,
    device: str = "cpu",
    init: bool = True,
    killed: tuple[int, ...] = (),
) -> list[Any]:
    """Call ``function(*args)`` in ``world_size`` processes; return what each returned, by rank.

    Args:
        function: Defined at the top of a module. What it returns must be picklable.
        world_size: Number of processes.
        args: Passed to each.
        timeout: Seconds until all processes are killed.
        device: ``"cuda"`` gives each process the GPU of its rank.
        init: Open the default process group; ``False`` leaves it to Lightning, which finds ranks as under ``torchrun``.
        killed: Ranks that end without a word; their exit codes stand in for what they return.

    """
    port = _free_port()
    results = _CONTEXT.Queue()
    processes = []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(world_size):
            stacks = os.path.join(folder, str(rank))
            target = (function, args, rank, world_size, port, device, init, timeout, stacks, results)
            processes.append(_CONTEXT.Process(target=_main, args=target, daemon=True))
            processes[-1].start()
        try:
            return _collect(processes, results, time.monotonic() + timeout, folder, killed)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(
    processes: list[Any], results: Any, deadline: float, folder: str, killed: tuple[int, ...] = ()
) -> list[Any]:
    done: dict[int, Any] = {}
    errors: dict[int, str] = {}
    while len(done) < len(processes) and not errors:
        try:
            rank, value, error = results.get(timeout=0.2)
            if error is None:
                done[rank] = torch.load(io.BytesIO(value), weights_only=False)
            else:
                errors[rank] = error
        except queue.Empty:
            pass
        dead = [r for r, p in enumerate(processes) if p.exitcode not in (None, 0) and r not in done]
        done |= {r: processes[r].exitcode for r in dead if r in killed}
        dead = [r for r in dead if r not in killed]
        if dead and results.empty():
            errors.update({r: f"process ended with exit code {processes[r].exitcode}" for r in dead})
        if time.monotonic() > deadline:
            stacks = [path.read_text() for path in sorted(Path(folder).iterdir())]
            raise TimeoutError(
                f"ranks {sorted(set(range(len(processes))) - set(done))} did not end in time\n" + "\n".join(stacks)
            )
    if errors:
        time.sleep(0.3)  # other ranks may have more to say
        while not results.empty():
            rank, _, error = results.get()
            if error is not None:
                errors.setdefault(rank, error)
        raise AssertionError("\n".join(f"--- rank {rank}\n{error}" for rank, error in sorted(errors.items())))
    return [done[rank] for rank in range(len(processes))]


def _main(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    rank: int,
    world_size: int,
    port: int,
    device: str,
    init: bool,
    timeout: float,
    stacks: str,
    results: Any,
) -> None:
    with open(stacks, "w") as file:
        faulthandler.dump_traceback_later(max(1.0, timeout - 2), file=file)
        try:
            _prepare(rank, world_size, port, device, init, timeout)
            results.put((rank, _packed(function(*args)), None))  # bytes: a tensor's shared memory would die with us
        except BaseException:
            results.put((rank, None, traceback.format_exc()))
        faulthandler.cancel_dump_traceback_later()
    results.close()
    results.join_thread()
    sys.stdout.flush()
    os._exit(0)  # a peer that failed must not keep this process in the teardown of its process group


def _prepare(rank: int, world_size: int, port: int, device: str, init: bool, timeout: float) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID="test",
    )
    if device == "cuda":
        torch.cuda.set_device(rank)
    if init:
        backend = "nccl" if device == "cuda" else "gloo"
        device_id = torch.device("cuda", rank) if device == "cuda" else None
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout / 2), device_id=device_id)


def _packed(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _free_port() -> int:
    """Below the ports that systems hand out by themselves, so that nobody gets it until the first rank listens."""
    while True:
        port = random.SystemRandom().randrange(10_000, 30_000)
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
