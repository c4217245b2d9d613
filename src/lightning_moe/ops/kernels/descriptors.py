"""What kernels for Hopper GPUs share: descriptors for the tensor memory accelerator, parts of tiles, the GPU's constants."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

MANY = tl.constexpr(1 << 30)  # more rows than any tensor has


def tiles(tensor: Tensor, block: list[int]) -> TensorDescriptor:
    """A contiguous tensor in blocks of this size."""
    return _descriptor(tensor, list(tensor.shape), list(tensor.stride()), block)


def tiles_of_experts(rows_RX: Tensor, block: list[int]) -> TensorDescriptor:
    """A tensor of rows sorted by expert, in blocks whose bounds check ends at an expert's last row instead of the tensor's.

    An expert's ``n`` rows end at row ``end``. Of the descriptor's three dimensions for rows the first two only move the
    origin. At index ``MANY`` of the first and ``end`` of the second, and with strides that wrap around in 64 bits, index
    ``MANY - n + i`` of the third is row ``end - n + i`` of the tensor, and it is out of bounds, thus read as zero or not
    written, exactly if ``i >= n``.

    Args:
        rows_RX: ``[R, ...]``.
        block: The size of a block in the tensor's own dimensions.

    """
    stride = rows_RX.stride(0)
    wrap = (1 << 64) // MANY.value  # MANY * wrap elements are no distance at all
    shape = [MANY.value + 1, MANY.value, MANY.value, *rows_RX.shape[1:]]
    return _descriptor(rows_RX, shape, [wrap - stride, stride, stride, *rows_RX.stride()[1:]], [1, 1, *block])


def _descriptor(base: Tensor, shape: list[int], strides: list[int], block: list[int]) -> TensorDescriptor:
    """A descriptor without its constructor's checks, which take the host's time at every launch.

    What they ask for is that rows are contiguous and, like the tensor, begin at multiples of 16 bytes.
    """
    descriptor: TensorDescriptor = object.__new__(TensorDescriptor)
    vars(descriptor).update(base=base, shape=shape, strides=strides, block_shape=block)
    return descriptor


@triton.jit
def halves(tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The left and the right half of a tile's columns, which the same threads hold: nothing is moved."""
    return tile.reshape(ROWS, 2, COLUMNS // 2).permute(0, 2, 1).split()


@triton.jit
def joined(left, right, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Two tiles of the same size side by side: the inverse of :func:`halves`."""
    return tl.join(left, right).permute(0, 2, 1).reshape(ROWS, 2 * COLUMNS)


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Whether a GPU has the instructions that these kernels are written for."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == 9


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count
