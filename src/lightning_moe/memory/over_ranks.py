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
        dist.all_gather_into_tensor(all_of_them, mine)
        self._copy = HostCopy(all_of_them)

    def wait(self) -> list[list[float]]:
        """``[ranks][n]``."""
        by_rank: list[list[float]] = self._copy.wait().tolist()
        return by_rank


def rank() -> int:
    """This rank, 0 where there is one process."""
    return dist.get_rank() if dist.is_initialized() else 0
