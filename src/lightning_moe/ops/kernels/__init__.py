"""The operations as Triton kernels, for tensors on a GPU. Each one's torch reference is the public function in ``ops``.

Importing this package needs no Triton; its modules are there once :func:`have_triton` has found it.
"""

from __future__ import annotations

import functools
import importlib.util

import torch
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.int64)


def serve(*rows: Tensor) -> bool:
    """Whether the kernels take rows like these: on a GPU, integers or floats up to float32, elements of a row side by side."""
    return all(x.is_cuda and x.dtype in DTYPES and x.stride(-1) == 1 for x in rows) and have_triton()


@functools.cache
def have_triton() -> bool:
    """Whether Triton is installed; if so, the modules of this package are imported."""
    if importlib.util.find_spec("triton") is None:
        return False
    # here, since an import before each launch takes the host's time
    from lightning_moe.ops.kernels import grouped_mm, routing, rows, swiglu, weight_gradient  # noqa: F401

    return True
