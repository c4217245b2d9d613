"""Figures of every rank, compared."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from lightning_moe.dispatch.base import HostCopy


class OverRanks:
    """Numbers of all ranks on their way to this one; on a GPU the host does not wait until it asks for them.

    Every rank makes one with as many numbers, at the same point: it is a collective.

    Args:
        figures: This rank's, ``[n]``.
        device: This rank's.

    """

    def __init__(self, figures: Sequence[float], device: torch.device) -> None:
        mine = torch.tensor(figures, dtype=torch.float64)
        if not dist.is_initialized():
            self._copy = HostCopy(mine[None])
            return
        if f"{device.type}:nccl" in dist.get_backend_config():
            mine = mine.pin_memory().to(device, non_blocking=True)
        all_of_them = mine.new_empty(dist.get_world_size(), len(figures))
        dist.all_gather(list(all_of_them.unbind()), mine)
        self._copy = HostCopy(all_of_them)

    @property
    def have_come(self) -> bool:
        """Whether the host need not wait."""
        return self._copy.has_arrived

    def wait(self) -> list[list[float]]:
        """``[ranks][n]``."""
        return self._copy.wait()
