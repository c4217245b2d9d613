"""Small numbers between the processes of one host, through shared memory.

What a layer must know before it can allocate anything is a handful of counts from each rank. They have to reach the hosts, not
the devices, and a collective on the devices takes many times as long as a look into shared memory. A device writes its counts
there itself, so no host waits for its own before all others can read them.

The file behind the memory also shows who is still there: each rank locks a byte of it, and the system unlocks it when the
rank's process ends, however it ends.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_moe.dispatch.presence import Presence

WORDS = 1 << 16  # of a message
TURN = 1 << 32
_SPIN = 1e-3  # seconds; what takes longer is looked for less often
_LOOK = 0.1  # seconds between looks for ranks that have ended
_MAPPED = 3  # cudaHostRegisterPortable | cudaHostRegisterMapped: kernels write to it under the host's address


class Blank(NamedTuple):
    """Where numbers are to be written that will be told.

    Args:
        words: int64, each to be written once, at once, in the order of the current stream.
        mark: A multiple of 2**32, to be added to each; a number is at least 0 and less than 2**31.

    """

    words: Tensor
    mark: int


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
        self._registered: bool | None = None
        path: list[str | None] = [_make(8 * 2 * self._size * WORDS) if self._rank == 0 else None]
        dist.broadcast_object_list(path, group=group, group_src=0)
        mine = _open(path[0], self._rank)
        opened: list[bool] = [False] * self._size
        dist.all_gather_object(opened, mine is not None, group)
        if self._rank == 0 and path[0] is not None:
            os.unlink(path[0])  # the memory lives as long as somebody has it mapped
        if mine is None or not all(opened):
            raise OSError(
                f"ranks {[rank for rank, here in enumerate(opened) if not here]} do not share memory with rank 0"
            )
        memory, self._presence = mine
        self._read = memoryview(memory).cast("q")
        self._all = torch.frombuffer(memory, dtype=torch.int64)
        self._mine = self._all.view(2, self._size, WORDS)[:, self._rank].unbind()

    def blank(self, shape: Sequence[int], device: torch.device) -> Blank:
        """Where this rank's numbers of the next turn are to be written: in the shared memory, if the device can.

        Whether or not they are told, the turn is over with that: what others may have read of it is not written again.

        Raises:
            TimeoutError: A rank's numbers did not come in an earlier call.
            ValueError: There are more numbers than a message holds.

        """
        if self._broken:
            raise TimeoutError("The ranks lost step when one of them did not tell its counts in time: start them anew.")
        if prod(shape) > WORDS:
            raise ValueError(
                f"{list(shape)} counts are more than the {WORDS} that ranks can tell each other at once: use a smaller"
                " `num_chunks`."
            )
        self._turn += 1
        if device.type == "cuda" and not self._may_write():
            return Blank(torch.empty(*shape, dtype=torch.int64, device=device), self._turn * TURN)
        return Blank(self._mine[self._turn % 2][: prod(shape)].view(*shape), self._turn * TURN)

    def tell(self, blank: Blank) -> Letter:
        """Tell all ranks' hosts some numbers.

        It waits for nothing, but for the device where that cannot write to the shared memory.

        Args:
            blank: The last one from :meth:`blank`, of the same shape on every rank.

        """
        words, turn = blank.words, blank.mark // TURN
        if words.is_cuda:
            self._mine[turn % 2][: words.numel()].copy_(words.flatten())
        return Letter(self, turn, words.numel())

    def _may_write(self) -> bool:
        """Whether devices may write to the memory."""
        if self._registered is None:
            self._registered = _register(self, self._all)
        return self._registered

    def collect(self, turn: int, count: int) -> list[list[int]]:
        """Wait for every rank's numbers; see :class:`Letter`."""
        starts = [(turn % 2 * self._size + rank) * WORDS for rank in range(self._size)]
        first, begin, patience = turn * TURN, time.monotonic(), self._timeout.total_seconds()
        gone, look = list[int](), _LOOK
        while True:
            heard = [self._read[start : start + count].tolist() for start in starts]
            if all(first <= min(words) and max(words) < first + TURN for words in heard):
                return [[word - first for word in words] for words in heard]
            waited, latest = time.monotonic() - begin, max(map(max, heard))
            late = [rank for rank, words in enumerate(heard) if min(words) < first]
            if gone:  # and what they told before is not there
                self._broken = True
                raise dist.DistNetworkError(
                    f"Ranks {gone} of the expert-parallel group have ended without telling their counts."
                )
            if waited > look:
                look = waited + _LOOK
                gone = self._presence.ended([rank for rank in late if rank != self._rank])  # its own device may be late
                continue
            if latest >= first + TURN or waited > patience:
                self._broken = True  # what comes later belongs to other calls
                ahead = [rank for rank, words in enumerate(heard) if max(words) >= first + TURN]
                if ahead:
                    raise TimeoutError(
                        f"Ranks {ahead} of the expert-parallel group went on without this one: they do not call the same"
                        " layers in the same order."
                    )
                raise TimeoutError(
                    f"Ranks {late} of the expert-parallel group did not tell their counts within {self._timeout}: they"
                    " failed, or they do not call the same layers in the same order."
                )
            time.sleep(0 if waited < _SPIN else 5e-5)  # let other threads of this process run


class Letter:
    """Numbers on their way between the hosts.

    Args:
        mailbox: Where they are told.
        turn: Of the mailbox.
        count: Numbers that each rank tells.

    """

    def __init__(self, mailbox: Mailbox, turn: int, count: int) -> None:
        self._mailbox, self._turn, self._count = mailbox, turn, count

    def wait(self) -> list[list[int]]:
        """Every rank's numbers.

        Raises:
            DistNetworkError: A rank's process has ended.
            TimeoutError: A rank's numbers did not come, or it is ahead of this one.

        """
        return self._mailbox.collect(self._turn, self._count)


def _open(path: str | None, rank: int) -> tuple[mmap.mmap, Presence] | None:
    if path is None or not Path(path).exists():
        return None
    try:
        file = open(path, "r+b")  # noqa: SIM115 # its locks last as long as it is open
        return mmap.mmap(file.fileno(), 0), Presence(file, rank)
    except (OSError, ValueError):
        return None


def _make(num_bytes: int) -> str | None:
    """A file of zeros in memory, if the machine has such a place, else on its disk."""
    try:
        handle, path = tempfile.mkstemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
    except OSError:
        return None
    try:
        os.posix_fallocate(handle, 0, num_bytes)  # of a file with holes, the first write that finds no room would kill
    except OSError:
        os.unlink(path)
        return None
    finally:
        os.close(handle)
    return path


def _register(owner: Mailbox, words: Tensor) -> bool:
    """Let devices write to the memory; where they may not, a copy takes the host's time."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if int(runtime.cudaHostRegister(words.data_ptr(), words.nbytes, _MAPPED)) == 0:
        weakref.finalize(owner, lambda: runtime.cudaHostUnregister(words.data_ptr()))
        return True
    with suppress(RuntimeError):  # CUDA would blame the next kernel for it
        torch.zeros(1, device="cuda")
    return False
