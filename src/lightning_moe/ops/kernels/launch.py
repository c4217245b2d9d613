"""Launching a compiled kernel without asking again how it was compiled.

Triton examines every argument at every launch, which takes longer on the host than many of our kernels take on the device. What
it looks for is known here: an argument is a tensor whose memory starts at a multiple of 16 bytes, a number that the kernel
was told not to specialize on, or a constant. Until a layer's first matrix product is launched the device has nothing to do, so
the launches before it are on the clock.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime import driver

_compiled: dict[tuple[Any, ...], Any] = {}


def launch(
    kernel: triton.JITFunction,
    grid: tuple[int, ...],
    memory: tuple[Any, ...],
    numbers: tuple[int | float, ...],
    constants: tuple[Any, ...],
    **options: int,
) -> None:
    """Run ``kernel[grid](*memory, *numbers, *constants, **options)`` on the current stream.

    Args:
        kernel: Its parameters come in this order; the numbers are named in its ``do_not_specialize`` (floats need not be).
        grid: Up to three sizes.
        memory: Tensors, the first one at least, descriptors of tensors, or ``None`` where the kernel takes that.
        numbers: Below 2**31, or floats.
        constants: ``tl.constexpr`` parameters.
        options: Of the compiler: ``num_warps`` and ``num_stages``.

    """
    addresses: list[Any] = []
    kinds: list[Any] = []
    together = 0
    for x in memory:
        if isinstance(x, Tensor):
            address = x.data_ptr()
            together |= address
            addresses.append(address)
            kinds.append(x.dtype)
        else:
            addresses.append(x)
            kinds.append(None if x is None else (x.base.dtype, *x.block_shape))
    if together % 16:
        kernel[grid](*memory, *numbers, *constants, **options)
        return
    device = torch.cuda.current_device()
    key = (kernel.fn, device, constants, *kinds, *options.values())  # a kernel's own hash takes a lock
    compiled = _compiled.get(key)
    if compiled is None:
        _compiled[key] = kernel[grid](*memory, *numbers, *constants, **options)
        return
    # what `compiled[grid](...)` does, without what Triton's profiler asks for
    stream, nothing = driver.active.get_current_stream(device), (None, None, None)
    what = (compiled.function, compiled.packed_metadata, *nothing, *addresses, *numbers, *constants)
    compiled.run(*(*grid, 1, 1)[:3], stream, *what)


def current_stream(device: torch.device) -> int:
    """The handle of a device's current stream; 0 on a CPU, where Triton's interpreter is."""
    handle: int = driver.active.get_current_stream(device.index) if device.type == "cuda" else 0
    return handle


def blocks(count: int, size: int) -> int:
    """How many blocks of a size cover so many; ``triton.cdiv`` for the host, where Triton's own is slow."""
    return -(-count // size)


def power_of_2(count: int) -> int:
    """The smallest power of two that is not smaller."""
    return 1 << (count - 1).bit_length()
