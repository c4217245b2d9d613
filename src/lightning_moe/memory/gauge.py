"""How full a device's memory is: what the caching allocator says, or on a CPU the size of the process."""

from __future__ import annotations

import resource
import sys
from typing import NamedTuple, Protocol

import torch


class Reading(NamedTuple):
    """Bytes now, the highest since the reading before, and two counts since the process began.

    Args:
        used: In tensors; on a CPU the resident set size.
        peak: The highest of that.
        reserved: Taken from the device by the caching allocator; on a CPU the same as ``used``.
        peak_reserved: The highest of that.
        alloc_retries: How often the allocator had to free what it cached before it could serve.
        ooms: How often it could not serve at all.

    """

    used: int
    peak: int
    reserved: int
    peak_reserved: int
    alloc_retries: int
    ooms: int


class Gauge(Protocol):
    """Something to read."""

    name: str
    """What ``used`` is: ``"allocated"`` or ``"rss"``."""

    def read(self) -> Reading:
        """The figures now; peaks begin anew."""


def gauge_of(device: torch.device) -> Gauge:
    """The gauge of a device; what is no CUDA device counts as the host."""
    return CudaGauge(device) if device.type == "cuda" else HostGauge()


class CudaGauge:
    """The caching allocator of a CUDA device. No figure waits for the device.

    .. note::
        Peaks begin anew with every reading, also for others who call ``torch.cuda.max_memory_allocated``.

    """

    name = "allocated"

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def read(self) -> Reading:
        stats = torch.cuda.memory_stats_as_nested_dict(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
        return Reading(
            allocated["current"],
            allocated["peak"],
            reserved["current"],
            reserved["peak"],
            stats["num_alloc_retries"],
            stats["num_ooms"],
        )


class HostGauge:
    """The process's resident memory. Where the system cannot tell a peak, the higher one of two readings stands for it."""

    name = "rss"

    def __init__(self) -> None:
        self._before = 0

    def read(self) -> Reading:
        used, peak = _resident()
        peak, self._before = max(used, peak, self._before), used
        return Reading(used, peak, used, peak, 0, 0)


def _resident() -> tuple[int, int]:
    """Resident bytes now, and their highest since the call before."""
    try:
        with open("/proc/self/status") as status:
            fields = dict(line.split(":", 1) for line in status if line.startswith(("VmRSS", "VmHWM")))
        with open("/proc/self/clear_refs", "w") as clear:
            clear.write("5")  # the highest begins anew
    except OSError:
        unit = 1 if sys.platform == "darwin" else 1024
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        return most, most
    used, peak = (int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
    return used, peak
