"""Saving beside training: jobs that run one after another in a thread."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from lightning_moe.checkpoint.ranks import on_first_rank
from lightning_moe.checkpoint.save import packed, save_folder

_log = logging.getLogger(__name__)


class Saves:
    """Writes checkpoints, one after another, at once or beside training.

    Beside training, what is saved is copied to the CPU first, and the ranks talk over a group of their own, so that their
    messages cannot be mistaken for those of a training step. After a job that failed none runs until :meth:`wait` has told of
    it: an old checkpoint stays where a new one could not be written.

    Args:
        beside: Write in a thread. At the end of the program pending jobs are finished.
        timeout: How long a rank waits for the others.

    """

    def __init__(self, beside: bool, timeout: timedelta | None) -> None:
        self._beside = beside
        self._executor: ThreadPoolExecutor | None = None
        self._timeout = timeout
        self._group: dist.ProcessGroup | None = None
        self._jobs: list[Future[None]] = []
        self._failure: Exception | None = None

    def folder(self, path: Path, state: dict[str, Any], rest: dict[str, Any]) -> None:
        """Write a folder, see :func:`~lightning_moe.checkpoint.save.save_folder`. Collective."""
        self.wait()
        self.then(partial(save_folder, path, self._kept(state), packed(rest), self._open_group()))

    def file(self, content: dict[str, Any], write: Callable[[dict[str, Any]], None]) -> None:
        """Write a single file, on rank 0. Collective.

        Args:
            content: What rank 0 has to say.
            write: Writes it.

        """
        self.wait()
        self.then(partial(on_first_rank, partial(write, self._kept(content)), self._open_group()))

    def then(self, job: Callable[[], None]) -> None:
        """Run a job once what was submitted before is done. It must fail on all ranks or on none."""
        if not self._beside:
            job()
            return
        if self._executor is None:
            # a new thread is on the first device, and what it asks CUDA for would take memory there
            device = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
            initializer = None if device is None else partial(torch.cuda.set_device, device)
            self._executor = ThreadPoolExecutor(1, "checkpoint", initializer)
        self._jobs.append(self._executor.submit(self._run, job))

    def wait(self) -> None:
        """Return once all jobs are done.

        Raises:
            Exception: What the first job that failed since the last call raised.

        """
        jobs, self._jobs = self._jobs, []
        for job in jobs:
            job.result()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _kept(self, state: dict[str, Any]) -> dict[str, Any]:
        """A state that training does not change."""
        kept: dict[str, Any] = tree_map_only(Tensor, _copied, state) if self._beside else state
        return kept

    def _open_group(self) -> dist.ProcessGroup | None:
        """The ranks as a group for the thread; ``None``, all, where there is no thread."""
        if self._group is None and self._beside:
            self._group = dist.new_group(backend="gloo", timeout=self._timeout)
        return self._group

    def _run(self, job: Callable[[], None]) -> None:
        if self._failure is not None:
            return
        try:
            job()
        except Exception as error:
            _log.error("A checkpoint could not be saved beside training: %s", error)
            self._failure = error


def _copied(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor) and tensor.device_mesh.device_type != "cpu" and tensor.device.type == "cpu":
        return tensor  # it was copied from a device
    return tensor.to("cpu", copy=True)
