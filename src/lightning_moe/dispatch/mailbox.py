"""Small numbers between the processes of one host, through shared memory.

What a layer must know before it can allocate anything is a handful of counts from each rank. They have to reach the hosts, not
the devices, and a collective on the devices takes many times as long as a look into shared memory.
"""

from __future__ import annotations

import os
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

WORDS = 4096  # of a message; longer ones go in pieces
TURN = 1 << 32


class Mailbox:
    """An all-gather of numbers between the ranks of a group.

    A word of memory holds a number and the turn that it belongs to, and is written at once: so a reader sees from the word
    itself whether it is the one that it waits for, whatever the order in which memory shows the writes. Words of two turns
    lie side by side. A rank that writes the turn after next has read the next one's words of all ranks, who had read this
    turn's before they wrote those.

    Args:
        group: Ranks of one host. Making the mailbox is collective.
        timeout: How long a rank waits for the others' numbers.

    Raises:
        OSError: Some rank cannot share memory with the first one. All ranks raise it.

    """

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta) -> None:
        self._rank, self._size, self._timeout, self._turn = group.rank(), group.size(), timeout, 0
        self._broken = False
        path: list[str | None] = [_make(8 * 2 * self._size * WORDS) if self._rank == 0 else None]
        dist.broadcast_object_list(path, group=group, group_src=0)
        words = _open(path[0], 2 * self._size * WORDS)
        opened: list[bool] = [False] * self._size
        dist.all_gather_object(opened, words is not None, group)
        if self._rank == 0 and path[0] is not None:
            os.unlink(path[0])  # the memory lives as long as somebody has it mapped
        if words is None or not all(opened):
            raise OSError(
                f"ranks {[rank for rank, here in enumerate(opened) if not here]} do not share memory with rank 0"
            )
        self._words = words.view(2, self._size, WORDS)

    def all_gather(self, numbers: Tensor) -> Tensor:
        """Every rank's numbers.

        Args:
            numbers: int32 on the CPU, at least one, not negative, of the same shape on every rank.

        Returns:
            int64, with a dimension for the ranks before the others.

        Raises:
            TimeoutError: A rank's numbers did not come, now or in an earlier call, or it is ahead of this one.

        """
        pieces = [self._exchange(piece) for piece in torch.split(numbers.flatten().long(), WORDS)]
        return torch.cat(pieces, dim=1).view(self._size, *numbers.shape)

    def _exchange(self, numbers: Tensor) -> Tensor:
        if self._broken:
            raise TimeoutError("The ranks lost step when one of them did not tell its counts in time: start them anew.")
        self._turn += 1
        words = self._words[self._turn % 2, :, : numbers.shape[0]]
        words[self._rank] = numbers + self._turn * TURN
        deadline = time.monotonic() + self._timeout.total_seconds()
        first = self._turn * TURN
        while True:
            heard = words.clone()
            earliest, latest = heard.aminmax()
            if earliest >= first and latest < first + TURN:
                return heard - first
            if latest >= first + TURN or time.monotonic() > deadline:
                self._broken = True  # what comes later belongs to other calls
                ranks = (heard < first).any(1).nonzero().flatten().tolist()
                ahead = (heard >= first + TURN).any(1).nonzero().flatten().tolist()
                if ahead:
                    raise TimeoutError(
                        f"Ranks {ahead} of the expert-parallel group went on without this one: they do not call the same"
                        " layers in the same order."
                    )
                raise TimeoutError(
                    f"Ranks {ranks} of the expert-parallel group did not tell their counts within {self._timeout}: they"
                    " failed, or they do not call the same layers in the same order."
                )
            time.sleep(0)  # let other threads of this process run


def _open(path: str | None, num_words: int) -> Tensor | None:
    if path is None or not Path(path).exists():
        return None
    try:
        return torch.from_file(path, shared=True, size=num_words, dtype=torch.int64)
    except RuntimeError:
        return None


def _make(num_bytes: int) -> str | None:
    """A file of zeros in memory, if the machine has such a place, else on its disk."""
    try:
        handle, path = tempfile.mkstemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
        with os.fdopen(handle, "wb") as file:
            file.truncate(num_bytes)
    except OSError:
        return None
    return path
