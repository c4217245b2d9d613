"""Which processes of a host are still there: each locks a byte of one file, and the system unlocks it when the process ends."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import BinaryIO


class Presence:
    """Shows the other ranks that this process is there, and which of theirs are not.

    Args:
        file: The same on all ranks, open for as long as this rank is to be seen. No other handle of it may be closed meanwhile.
        rank: This one.

    """

    def __init__(self, file: BinaryIO, rank: int) -> None:
        import fcntl

        self._lock = partial(fcntl.lockf, file)  # and so the file stays open
        self._try, self._open = fcntl.LOCK_EX | fcntl.LOCK_NB, fcntl.LOCK_UN
        self._lock(self._try, 1, rank)

    def ended(self, ranks: Sequence[int]) -> list[int]:
        """Those of some other ranks whose processes are no longer there; asked about its own, a process would unlock it."""
        ended = []
        for rank in ranks:
            with suppress(OSError):  # it is locked
                self._lock(self._try, 1, rank)
                self._lock(self._open, 1, rank)
                ended.append(rank)
        return ended
